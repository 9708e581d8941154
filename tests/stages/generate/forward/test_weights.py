"""Weights are loaded once, into their place."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import FAMILIES, Family, make_checkpoint
from support.selection import rest_at_night

import stages.generate.forward.weights as weights_module
from stages.generate.forward.weights import dummy_weights, load_weights
from stages.generate.model.checkpoint import EMBEDDING, HEAD, INDEX_FILE, WEIGHTS_FILE
from stages.generate.model.config import read_spec
from stages.generate.model.spec import tensor_shapes

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3")


def load(folder: Path, dtype: torch.dtype = torch.float32, **more: Any) -> dict[str, torch.Tensor]:
    return load_weights(read_spec(folder), folder, dtype=dtype, device=CPU, **more)


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name]), name


def test_fused_weights_hold_their_parts_in_order_and_a_router_is_not_fused(tmp_path: Path) -> None:
    ours, theirs = load(make_checkpoint(tmp_path, "qwen3moe")), load_file(tmp_path / WEIGHTS_FILE)
    attention, expert = "model.layers.1.self_attn.", "model.layers.1.mlp.experts.5."
    for fused, parts in ((f"{attention}qkv", "qkv"), (f"{expert}gate_up", ("gate", "up"))):
        prefix = fused.rpartition(".")[0]
        together = torch.cat([theirs[f"{prefix}.{part}_proj.weight"] for part in parts])
        assert torch.equal(ours[f"{fused}_proj.weight"], together)
    for name in ("model.norm.weight", "model.layers.1.mlp.gate.weight"):
        assert torch.equal(ours[name], theirs[name])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weights_take_their_own_size_and_no_more(tmp_path: Path, family: Family, dtype: torch.dtype) -> None:
    weights = load(make_checkpoint(tmp_path, family), dtype)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in weights.values()}
    num_parameters = sum(tensor.numel() for tensor in load_file(tmp_path / WEIGHTS_FILE).values())
    assert sum(storages.values()) == num_parameters * dtype.itemsize
    assert len(storages) == len(weights)


@pytest.mark.parametrize("saved", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_cast_on_the_way_whatever_the_size_of_a_piece(
    tmp_path: Path, saved: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, "qwen3", dtype=saved, tie=False)
    monkeypatch.setattr(weights_module, "PIECE_BYTES", 1000)  # neither a row nor a tensor
    ours, theirs = load(tmp_path, dtype), load_file(tmp_path / WEIGHTS_FILE)
    assert torch.equal(ours["lm_head.weight"], theirs["lm_head.weight"].to(dtype))
    up = theirs["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(ours["model.layers.0.mlp.gate_up_proj.weight"][len(up) :], up.to(dtype))


def test_several_files_give_the_weights_of_one(tmp_path: Path) -> None:
    """Also where the parts of a fused weight are in different files."""
    one = load(make_checkpoint(tmp_path / "one", "qwen3moe"))
    folder = make_checkpoint(tmp_path / "several", "qwen3moe", shard_size="30KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 10
    places = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
    parts = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    assert len({places[name] for name in parts}) > 1
    assert_same(load(folder), one)


@pytest.mark.parametrize("dummy", [False, True])
def test_progress_grows_to_the_size_of_the_weights(folder: Path, dummy: bool) -> None:
    seen: list[tuple[int, int]] = []

    def progress(done_bytes: int, total_bytes: int) -> None:
        seen.append((done_bytes, total_bytes))

    if dummy:
        dummy_weights(read_spec(folder), dtype=torch.float32, device=CPU, progress=progress)
    else:
        load(folder, progress=progress)
    size = sum(tensor.nbytes for tensor in load_file(folder / WEIGHTS_FILE).values())
    assert seen == sorted(seen) and seen[-1] == (size, size) and len(seen) > 10


def test_a_file_that_shrinks_while_it_is_read_is_no_zeros(folder: Path, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3")
    path = tmp_path / WEIGHTS_FILE
    with pytest.raises(OSError, match="bytes early"):
        load(tmp_path, progress=lambda done, total: os.truncate(path, 8192))


# Weights that nobody trained


def test_dummy_weights_have_the_names_and_shapes_of_real_ones(tmp_path: Path) -> None:
    spec = read_spec(make_checkpoint(tmp_path, "qwen3moe", bias=True))
    real, dummy = load(tmp_path), dummy_weights(spec, dtype=torch.float32, device=CPU)
    assert {name: weight.shape for name, weight in dummy.items()} == {name: each.shape for name, each in real.items()}


def test_dummy_weights_are_the_same_each_time_and_differ_among_themselves(folder: Path) -> None:
    spec = read_spec(folder)
    one, again = (dummy_weights(spec, dtype=torch.bfloat16, device=CPU) for _ in range(2))
    assert_same(one, again)
    q, o = (one[f"model.layers.0.self_attn.{name}.weight"] for name in ("qkv_proj", "o_proj"))
    assert 0.8 < float(q.float().std() * q.shape[1] ** 0.5) < 1.2
    assert not torch.equal(o, one["model.layers.1.self_attn.o_proj.weight"])
    assert torch.equal(one["model.norm.weight"], torch.ones(spec.hidden_size, dtype=torch.bfloat16))


# A rank's part

HEAD_DIM = 24
HEADS: dict[tuple[Family, int], tuple[int, list[list[int]]]] = {
    ("odd", 2): (6, [[0, 0, 1], [1, 2, 2]]),
    ("odd", 3): (6, [[0], [1], [2]]),
    ("qwen3moe", 2): (4, [[0], [1]]),
    ("qwen3moe", 4): (4, [[0], [0], [1], [1]]),
}
"""(family, ranks) -> query heads, and the KV heads of each rank."""


def places_of_nan(places: Callable[..., Any], *arguments: object) -> Any:
    """Return what `_places` returns; memory that nothing is written to is found out."""
    weights, found = places(*arguments)
    for weight in weights.values():
        weight.fill_(float("nan"))
    return weights, found


def assert_begins(together: torch.Tensor, whole: torch.Tensor) -> None:
    """What is beyond the whole tensor is zeros."""
    assert torch.equal(together[: len(whole)], whole)
    assert not together[len(whole) :].any()


@pytest.mark.parametrize("dummy", [False, True])
@pytest.mark.parametrize(("family", "num_ranks"), HEADS)
def test_the_parts_of_ranks_are_those_of_one(
    tmp_path: Path, family: Family, num_ranks: int, dummy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_module, "PIECE_BYTES", 2000)  # a few rows
    monkeypatch.setattr(weights_module, "places_of", partial(places_of_nan, weights_module.places_of))
    spec = read_spec(make_checkpoint(tmp_path, family, dtype="bfloat16", bias=True))
    get = partial(dummy_weights, spec) if dummy else partial(load_weights, spec, tmp_path)
    get = partial(get, dtype=torch.float32, device=CPU)
    whole, shards = get(), [get(shard=spec.sharded(rank, num_ranks)) for rank in range(num_ranks)]
    num_heads, kv_heads = HEADS[family, num_ranks]
    for name, weight in whole.items():
        have = [shard[name] for shard in shards if name in shard]
        *_, module, kind = name.split(".")
        if module == "qkv_proj":
            each = [HEAD_DIM * heads for heads in (num_heads // num_ranks, len(kv_heads[0]), len(kv_heads[0]))]
            q, k, v = zip(*(torch.split(part, each) for part in have), strict=True)
            kv_size = (len(weight) - HEAD_DIM * num_heads) // 2
            whole_q, *whole_kv = torch.split(weight, [HEAD_DIM * num_heads, kv_size, kv_size])
            assert torch.equal(torch.cat(q), whole_q)
            for mine, theirs in zip((k, v), whole_kv, strict=True):
                heads = torch.split(theirs, HEAD_DIM)
                assert torch.equal(torch.cat(mine), torch.cat([heads[one] for rank in kv_heads for one in rank]))
        elif module == "gate_up_proj":
            for mine, theirs in zip(zip(*(part.chunk(2) for part in have), strict=True), weight.chunk(2), strict=True):
                assert_begins(torch.cat(mine), theirs)
        elif module in ("embed_tokens", "lm_head"):
            assert_begins(torch.cat(have), weight)
        elif module in ("o_proj", "down_proj") and kind == "weight":
            assert_begins(torch.cat(have, dim=1).t(), weight.t())
        elif module in ("o_proj", "down_proj"):
            assert name in shards[0] and len(have) == 1 and torch.equal(have[0], weight), "the ranks' sum has it once"
        else:
            assert len(have) == num_ranks and all(torch.equal(part, weight) for part in have)


def test_a_rank_maps_its_rows_of_tied_embeddings_unless_zeros_follow_them(tmp_path: Path) -> None:
    spec = read_spec(make_checkpoint(tmp_path, "qwen3", tie=True))
    whole = load(tmp_path)[EMBEDDING]
    for rank, mapped in ((0, True), (1, False)):
        shard = load(tmp_path, map_tied=True, shard=spec.sharded(rank, 2))
        assert (HEAD in shard) == mapped and spec.vocab_size == 497
        assert_begins(shard[EMBEDDING], whole[249 * rank : 249 * rank + 249])
        assert not mapped or torch.equal(shard[HEAD], shard[EMBEDDING])


def test_the_peak_of_a_ranks_load_is_its_part(large: Path) -> None:
    def memory(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

    spec, seen = read_spec(large), [(0, 0)]
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)  # what other tests have freed would be used again
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    except (AttributeError, OSError) as error:
        pytest.skip(f"the peak of a process needs glibc and Linux' /proc: {error}")
    before = memory("VmRSS")
    shard = load(
        large, torch.float32, shard=spec.sharded(1, 2), progress=lambda done, total: seen.append((done, total))
    )
    peak, size = memory("VmHWM") - before, sum(weight.nbytes for weight in shard.values())
    assert size > 180e6
    assert 0.8 * size < peak < 1.1 * size
    done_bytes, total_bytes = seen[-1]
    file_bytes = sum(path.stat().st_size for path in large.glob("*.safetensors"))
    assert done_bytes == total_bytes < 0.65 * file_bytes, "of most matrices it reads its rows alone"


# In a process of its own

LOAD = """
import sys, json
from pathlib import Path
import torch
from stages.generate.forward.weights import load_weights
from stages.generate.model.config import read_spec

