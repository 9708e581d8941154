"""The requests and stream readers of `vllm bench serve`, completions and chat.

vLLM is installed without its requirements, which are for GPUs. The module of its readers needs none of them, so it runs
without the rest of the package.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import sys
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

import aiohttp

URL, MODEL = sys.argv[1:]
READERS = importlib.metadata.distribution("vllm").locate_file("vllm/benchmarks/lib/endpoint_request_func.py")
OUTPUT_LEN = 24

spec = spec_from_file_location("endpoint_request_func", str(READERS))
assert spec is not None and spec.loader is not None
sys.modules[spec.name] = vllm = module_from_spec(spec)
spec.loader.exec_module(vllm)


async def bench(session: aiohttp.ClientSession, backend: str, path: str, **fields: Any) -> None:
    """Send six requests at once, as the benchmark does; check what it measured."""
    defaults = {"prompt": "How does a log remember?", "prompt_len": 1, "output_len": OUTPUT_LEN, "model": MODEL}
    sent = {"api_url": f"{URL}/{path}", "ignore_eos": True, "request_id": "bench-0", "extra_body": {"temperature": 0}}
    asked = vllm.RequestFuncInput(**{**defaults, **sent, **fields})
    function = vllm.ASYNC_REQUEST_FUNCS[backend]
    measured = await asyncio.gather(*(function(asked, session) for _ in range(6)))
    for each in measured:
        assert each.success, each.error
        assert each.output_tokens == OUTPUT_LEN and each.prompt_len > 1, each
        assert each.generated_text and each.itl and 0 < each.ttft < each.latency, each
    assert len({each.generated_text for each in measured}) == 1


async def main() -> None:
    async with aiohttp.ClientSession() as session:
        for backend in ("vllm", "openai"):
            await bench(session, backend, "completions")
        await bench(session, "vllm", "completions", logprobs=2, prompt=[1, 2, 3])
        await bench(session, "openai-chat", "chat/completions")


asyncio.run(main())
