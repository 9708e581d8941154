"""Checkpoints as quantizers write them, packed bit by bit from the descriptions of the formats, and what they mean.

AWQ: https://github.com/casper-hansen/AutoAWQ; GPTQ: https://github.com/AutoGPTQ/AutoGPTQ; compressed-tensors:
https://github.com/vllm-project/compressed-tensors; FP8: https://huggingface.co/deepseek-ai/DeepSeek-V3.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

# O = outputs, I = inputs, G = groups


@dataclass(frozen=True)
class Kind:
    """A way to quantize."""

    pack: Callable[[Kind, Tensor], tuple[dict[str, Tensor], Tensor]]
    config: dict[str, Any]
    bits: int = 4
    group: int = 32
    """-1: a row."""
    has_zeros: bool = True
    more: dict[str, Any] = field(default_factory=dict)


def integers_of(kind: Kind, weight_OI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return unsigned integers, scales_OG in float16 and zeros_OG; the group of an input is its number / the size."""
    group = kind.group if kind.group > 0 else weight_OI.shape[1]
    parts_OGI, most = weight_OI.reshape(len(weight_OI), -1, group), 2**kind.bits - 1
    if kind.has_zeros:
        low, high = parts_OGI.amin(2).clamp(max=0), parts_OGI.amax(2).clamp(min=0)
        scales_OG = ((high - low) / most).half()
        zeros_OG = (-low / scales_OG.float()).round().clamp(0, most)
    else:
        scales_OG = (parts_OGI.abs().amax(2) / (most // 2)).half()
        zeros_OG = torch.full_like(scales_OG, 2 ** (kind.bits - 1)).float()
    integers = (parts_OGI / scales_OG.float()[..., None] + zeros_OG[..., None]).round().clamp(0, most)
    return integers.flatten(1).int(), scales_OG, zeros_OG.int()


def meant(kind: Kind, integers_OI: Tensor, scales_OG: Tensor, zeros_OG: Tensor, groups_I: Tensor) -> Tensor:
    return (integers_OI - zeros_OG[:, groups_I]).double() * scales_OG.double()[:, groups_I]


def words(numbers: Tensor, bits: int, dim: int) -> Tensor:
    """Put the numbers along *dim* into words of 32 bits, the first in the lowest bits."""
    per_word, numbers = 32 // bits, numbers.movedim(dim, -1).long()
    numbers = torch.nn.functional.pad(numbers, (0, -numbers.shape[-1] % per_word))
    numbers = numbers.reshape(*numbers.shape[:-1], -1, per_word)
    packed = sum(numbers[..., at] << (bits * at) for at in range(per_word))
    assert isinstance(packed, Tensor)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int().movedim(-1, dim).contiguous()


def pack_awq(kind: Kind, weight_OI: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    integers, scales, zeros = integers_of(kind, weight_OI)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])

    def interleaved(numbers: Tensor) -> Tensor:
        return words(numbers.reshape(len(numbers), -1, 8)[..., order].flatten(1), 4, 1)

    tensors = {"qweight": interleaved(integers.T), "qzeros": interleaved(zeros.T), "scales": scales.T.contiguous()}
    return tensors, meant(kind, integers, scales, zeros, torch.arange(integers.shape[1]) // _size(kind, integers))


def _size(kind: Kind, integers_OI: Tensor) -> int:
    return kind.group if kind.group > 0 else integers_OI.shape[1]


def pack_gptq(kind: Kind, weight_OI: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    num_inputs = weight_OI.shape[1]
    groups_I = torch.arange(num_inputs) // (kind.group if kind.group > 0 else num_inputs)
    if kind.more.get("act_order"):
        groups_I = groups_I[torch.randperm(num_inputs, generator=torch.Generator().manual_seed(num_inputs))]
    order_I = groups_I.argsort(stable=True)
    integers, scales, zeros = integers_of(kind, weight_OI[:, order_I])
    integers = torch.empty_like(integers).index_copy_(1, order_I, integers)
    tensors = {
        "qweight": words(integers.T, kind.bits, 0),
        "qzeros": stored_zeros(kind, words(zeros.T, kind.bits, 1)),
        "scales": scales.T.contiguous(),
        "g_idx": groups_I.int(),
    }
    return tensors, meant(kind, integers, scales, zeros, groups_I)


def stored_zeros(kind: Kind, zeros: Tensor) -> Tensor:
    """Return words of zeros as the format has them: the first one has 1 less in each, subtracted from whole words."""
    if kind.config["checkpoint_format"] != "gptq":
        return zeros
    less = zeros.long() - (0x11111111 if kind.bits == 4 else 0x01010101)
    return (((less + 2**31) % 2**32) - 2**31).int()


def pack_packed(kind: Kind, weight_OI: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    integers, scales, zeros = integers_of(kind, weight_OI)
    scales = scales.to(kind.more.get("scales", torch.bfloat16))
    tensors = {
        "weight_packed": words(integers, kind.bits, 1),
        "weight_scale": scales,
        "weight_shape": torch.tensor(integers.shape),
    }
    if kind.has_zeros:
        tensors["weight_zero_point"] = words(zeros, kind.bits, 0)
    return tensors, meant(kind, integers, scales, zeros, torch.arange(integers.shape[1]) // _size(kind, integers))


def pack_int8(kind: Kind, weight_OI: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    integers, scales, zeros = integers_of(kind, weight_OI)
    tensors = {"weight": (integers - 128).to(torch.int8), "weight_scale": scales}
    if kind.has_zeros:
        tensors["weight_zero_point"] = (zeros - 128).to(torch.int8)
    return tensors, meant(kind, integers, scales, zeros, torch.arange(integers.shape[1]) // _size(kind, integers))


def pack_fp8(kind: Kind, weight_OI: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    outputs, inputs = weight_OI.shape
    rows, columns = kind.more["block"]
    block = rows or outputs, columns or inputs
    padded = torch.nn.functional.pad(weight_OI, (0, -inputs % block[1], 0, -outputs % block[0]))
    parts = padded.reshape(-1, block[0], padded.shape[1] // block[1], block[1])
    scales = parts.abs().amax((1, 3)) / 448
    wide = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:outputs, :inputs]
    numbers = (weight_OI / wide).to(torch.float8_e4m3fn)
    shape = kind.more.get("shape", scales.shape)
    tensors = {"weight": numbers, kind.more.get("name", "weight_scale"): scales.reshape(shape)}
    return tensors | {"input_scale": torch.ones(1)}, numbers.double() * wide.double()


def _compressed(form: str, bits: int, **weights: Any) -> dict[str, Any]:
    of_weights = {"num_bits": bits, "type": "int", "symmetric": True, **weights}
    groups = {"group_0": {"weights": of_weights, "targets": ["Linear"]}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


def _awq(group: int) -> Kind:
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Kind(pack_awq, config, group=group)


def _gptq(group: int, bits: int = 4, *, form: str = "gptq", has_zeros: bool = False, act_order: bool = False) -> Kind:
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order, "sym": not has_zeros}
    more = {"act_order": act_order}
    return Kind(pack_gptq, {**config, "checkpoint_format": form}, bits, group, has_zeros, more)


def _packed(bits: int, group: int, *, has_zeros: bool = False, scales: torch.dtype = torch.bfloat16) -> Kind:
    of_group = {"strategy": "group", "group_size": group} if group > 0 else {"strategy": "channel"}
    config = _compressed("pack-quantized", bits, symmetric=not has_zeros, **of_group)
    return Kind(pack_packed, config, bits, group, has_zeros, {"scales": scales})


def _int8(group: int, *, has_zeros: bool = False) -> Kind:
    of_group = {"strategy": "group", "group_size": group} if group > 0 else {"strategy": "channel"}
    config = _compressed("int-quantized", 8, symmetric=not has_zeros, **of_group)
    return Kind(pack_int8, config, 8, group, has_zeros)


def _fp8(block: tuple[int, int], **more: Any) -> Kind:
    """*block*: outputs and inputs that share a scale; 0: all."""
    if more.get("name") == "weight_scale_inv":
        config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
        config |= {"weight_block_size": list(block)}
    else:
        strategy = "channel" if block[0] else "tensor"
        config = _compressed("float-quantized", 8, type="float", strategy=strategy)
    return Kind(pack_fp8, config, 8, more={"block": block, **more})


KINDS: Final = {
    "awq-32": _awq(32),
    "awq-64": _awq(64),
    "awq-128": _awq(128),
    "awq-row": _awq(-1),
    "gptq-32": _gptq(32),
    "gptq-128": _gptq(128),
    "gptq-row": _gptq(-1),
    "gptq-zeros": _gptq(64, has_zeros=True),
    "gptq-v2": _gptq(32, form="gptq_v2", has_zeros=True),
    "gptq-order": _gptq(64, has_zeros=True, act_order=True),
    "gptq8": _gptq(128, 8),
    "gptq8-order": _gptq(32, 8, act_order=True),
    "packed-128": _packed(4, 128),
    "packed-32-zeros": _packed(4, 32, has_zeros=True),
    "packed-row": _packed(4, -1, scales=torch.float16),
    "packed8-64": _packed(8, 64),
    "int8-row": _int8(-1),
    "int8-128": _int8(128),
    "int8-zeros": _int8(-1, has_zeros=True),
    "fp8": _fp8((0, 0), shape=()),
    "fp8-rows": _fp8((1, 0), shape=(-1, 1)),
    "fp8-blocks": _fp8((128, 128), name="weight_scale_inv"),
}
"""Ways to quantize, by a short name."""


def quantize(folder: Path, kind: Kind, to: Path, plain: Path) -> None:
    """Write what *kind* makes of the checkpoint *folder*, whose last layer stays as it is, and what that means."""
    tensors: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    config = json.loads((folder / "config.json").read_text())
    last = f"layers.{config['num_hidden_layers'] - 1}."
    for name, weight in load_file(folder / "model.safetensors").items():
        module = name.removesuffix(".weight")
        tensors[name] = weights[name] = weight
        if name.endswith("_proj.weight") and last not in name:
            made, meaning = kind.pack(kind, weight.float())
            del tensors[name]
            tensors |= {f"{module}.{part}": tensor for part, tensor in made.items()}
            weights[name] = meaning.float()
    for target, values, more in ((to, tensors, {"quantization_config": kind.config}), (plain, weights, {})):
        shutil.copytree(folder, target, dirs_exist_ok=True)
        save_file(values, target / "model.safetensors", {"format": "pt"})
        (target / "config.json").write_text(json.dumps({**config, **more}))
    assert not math.isnan(sum(float(weight.sum()) for weight in weights.values()))