def memory(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

folder, dtype = Path(sys.argv[1]), getattr(torch, sys.argv[2])
torch.ones(64, 64).bfloat16() @ torch.ones(64, 64).bfloat16()
before = memory("VmHWM")
spec = read_spec(folder)
weights = load_weights(spec, folder, dtype=dtype, device=torch.device("cpu"))
size = sum(weight.nbytes for weight in weights.values())
print(json.dumps({"bytes": size, "peak": memory("VmHWM") - before, "resident": memory("VmRSS") - before}))
"""


def run_load(folder: Path, dtype: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LOAD, str(folder), dtype], cwd=ROOT, check=True, text=True, timeout=120, **options
    )


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in two files of bfloat16, 200 MB, most of it in a few large tensors."""
    folder = make_checkpoint(tmp_path_factory.mktemp("large"), "llama3", dtype="bfloat16", tie=False, bias=True)
    vocab_size, hidden, inner = 24_000, 1024, 8192
    config = json.loads((folder / "config.json").read_text())
    config |= {"vocab_size": vocab_size, "hidden_size": hidden, "intermediate_size": inner}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / WEIGHTS_FILE).unlink()
    shapes = tensor_shapes(read_spec(folder))
    names: dict[str, str] = {}
    for shard, part in enumerate((list(shapes)[::2], list(shapes)[1::2])):
        save_file(
            {name: torch.zeros(shapes[name], dtype=torch.bfloat16) for name in part}, folder / f"{shard}.safetensors"
        )
        names |= dict.fromkeys(part, f"{shard}.safetensors")
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": names}))
    return folder


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from Linux' /proc")
@pytest.mark.parametrize("dtype", rest_at_night(["bfloat16", "float32"]))
def test_the_peak_of_a_load_is_the_weights_once(large: Path, dtype: str) -> None:
    """All that the process ever had in memory, mapped files too: as they are, and when they are cast on the way."""
    done = run_load(large, dtype, capture_output=True)
    assert done.stderr == "", "no bar, because this is no terminal"
    seen = json.loads(done.stdout)
    assert seen["bytes"] > (180e6 if dtype == "bfloat16" else 360e6)
    assert seen["peak"] < 1.15 * seen["bytes"] + 2 * weights_module.PIECE_BYTES
    assert seen["peak"] > 0.9 * seen["resident"] > 0.8 * seen["bytes"], "the measure measures"


def test_a_bar_is_shown_on_a_terminal(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal, theirs = pty.openpty()
    for name, value in (("TERM", "xterm"), ("COLUMNS", "80")):
        monkeypatch.setenv(name, value)
    with open(theirs, "w") as shown:
        monkeypatch.setattr("sys.stderr", shown)
        load(folder, torch.float32)
    said = ""
    with contextlib.suppress(OSError):  # how Linux says that the other end is closed
        while piece := os.read(terminal, 100_000):
            said += piece.decode()
    os.close(terminal)
    assert "weights" in said and "kB" in said and capsys.readouterr().out == ""
