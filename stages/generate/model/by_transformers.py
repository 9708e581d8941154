"""Models that we know nothing of, computed by transformers' own classes with our attention over our pages.

It works for decoders that call transformers' `AttentionInterface`, and keep nothing between steps but keys and values
(https://huggingface.co/docs/transformers/attention_interface). A trial at the start finds out whether a model does: a
few rows, packed, must have the logits that transformers computes for each alone.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import structlog
import torch
import torch.nn.functional as F  # noqa: N812  (everybody's name for it)
from torch import Tensor

from pipeline.errors import ConfigError
from stages.generate.batch import ForwardBatch
from stages.generate.model.attention import Attend, Attention, AttentionShape, plan_all
from stages.generate.model.config import FULL, LOCAL, eos_ids
from stages.generate.model.spec import DTYPES, DUMMY_SEED, DTypeName, LayerKind, Loading, ModelSpec

logger = structlog.get_logger()

# T = packed tokens, H = query heads, K = kv heads, D = head dim, E = hidden size, L = layers, P = pages, S = slots

NAME: Final = "minisgl"
"""Name of our attention among those of transformers. It has no masks there: windows come as arguments."""
ROPES: Final = frozenset({"default", "linear", "llama3", "yarn", "proportional"})
"""Types of ropes with which a token's rotation depends on its position alone."""
UNREAD: Final = frozenset(
    {"dropout", "position_ids", "cache_position", "use_cache", "output_attentions", "return_dict"}
    | {"output_hidden_states", "output_router_logits", "logits_to_keep"}
)
"""Arguments of an attention that change nothing here."""
MOST_SIZE: Final = 2**31
MOST_OFF: Final = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 0.1}
"""Largest distance of the logits of a row of the trial from those of transformers, as a share of their length.

In narrow dtypes the nearest row decides: in others the router of experts may turn with the rounding, and a wrong
attention moves all rows.
"""
TRIED: Final = (29, 19, 16)
"""Lengths of the rows of the trial: 64 tokens."""
ERROR_CHARS: Final = 300


# ---- the spec


def foreign_spec(folder: Path, loading: Loading) -> ModelSpec:
    """Return what pages and schedule need to know of a model.

    Raises:
        ConfigError: transformers does not know it, or its config has something that cannot work.
    """
    config = _config(folder, loading)
    try:
        if reason := _why_not(config):
            raise _refused(folder, config, reason)
        heads, hidden = config.num_attention_heads, config.hidden_size
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or hidden // heads
        if rotated := getattr(config, "qk_rope_head_dim", None):  # latent attention: keys are larger than values
            head_dim = max(rotated + getattr(config, "qk_nope_head_dim", 0), config.v_head_dim)
        dtype = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
        if strange := [size for size in (kv_heads, head_dim) if type(size) is not int or not 0 < size <= MOST_SIZE]:
            raise _refused(folder, config, f"its config has heads of {strange[0]!r:.80}")
    except ConfigError:
        raise
    except Exception as error:  # configs whose layers differ refuse to say one number for all
        raise _refused(folder, config, _short(error)) from error
    return ModelSpec(
        architecture=_name_of(config),
        num_layers=config.num_hidden_layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=0,
        vocab_size=config.vocab_size,
        norm_eps=0.0,
        qk_norm=False,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        tie_embeddings=False,
        kinds=(LayerKind(None, 0),),
        kind_of=(0,) * config.num_hidden_layers,
        rotary_dim=head_dim,
        attention_scale=head_dim**-0.5,
        max_positions=config.max_position_embeddings,
        eos_ids=eos_ids(folder),
        dtype=cast(DTypeName, dtype if dtype in DTYPES else "float32"),
        by="transformers",
        num_weights=_count(folder, loading) if loading.dummy else 0,
    )


