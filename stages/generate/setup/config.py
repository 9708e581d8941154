"""Flags of the generate stage: how an engine computes, and what it serves."""

from __future__ import annotations

import argparse
import ipaddress
import re
from dataclasses import dataclass
from typing import Final, Literal, cast

from pipeline.flags import at_least, auto_or, flag, one_of, page_size, seconds_or_0, share, yes_or_no
from pipeline.log.config import DEFAULT_STEAL_AFTER_S, LogConfig
from pipeline.process.config import ModelConfig, WorkerConfig
from stages.generate.model.spec import Loading


def group_name(text: str) -> str:
    """Parse the name of a group of ranks, which is part of a key in Redis; empty: none."""
    if text and not re.fullmatch(r"[\w.-]{1,100}", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r}: must be 1 to 100 letters, digits, dots, dashes and underscores")
    return text


def own_address(text: str) -> str:
    """Parse the IP address of an interface; empty: none."""
    try:
        if not text or not ipaddress.ip_address(text).is_unspecified:
            return text
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r}: must be one IP address of this machine, such as 10.0.0.5")


@dataclass(frozen=True, slots=True)
class Targets:
    """How long a step beside streams may take."""

    step_s: float = 0.09
    many_s: float = 0.12
    """The same if many prompts are in hand: then more clients gain from it."""
    times_plain: float = 1.5
    """Fewest times that a step with prompts may take as long as one without, where that is longer: with a large model
    prompts would starve else."""

    @classmethod
    def exactly(cls, step_s: float) -> Targets:
        """Return targets that depend on nothing."""
        return cls(step_s, step_s, 0.0)


