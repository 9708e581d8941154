"""Flags of the generate stage: how an engine computes, and what it serves."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.flags import at_least, auto_or, flag, page_size, share, yes_or_no
from pipeline.log.config import LogConfig
from pipeline.process.config import ModelConfig, WorkerConfig


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
        default="none",
        choices=("none", "int8"),
        help="int8: keep the matrices as 8-bit integers, in about half the memory; it needs the CPU kernels",
    )
    tp: int = flag(
        "--tp",
        "--tensor-parallel-size",
        "--tp-size",
        default=1,
        parse=at_least(1),
        choices=(1,),
        help="number of devices that share one model",
    )
    dummy_weight: bool = flag(
        "--dummy-weight",
        default=False,
        parse=yes_or_no,
        help="use random weights; the model folder needs no weights, only its config and tokenizer",
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
        help="CPU threads of an engine [OMP_NUM_THREADS, or the physical cores of one NUMA node minus one in four]",
    )
    kernels: str = flag(
        "--kernels",
        default="auto",
        choices=("auto", "avx512", "avx2", "torch"),
        help="what computes the model on a CPU; auto: the fastest kernels that this CPU has, else torch",
    )
    attention: str = flag(
        "--attn",
        "--attention-backend",
        default="auto",
        choices=("auto", "cpu", "fi", "reference"),
        help=(
            "attention backend; auto: fi on CUDA if it can run there, the kernels' own on a CPU; "
            "any other makes torch compute on a CPU"
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
        help="maximum prompt tokens per step while nothing decodes [8192 on CUDA, 2048 on CPU]",
    )
    mixed_prefill_length: int = flag(
        "--mixed-prefill-length",
        default=0,
        parse=auto_or(1),
        help=(
            "maximum prompt tokens per step while streams run [512 on CUDA; on CPU measured, so that a step takes 1.5 "
            "times as long, or up to 3 times with many prompts; where torch computes 16, or 2 per running request]"
        ),
    )
    max_running_requests: int = flag(
        "--max-running-requests",
        default=256,
        parse=at_least(1),
        help="maximum requests that an engine computes at once",
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
        help=("share of the free memory for weights and cache; on a CPU the cache takes 4 GiB at most"),
    )
    max_seq_len: int = flag(
        "--max-seq-len",
        "--max-seq-len-override",
        default=0,
        parse=auto_or(2),
        help="maximum prompt and output tokens of one request together [the model's]",
    )


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
class GenerateConfig:
    """The flags of `minisgl stage generate`."""

    model: ModelConfig
    names: NamesConfig
    defaults: DefaultsConfig
    worker: WorkerConfig
    engine: EngineConfig
    log: LogConfig
