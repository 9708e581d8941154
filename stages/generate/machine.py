"""What this machine gives an engine: cores, memory, and whether the cores multiply bfloat16 fast.

Knows neither flags nor torch. Reads /proc and /sys below a root folder. Files that are missing, as on another system,
limit nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Final

ROOT: Final = Path("/")
FAST_BFLOAT16: Final = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Flags in /proc/cpuinfo of CPUs that multiply bfloat16; the last one is Arm's."""


def usable_cpus() -> Set[int]:
    """Return the logical CPUs that this thread may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else frozenset(range(os.cpu_count() or 1))


def usable_cores(cpus: Set[int], root: Path = ROOT) -> int:
    """Return how many threads can compute at full speed on *cpus*, at least 1.

    These are the physical cores of the NUMA node that has the most of them: two threads of a core share its units, and
    memory of another node is far. Of a cgroup's quota only whole CPUs count: when a quota is used up, all threads stop
    until the next period.
    """
    cores = {_siblings(cpu, root) & cpus or frozenset({cpu}) for cpu in cpus}
    nodes = [_cpu_list(path) for path in root.glob("sys/devices/system/node/node[0-9]*/cpulist")]
    in_one_node = max((sum(1 for core in cores if core & node) for node in nodes), default=0)
    return max(1, min([in_one_node or len(cores), *_quotas(root)]))


def cpus_of(engine: int, num_engines: int, cpus: Set[int], root: Path = ROOT) -> tuple[Set[int], int]:
    """Return which of *cpus* an engine of several uses, and how many of the engines share these.

    If there are several NUMA nodes, engines take them in turn, the largest first.
    """
    folder = root / "sys/devices/system/node"
    nodes = [_cpu_list(path) & cpus for path in sorted(folder.glob("node[0-9]*/cpulist"))]
    nodes = sorted((node for node in nodes if node), key=len, reverse=True)
    if num_engines == 1 or len(nodes) < 2:
        return cpus, num_engines
    turn = engine % len(nodes)
    return nodes[turn], len(range(turn, num_engines, len(nodes)))


def quota_cores(root: Path = ROOT) -> int:
    """Return how many whole CPUs the quotas of this process' cgroups allow; a very large number without a quota."""
    return min(_quotas(root), default=sys.maxsize)


def free_memory_bytes() -> int:
    """Return the memory that is free now, in this machine and container (cgroup v2)."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux: guess half of the memory
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    try:
        limit, used = (Path("/sys/fs/cgroup", name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return free
    return free if limit == "max" else min(free, max(0, int(limit) - int(used)))


def bfloat16_is_slow(root: Path = ROOT) -> bool:
    """Return whether this CPU is known to lack instructions that multiply bfloat16."""
    with contextlib.suppress(OSError):
        for line in (root / "proc/cpuinfo").read_text().splitlines():
            name, _, flags = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return FAST_BFLOAT16.isdisjoint(flags.split())
    return False


def _siblings(cpu: int, root: Path) -> frozenset[int]:
    """Return the logical CPUs of the core that *cpu* belongs to; empty: unknown."""
    return _cpu_list(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")


def _cpu_list(path: Path) -> frozenset[int]:
    """Return the numbers in a file such as `0-3,8`; none if it cannot be read."""
    try:
        ranges = [part.partition("-")[::2] for part in path.read_text().strip().split(",") if part]
        return frozenset(cpu for first, last in ranges for cpu in range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        return frozenset()


def _quotas(root: Path) -> Iterator[int]:
    """Yield the CPU time that each cgroup of this process grants, in whole CPUs: its own and those above it.

    In a container the path may be one of the host. Then the top of the mounted tree is the container's own cgroup.
    """
    cgroups = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2, alone or beside version 1
            mounts, names = [cgroups, cgroups / "unified"], ["cpu.max"]
        elif "cpu" in controllers.split(","):
            mounts, names = [cgroups / controllers, cgroups / "cpu"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        else:
            continue
        below = Path(path.lstrip("/")) if ".." not in path else Path()
        for folder in {mount / part for mount in mounts for part in (below, *below.parents)}:
            with contextlib.suppress(OSError, ValueError):
                quota, period = " ".join((folder / name).read_text() for name in names).split()
                if quota not in ("max", "-1"):
                    yield int(quota) // int(period)