MOST_DRAFTS: Final = 8
"""Largest number of tokens that are drafted for a request in a step."""
ON_CPU: Final = Targets()
ON_GPU: Final = Targets(0.03, 0.04)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How an engine computes."""

    dtype: str = flag(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help=(
            "dtype of weights and cache; auto: that of the checkpoint; float32 if torch computes on a CPU without "
            "instructions for bfloat16"
        ),
    )
    quantization: str = flag(
        "--quantization",
        default="auto",
        choices=("auto", "none", "int8", "int4"),
        help=(
            "int8: round the matrices to 8-bit integers, which take about half the memory; int4: those of the layers "
            "to 4 bits, which costs accuracy; both need the CPU kernels; auto: as the weights are"
        ),
    )
    tp: int = flag(
        "--tp",
        "--tensor-parallel-size",
        "--tp-size",
        default=1,
        parse=at_least(1),
        help=(
            "number of ranks: processes that compute one model together, on one machine or several (--nnodes); they "
            "divide its query heads; each has a GPU, or a part of the threads and memory of its machine"
        ),
    )
    dummy_weight: bool = flag(
        "--dummy-weight",
        default=False,
        parse=yes_or_no,
        help="use random weights; the model folder needs no weights, only its config and tokenizer",
    )
    model_impl: str = flag(
        "--model-impl",
        default="auto",
        choices=("auto", "native", "transformers"),
        help=(
            "what computes the model: native, which knows some architectures, or transformers' own class with our "
            "attention, which is slower on a CPU; auto: native where it can"
        ),
    )
    trust_remote_code: bool = flag(
        "--trust-remote-code",
        default=False,
        parse=yes_or_no,
        help="with transformers: run Python files of the model's folder; they can do whatever this user can",
    )
    device: str = flag(
        "--device",
        default="auto",
        choices=("auto", "cpu", "cuda"),
        help="device of the engine; auto: a GPU if there is one",
    )
    threads: int = flag(
        "--threads",
        default=0,
        parse=auto_or(1),
        help=(
            "CPU threads of an engine, or of each of its ranks; auto: OMP_NUM_THREADS, or three of every four physical "
            "cores of one NUMA node, and all of three or fewer; ranks divide them [auto]"
        ),
    )
    kernels: str = flag(
        "--kernels",
        default="auto",
        choices=("auto", "avx512", "avx512vnni", "avx512f", "avx2", "neon", "torch"),
        help=(
            "what computes the model on a CPU; avx512 multiplies pairs of bfloat16, avx512vnni and avx512f floats, the "
            "latter without VNNI; auto: what is fastest on CPUs of this kind, torch where no kernels run"
        ),
    )
    attention: str = flag(
        "--attn",
        "--attention-backend",
        default="auto",
        parse=one_of(("auto", "fi", "fa,fi", "torch", "cpu", "reference"), str),
        help=(
            "what computes attention: fi (FlashInfer), fa,fi (FlashInfer, with FlashAttention 3 for prompts), torch "
            "(old name: cpu) or reference; auto: fi on CUDA if it can run there, else torch; on a CPU the kernels, and "
            "any other value makes torch compute the model"
        ),
    )
    cache: str = flag(
        "--cache",
        "--cache-type",
        default="radix",
        choices=("radix", "naive"),
        help="prefix cache; naive: none, requests share nothing",
    )
    max_prefill_length: int = flag(
        "--max-prefill-length",
        "--max-extend-length",
        default=0,
        parse=auto_or(1),
        help=(
            "maximum prompt tokens per step while nothing decodes; where --target-itl works, a step has fewer if it "
            "would take more than 0.3 s, or than that target [8192 on CUDA, 2048 on CPU]"
        ),
    )
    mixed_prefill_length: int = flag(
        "--mixed-prefill-length",
        default=0,
        parse=auto_or(1),
        help=(
            "maximum prompt tokens per step while streams run; auto: what --target-itl leaves; where that cannot be, "
            "512 on CUDA and 16 on a CPU, or 2 per running request if that is more [auto]"
        ),
    )
    target_itl_ms: int = flag(
        "--target-itl",
        default=0,
        parse=auto_or(1),
        help=(
            "time in milliseconds that a step should take while streams run and prompts wait: prompts get what the "
            "streams leave of it; auto: 90, or 120 if 8 or more prompts wait, on CUDA 30 or 40, but at least 1.5 times "
            "a step without prompts; only where tokens do not depend on the batch (CPU kernels, --deterministic) [auto]"
        ),
    )
    max_running_requests: int = flag(
        "--max-running-requests",
        default=256,
        parse=at_least(1),
        help="maximum requests that an engine computes at once",
    )
    overlap: str = flag(
        "--overlap",
        default="auto",
        choices=("auto", "on", "off"),
        help=(
            "on: plan the next step and pass tokens on while the device computes; auto: on for one GPU, off for "
            "ranks (--tp), and off for a CPU, where each token would come a step later"
        ),
    )
    speculate: str = flag(
        "--speculate",
        default="auto",
        choices=("auto", "off", *map(str, range(1, MOST_DRAFTS + 1))),
        help=(
            "guess the next tokens of a request from its text, its grammar or its `prediction`, and compute them in "
            "one step: answers are the same, and those that repeat something come sooner; auto: as many as save time; "
            "1 to 8: so many, whether they do or not; neither with 8 streams and more; only where tokens do not depend "
            "on the batch (CPU kernels, --deterministic)"
        ),
    )
    commit_interval_ms: int = flag(
        "--commit-interval",
        default=-1,
        parse=auto_or(0, auto=-1),
        help=(
            "longest time in milliseconds, at most 1000, that tokens wait to be committed together with those of the "
            "next steps; first tokens and ends never wait; 0: each step is committed at once [25 on CPU, 2 on CUDA]"
        ),
    )
    steal_after_s: float = flag(
        "--steal-after",
        default=DEFAULT_STEAL_AFTER_S,
        parse=seconds_or_0,
        help=(
            "with several engines, a request waits so many seconds at most for the one whose cache has the beginning "
            "of its prompt, and not at all if that one has no room"
        ),
    )
    graph: int = flag(
        "--graph",
        "--cuda-graph-max-bs",
        default=-1,
        parse=auto_or(0, auto=-1),
        help=(
            "decode steps of up to so many requests are recorded as CUDA graphs; 0: none [with --attn fi or fa,fi as "
            "many as --max-running-requests, at most 256]"
        ),
    )
    deterministic: bool = flag(
        "--deterministic",
        default=False,
        parse=yes_or_no,
        help=(
            "compute the same tokens for a request alone and in any batch; slower on a GPU, where it needs --attn fi "
            "or torch and --tp 1; the CPU kernels always do this"
        ),
    )
    gpu_new: bool = flag(
        "--gpu-new",
        default=False,
        parse=yes_or_no,
        help=(
            "on a GPU, also use what has only been tested on CPUs so far: recorded prompts, decode steps with less "
            "work for the host, fewer kernels in a layer, a faster way to draw tokens, and products of fixed shapes "
            "with --deterministic"
        ),
    )
    page_size: int = flag(
        "--page-size",
        default=0,
        parse=page_size,
        help="tokens per page of the cache, a power of two [16 on CUDA, 64 on CPU]",
    )
    num_pages: int = flag(
        "--num-pages", default=0, parse=auto_or(1), help="number of pages in the cache [as many as fit into memory]"
    )
    memory_ratio: float = flag(
        "--memory-ratio",
        default=0.9,
        parse=share,
        help=(
            "share of the free memory that the engine uses; on a CPU, for weights and cache (the cache takes at most "
            "4 GiB); on a GPU, for the cache, after the weights and the memory of the largest step (with --tp, after "
            "the weights)"
        ),
    )
    max_seq_len: int = flag(
        "--max-seq-len",
        "--max-seq-len-override",
        default=0,
        parse=auto_or(2),
        help="maximum prompt and output tokens of one request together [the model's]",
    )

    @property
    def loading(self) -> Loading:
        """How the model is loaded."""
        by = cast(Literal["auto", "native", "transformers"], self.model_impl)
        return Loading(self.dummy_weight, by, self.trust_remote_code)


@dataclass(frozen=True, slots=True)
class NamesConfig:
    """Under which names the model is served."""

    served_model_name: tuple[str, ...] = flag(
        "--served-model-name", default=(), repeated=True, help="names clients may use [the hub's or the folder's name]"
    )


@dataclass(frozen=True, slots=True)
class DefaultsConfig:
    """What a request means that does not say it."""

    generation_config: str = flag(
        "--generation-config",
        default="auto",
        choices=("auto", "none"),
        help=(
            "auto: defaults for temperature, top_p, top_k, min_p and repetition_penalty come from "
            "the model's generation_config.json; none: OpenAI's defaults"
        ),
    )


@dataclass(frozen=True, slots=True)
class NodesConfig:
    """The machines that share the ranks of an engine."""

    nnodes: int = flag(
        "--nnodes",
        default=1,
        parse=at_least(1),
        help="number of machines that share the ranks of an engine (--tp); it needs --group and --redis-url",
    )
    node_rank: int = flag(
        "--node-rank",
        default=0,
        parse=at_least(0),
        help="which of the --nnodes machines this is; 0 is the head, which plans and samples",
    )
    group: str = flag(
        "--group",
        default="",
        parse=group_name,
        help="with --nnodes: the name under which the machines of an engine find each other, the same on all",
    )
    rank_address: str = flag(
        "--rank-address",
        default="",
        parse=own_address,
        help="with --nnodes: IP address of this machine at which its ranks listen [the one that reaches Redis]",
    )

    def ranks_here(self, num_ranks: int) -> range:
        """Return those of an engine's ranks that are on this machine."""
        here = num_ranks // self.nnodes
        return range(self.node_rank * here, (self.node_rank + 1) * here)