def _count(folder: Path, loading: Loading) -> int:
    """Return the number of weights of a model that has no files of them."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in _random(folder, loading).parameters())


def _config(folder: Path, loading: Loading) -> Any:
    importlib.import_module("torch._meta_registrations")  # a worker's torch is without them, and needs them now first
    from transformers import AutoConfig

    try:
        with _quiet():
            found = AutoConfig.from_pretrained(folder, trust_remote_code=loading.trusts_code, local_files_only=True)
    except Exception as error:  # broken configs, unknown models and code of their own raise in many ways
        reason = _short(error)
        if "trust_remote_code" in str(error):
            reason = "it needs Python files of its folder; read them, and pass --trust-remote-code to run them"
        raise ConfigError(f"{folder / 'config.json'}: transformers cannot read it: {reason}") from error
    return found.get_text_config(decoder=True)


def _why_not(config: Any) -> str:
    """Return why a model with *config* cannot be computed; empty: the trial will say."""
    if getattr(config, "is_encoder_decoder", False):
        return "it has an encoder"
    for name in ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size", "max_position_embeddings"):
        if type(size := getattr(config, name, None)) is not int or not 0 < size <= MOST_SIZE:
            return f"its config has {name} {size!r:.80}; expected a positive number"
    if strange := set(getattr(config, "layer_types", None) or ()) - {FULL, LOCAL}:
        return f"it has layers of type {', '.join(sorted(strange))}; supported: {FULL}, {LOCAL}"
    if getattr(config, "attention_chunk_size", None):
        return "its attention has chunks (attention_chunk_size), which transformers keeps in a mask alone"
    if strange := {kind for kind in _rope_types(getattr(config, "rope_parameters", None)) if kind not in ROPES}:
        return f"its rope is of type {', '.join(sorted(strange))}, where a token depends on the length of its row"
    return ""


def _rope_types(parameters: Any) -> Iterator[str]:
    if isinstance(parameters, Mapping):
        if isinstance(kind := parameters.get("rope_type"), str):
            yield kind
        for value in parameters.values():
            yield from _rope_types(value)


def _refused(folder: Path, config: Any, reason: str) -> ConfigError:
    return ConfigError(f"{folder}: {_name_of(config)} cannot be computed through transformers: {reason}")


def _name_of(config: Any) -> str:
    names = getattr(config, "architectures", None)
    return str(names[0]) if isinstance(names, list) and names else type(config).__name__


def _short(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:ERROR_CHARS]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the progress bars and advice of transformers from the terminal."""
    from transformers.utils import logging

    before, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if had_bars:
            logging.enable_progress_bar()


# ---- the attention


@dataclass(frozen=True, slots=True)
class _Kind:
    """What the attention of a layer is asked for."""

    scale: float
    window: int
    cap: float
    has_sinks: bool


class _Step:
    """The step that is being computed: our part of it."""

    def __init__(self, attends: Mapping[_Kind, Attend], kv_L2PKSD: Tensor) -> None:
        self.attends, self.kv_L2PKSD = attends, kv_L2PKSD


class _Trial:
    """The first step: what each layer asks for is not known yet."""

    def __init__(self) -> None:
        self.kinds: dict[int, _Kind] = {}
        self.heads: set[tuple[int, int, int, int]] = set()
        """Query heads, kv heads, and the sizes of keys and values."""


class _Now(threading.local):
    """The step of this thread, while it is computed."""

    step: _Step | _Trial | None = None


