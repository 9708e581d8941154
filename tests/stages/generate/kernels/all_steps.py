"""Computes steps of many kinds with a library of its own and prints a hash of every bit: in a process of its own."""

from __future__ import annotations

import random
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from support.checkpoints import make_engine
from support.plans import Request, plan

from stages.generate.kernels import library
from stages.generate.model import compiled as decoder

PAGE_SIZE, NUM_PAGES = 8, 128
NUMBERS = (("float32", "none"), ("bfloat16", "none"), ("float16", "none"), ("bfloat16", "int8"))


def main(path: str, variant: str, folders: list[str]) -> None:
    loaded = library.load(Path(path))
    assert isinstance(loaded, library.Library), loaded
    vars(decoder)["library"] = lambda: loaded
    digest, draw = sha256(), random.Random(0)
    for folder in folders:
        for dtype, quantization in NUMBERS:
            how: dict[str, Any] = {
                "kernels": variant,
                "quantization": quantization,
                "threads": 2,
                "page_size": PAGE_SIZE,
            }
            engine = make_engine(Path(folder), dtype, num_pages=NUM_PAGES, **how)
            pool = draw.sample(range(NUM_PAGES), NUM_PAGES)
            prompts = [draw.choices(range(4, 400), k=5 + 37 * table) for table in range(3)]
            requests = [Request(table, prompt, pool, page_size=PAGE_SIZE) for table, prompt in enumerate(prompts)]
            for chunk in (7, 1, 64, 64):
                coming = [request.row(chunk) for request in requests if request.computed < len(request.tokens)]
                digest.update(engine.logits(plan(*coming)).numpy().tobytes())
            for request in requests:
                kv_L2NKSD = engine.kv_L2PKSD[:, :, request.pages]
                kv_L2KCD = kv_L2NKSD.movedim(2, 3).flatten(3, 4)[..., : request.computed, :]
                digest.update(kv_L2KCD.contiguous().view(torch.uint8).numpy().tobytes())
    sys.stdout.write(digest.hexdigest())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
