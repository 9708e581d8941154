"""How many cores an engine may use, and whether they multiply bfloat16 fast, from what /proc and /sys say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from stages.generate.machine import bfloat16_is_slow, cpus_of, quota_cores, usable_cores, usable_cpus

CPU = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
NODE = "sys/devices/system/node/node{}/cpulist"
V2, V1 = "sys/fs/cgroup/{}cpu.max", "sys/fs/cgroup/cpu/{}cpu.cfs_{}_us"
EIGHT = frozenset(range(8))


def machine(root: Path, *more: Mapping[str, str]) -> Path:
    """Write files below *root*: later ones replace earlier ones."""
    for files in more:
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text + "\n")
    return root


HYPERTHREADS = {CPU.format(cpu): f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}
"""4 cores with 2 threads each."""
NEIGHBOURS = {CPU.format(cpu): f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}" for cpu in range(8)}
"""The same, numbered as on many virtual machines."""


def v1(path: str, quota: int, period: int = 100_000) -> dict[str, str]:
    return {V1.format(path, "quota"): str(quota), V1.format(path, "period"): str(period)}


@pytest.mark.parametrize(
    ("files", "cpus", "cores"),
    [
        ({}, EIGHT, 8),
        (HYPERTHREADS, EIGHT, 4),
        (NEIGHBOURS, EIGHT, 4),
        (HYPERTHREADS, {0, 1, 4}, 2),
        (NEIGHBOURS, {1, 2}, 2),
        (HYPERTHREADS | {NODE.format(0): "0-1,4-5", NODE.format(1): "2-3,6-7"}, EIGHT, 2),
        (HYPERTHREADS | {NODE.format(0): "0,4", NODE.format(1): "1-3,5-7"}, EIGHT, 3),
        (HYPERTHREADS | {NODE.format(0): "0,4", NODE.format(10): "1-3,5-7"}, {0, 1, 4, 5}, 1),
        ({NODE.format(0): "0-7", NODE.format(1): ""}, EIGHT, 8),
        ({NODE.format(0): "8-15"}, EIGHT, 8),
        ({NODE.format(0): "?", CPU.format(0): "?"}, EIGHT, 8),
    ],
)
def test_cores_are_physical_ones_of_one_node_that_the_affinity_allows(
    files: Mapping[str, str], cpus: frozenset[int], cores: int, tmp_path: Path
) -> None:
    assert usable_cores(cpus, machine(tmp_path, files)) == cores


@pytest.mark.parametrize(
    ("cgroup", "files", "cores"),
    [
        ("0::/", {V2.format(""): "max 100000"}, 8),
        ("0::/", {V2.format(""): "350000 100000"}, 3),
        ("0::/", {V2.format(""): "50000 100000"}, 1),
        ("0::/a/b", {V2.format("a/b/"): "max 100000", V2.format("a/"): "200000 100000"}, 2),
        ("0::/a/b", {V2.format("a/b/"): "100000 50000", V2.format("a/"): "900000 100000"}, 2),
        ("0::/on/the/host", {V2.format(""): "300000 100000"}, 3),
        ("0::/../beside", {V2.format(""): "300000 100000", V2.format("beside/"): "100000 100000"}, 3),
        ("4:cpu:/a\n0::/", v1("a/", 250_000) | v1("", -1), 2),
        ("4:cpu:/a\n0::/", v1("a/", -1) | v1("", 200_000, 50_000), 4),
        ("4:cpu:/docker/1f\n0::/", v1("", 600_000), 6),
        (
            "4:cpuacct,cpu:/a",
            {name.replace("/cpu/", "/cpuacct,cpu/"): text for name, text in v1("a/", 300_000).items()},
            3,
        ),
        ("3:cpuset:/a\n2:cpuacct:/a", v1("a/", 100_000), 8),
        ("1:cpu:/\n0::/a", {V2.format("unified/a/"): "200000 100000"}, 2),
        ("0::/", {V2.format(""): "nonsense"}, 8),
    ],
)
def test_of_the_smallest_quota_of_all_cgroups_whole_cpus_count(
    cgroup: str, files: Mapping[str, str], cores: int, tmp_path: Path
) -> None:
    assert usable_cores(EIGHT, machine(tmp_path, files, {"proc/self/cgroup": cgroup})) == cores


THREE_NODES = {NODE.format(0): "0-1", NODE.format(1): "2-4", NODE.format(2): "8-9"}


@pytest.mark.parametrize(
    ("files", "num_engines", "found"),
    [
        ({}, 2, [(EIGHT, 2), (EIGHT, 2)]),
        ({NODE.format(0): "0-7", NODE.format(1): ""}, 2, [(EIGHT, 2), (EIGHT, 2)]),
        (THREE_NODES, 1, [(EIGHT, 1)]),
        (THREE_NODES, 2, [({2, 3, 4}, 1), ({0, 1}, 1)]),
        (THREE_NODES, 3, [({2, 3, 4}, 2), ({0, 1}, 1), ({2, 3, 4}, 2)]),
    ],
)
def test_engines_take_numa_nodes_in_turn_the_largest_first(
    files: Mapping[str, str], num_engines: int, found: list[tuple[set[int], int]], tmp_path: Path
) -> None:
    root = machine(tmp_path, files)
    assert [cpus_of(engine, num_engines, EIGHT, root) for engine in range(num_engines)] == found


def test_without_a_quota_there_are_cores_without_end(tmp_path: Path) -> None:
    assert quota_cores(tmp_path) > 1_000_000
    files = {V2.format(""): "350000 100000", "proc/self/cgroup": "0::/"}
    assert quota_cores(machine(tmp_path, files)) == 3


def test_this_machine_has_a_core_and_no_more_cores_than_cpus() -> None:
    assert 1 <= usable_cores(usable_cpus()) <= len(usable_cpus())


@pytest.mark.parametrize(
    ("text", "is_slow"),
    [
        ("processor : 0\nflags\t\t: fpu avx2 avx512f avx512_bf16 avx512_vnni\n", False),
        ("flags\t\t: fpu avx512f amx_bf16\n", False),
        ("Features\t: fp asimd bf16\n", False),
        ("flags\t\t: fpu avx2 avx512f avx512_vnni\n", True),
        ("Features\t: fp asimd\n", True),
        ("vendor : unknown\n", False),
    ],
)
def test_bfloat16_is_slow_where_the_cpu_has_no_instructions_for_it(text: str, is_slow: bool, tmp_path: Path) -> None:
    assert not bfloat16_is_slow(tmp_path)
    assert bfloat16_is_slow(machine(tmp_path, {"proc/cpuinfo": text})) is is_slow