_now = _Now()


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of a layer as transformers calls it: of [1, heads, T, size]; return [1, T, heads, size]."""
    step = _now.step
    if step is None:
        raise NotImplementedError("its head calls its layers by itself")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise NotImplementedError("its attention sees later tokens")
    if strange := sorted(name for name, given in others.items() if given is not None and name not in UNREAD):
        raise NotImplementedError(f"its attention has arguments that are not known here: {', '.join(strange)}")
    if attention_mask is not None:
        raise NotImplementedError("its attention has a mask of its own")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    kind = _Kind(scale, sliding_window or 0, softcap or 0.0, s_aux is not None)
    if isinstance(step, _Trial):
        step.kinds[module.layer_idx] = kind
        step.heads.add((query.shape[1], key.shape[1], key.shape[-1], value.shape[-1]))
        return torch.zeros_like(query[..., : value.shape[-1]]).transpose(1, 2), None
    kv_2PKSD = step.kv_L2PKSD[module.layer_idx]
    size, size_of_value = kv_2PKSD.shape[-1], value.shape[-1]
    q_THD, k_TKD, v_TKD = (_padded(each, size) for each in (query, key, value))
    attend = step.attends[kind]
    o_THD = attend(q_THD, k_TKD, v_TKD, kv_2PKSD, s_aux) if kind.has_sinks else attend(q_THD, k_TKD, v_TKD, kv_2PKSD)
    return o_THD[None, ..., :size_of_value], None


def _padded(numbers: Tensor, size: int) -> Tensor:
    """Return [1, heads, T, ..] as [T, heads, size], with zeros where it is smaller: they add nothing to a product."""
    numbers = numbers[0].transpose(0, 1)
    more = size - numbers.shape[-1]
    return F.pad(numbers, (0, more)) if more else numbers.contiguous()


# ---- the decoder


class ForeignDecoder:
    """A model of transformers with the interface of `Decoder`."""

    def __init__(
        self, spec: ModelSpec, folder: Path, loading: Loading, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Load the model, and find out what its attention asks for.

        Raises:
            ConfigError: transformers cannot load or compute it, or its attention is not ours.
        """
        from transformers import PreTrainedModel

        self._spec, self._folder, self._device = spec, folder, device
        self._model = model = _load(folder, loading, dtype, device)
        layers = model.get_decoder()  # what the head calls; where it is no whole model, it is something else
        self._base = layers if isinstance(layers, PreTrainedModel) else model.base_model
        self._given: Tensor | None = None
        if self._base is model:
            raise self.refused("its head cannot be told from its layers")
        self._expected = self._by_transformers()
        model.config._attn_implementation = NAME
        trial = _Trial()
        self._logits_of_the_trial(TRIED[0], trial)
        self._check(trial)
        self._kinds = [trial.kinds[layer] for layer in range(spec.num_layers)]
        compute = self._base.forward
        self._base.forward = partial(self._forward_or_given, compute)

    @property
    def spec(self) -> ModelSpec:
        """What pages and schedule know of the model."""
        return self._spec

    @property
    def shapes(self) -> tuple[AttentionShape, ...]:
        """The shapes of the layers' attention, but for page size, dtype and device: of each layer one."""
        spec = self._spec
        return tuple(
            AttentionShape(
                spec.num_heads, spec.num_kv_heads, spec.head_dim, 0, kind.window, given_scale=kind.scale, cap=kind.cap
            )
            for kind in self._kinds
        )

    @property
    def has_sinks(self) -> bool:
        """Whether a softmax has a logit of no token (https://arxiv.org/abs/2309.17453)."""
        return any(kind.has_sinks for kind in self._kinds)

    @property
    def num_kinds(self) -> int:
        """Number of attentions that `forward` gets: one for each layer."""
        return len(self._kinds)

    def forward(self, batch: ForwardBatch, attends: Sequence[Attend], kv_L2PKSD: Tensor) -> Tensor:
        """Return x_TE, what the head gets; write the keys and values of all rows. *attends*: of each layer."""
        of_kinds = dict(zip(self._kinds, attends, strict=True))
        with _computing(_Step(of_kinds, kv_L2PKSD)):
            outputs = self._base(
                input_ids=batch.token_ids_T.long()[None], position_ids=batch.positions_T.long()[None], use_cache=False
            )
        x_TE: Tensor = outputs[0][0]
        self._outputs = type(outputs)
        return x_TE

    def logits(self, x_RE: Tensor) -> Tensor:
        """Return logits_RV in float32 for some of the tokens that `forward` returned."""
        if not len(x_RE):
            return x_RE.new_zeros((0, self._spec.vocab_size), dtype=torch.float32)
        self._given = x_RE
        try:
            token_ids = torch.zeros((1, len(x_RE)), dtype=torch.int64, device=x_RE.device)
            found: Tensor = self._model(input_ids=token_ids, use_cache=False).logits[0]
        finally:
            self._given = None
        return found[:, : self._spec.vocab_size].float().contiguous()

    head_logits = logits

    def _forward_or_given(self, compute: Any, *arguments: Any, **named: Any) -> Any:
        """Stand in for the layers: `logits` lets the whole model run, which has factors and caps behind its head."""
        if self._given is None:
            return compute(*arguments, **named)
        return self._outputs(last_hidden_state=self._given[None])

    # the trial

    def refused(self, reason: str) -> ConfigError:
        """Return the error of a model that cannot be served so."""
        return _refused(self._folder, self._model.config, reason)

    def check_against_transformers(
        self, attentions: Sequence[Attention], batches: Sequence[ForwardBatch], kv: Tensor
    ) -> None:
        """Compute the rows of the trial in *batches*, and compare. The last batch has the last token of each row.

        Raises:
            ConfigError: The logits are others than those of transformers alone.
        """
        try:
            for batch in batches:
                x_TE = self.forward(batch, plan_all(attentions, batch), kv)
            ends = torch.tensor(batches[-1].query_starts[1:], device=x_TE.device) - 1
            ours_RV = self.logits(x_TE[ends])
        except Exception as error:  # code of many authors, with arguments that it did not expect
            raise self.refused(_short(error)) from error
        off_R = (ours_RV - self._expected).norm(dim=-1) / self._expected.norm(dim=-1)
        off = float(off_R.max() if x_TE.dtype == torch.float32 else off_R.min())
        if not off < MOST_OFF[x_TE.dtype]:
            raise self.refused(
                f"a trial of {sum(TRIED)} tokens gave other logits than transformers alone ({off:.1%} off)"
            )

    def _by_transformers(self) -> Tensor:
        """Return the logits of the last token of each row of the trial, each computed alone by transformers."""
        return torch.stack([self._logits_of_the_trial(length) for length in TRIED])

    @torch.inference_mode()
    def _logits_of_the_trial(self, length: int, trial: _Trial | None = None) -> Tensor:
        """Return the logits of the last token of a row. *trial*: learns what our attention is asked for."""
        token_ids = torch.tensor([tried_tokens(self._spec.vocab_size)[length]], device=self._device)
        positions = torch.arange(length, device=self._device)[None]
        try:
            with _computing(trial or _Trial()), _quiet():
                found: Tensor = self._model(input_ids=token_ids, position_ids=positions, use_cache=False).logits[0, -1]
        except NotImplementedError as error:
            raise self.refused(str(error)) from error
        except Exception as error:  # code of many authors, with arguments that it did not expect
            if trial is not None and len(trial.kinds) < self._spec.num_layers:
                raise self._refused_for_its_attention(trial, f" ({_short(error)})") from error
            raise self.refused(_short(error)) from error
        return found[: self._spec.vocab_size].float()

    def _refused_for_its_attention(self, trial: _Trial, then: str = "") -> ConfigError:
        layers = f"{len(trial.kinds)} of its {self._spec.num_layers} layers"
        return self.refused(f"{layers} call transformers' AttentionInterface; all must{then}")

    def _check(self, trial: _Trial) -> None:
        spec, config = self._spec, self._model.config.get_text_config(decoder=True)
        if set(trial.kinds) != set(range(spec.num_layers)):
            raise self._refused_for_its_attention(trial)
        if len(trial.heads) > 1:
            raise self.refused(f"its layers have different heads: {sorted(trial.heads)}")
        heads, kv_heads, size_of_key, size_of_value = next(iter(trial.heads))
        if (heads, kv_heads) != (spec.num_heads, spec.num_kv_heads) or max(size_of_key, size_of_value) != spec.head_dim:
            raise self.refused(
                f"it has {heads} query heads, {kv_heads} kv heads of {size_of_key} and {size_of_value} numbers; "
                f"its config means {spec.num_heads}, {spec.num_kv_heads} and {spec.head_dim}"
            )
        types = getattr(config, "layer_types", None) or ["any"] * spec.num_layers
        for layer, name in enumerate(types):
            wanted = {LOCAL: getattr(config, "sliding_window", None) or 0, FULL: 0}.get(name)
            if wanted is not None and trial.kinds[layer].window != wanted:
                raise self.refused(f"layer {layer} is of type {name}, and its window is in a mask alone")
        windows = {kind.window for kind in trial.kinds.values()}
        uses = getattr(config, "use_sliding_window", None) is not False
        if types[0] == "any" and uses and (getattr(config, "sliding_window", None) or 0) not in windows:
            raise self.refused("its config has a sliding_window, which is in a mask alone")