@dataclass(frozen=True, slots=True)
class RankConfig:
    """Which rank of an engine one process is. The supervisor says it."""

    rank: int = flag("--rank", default=0, parse=at_least(0), help="with --slot: which of the ranks this process is")


@dataclass(frozen=True, slots=True)
class ShareConfig:
    """Which part of its machine an engine has. The supervisor says it, where it starts several engines."""

    engine: int = flag(
        "--engine", default=0, parse=at_least(0), help="with --slot: which of the engines of this machine this one is"
    )
    num_engines: int = flag(
        "--engines",
        default=1,
        parse=at_least(1),
        help="with --slot: number of engines that divide threads and memory of this machine",
    )
    free_bytes: int = flag(
        "--free-bytes",
        default=0,
        parse=at_least(0),
        help="with --slot: free memory that the engines divide [what is free when this one starts]",
    )


@dataclass(frozen=True, slots=True)
class GenerateConfig:
    """The flags of `minisgl stage generate`."""

    model: ModelConfig
    names: NamesConfig
    defaults: DefaultsConfig
    worker: WorkerConfig
    engine: EngineConfig
    log: LogConfig
    nodes: NodesConfig = NodesConfig()
    ranks: RankConfig = RankConfig()
    share: ShareConfig = ShareConfig()