def tried_tokens(vocab_size: int) -> dict[int, list[int]]:
    """Return the token ids of each row of the trial, by its length."""
    return {length: [(7 + 31 * length + 13 * place**2) % vocab_size for place in range(length)] for length in TRIED}


@contextmanager
def _computing(step: _Step | _Trial) -> Iterator[None]:
    before, _now.step = _now.step, step
    try:
        yield
    finally:
        _now.step = before


def _load(folder: Path, loading: Loading, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(NAME, _attention)
    options: dict[str, Any] = {"trust_remote_code": loading.trusts_code, "attn_implementation": "eager", "dtype": dtype}
    if loading.trusts_code:
        logger.warning("remote_code_is_trusted", folder=str(folder), effect="Python files of this folder run here")
    try:
        with _quiet():
            if loading.dummy:
                with torch.random.fork_rng(devices=()):
                    torch.manual_seed(DUMMY_SEED)
                    model = _random(folder, loading, **options)
            else:
                model, report = AutoModelForCausalLM.from_pretrained(
                    folder, local_files_only=True, output_loading_info=True, ignore_mismatched_sizes=True, **options
                )
                mismatched = [key if isinstance(key, str) else key[0] for key in report["mismatched_keys"]]
                if wrong := sorted({*report["missing_keys"], *mismatched}):
                    raise ConfigError(f"{folder}: its files lack {wrong[0]}, or have it in another shape")
                if report["unexpected_keys"]:
                    names, reason = sorted(map(str, report["unexpected_keys"])), "the model has no such part"
                    logger.warning("weights_ignored", first=names[0], count=len(names), reason=reason)
            if hasattr(model, "set_experts_implementation") and device.type == "cpu":
                model.set_experts_implementation("eager")  # the default one multiplies in some dtypes alone
    except ConfigError:
        raise
    except Exception as error:  # missing kernels, broken files, code of its own
        raise ConfigError(f"{folder}: transformers cannot load it: {_short(error)}") from error
    return model.to(device).eval()


def _random(folder: Path, loading: Loading, **options: Any) -> Any:
    """Return the model of a config, with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    options = {"trust_remote_code": loading.trusts_code} | options
    config = AutoConfig.from_pretrained(folder, trust_remote_code=loading.trusts_code, local_files_only=True)
    return AutoModelForCausalLM.from_config(config, **options)
