"""Steps of every family with a library that watches its memory: run by `test_sanitized.py` in a process of its own."""

from __future__ import annotations

import random
import sys
from pathlib import Path

from checkpoints import make_engine
from plans import Request, plan

from stages.generate.kernels import decoder, library


def main(path: str, variant: str, folders: list[str]) -> None:
    loaded = library.load(Path(path))
    assert isinstance(loaded, library.Library), loaded
    vars(decoder)["library"] = lambda: loaded
    draw = random.Random(0)
    for folder in folders:
        for dtype, quantization in (
            ("float32", "none"),
            ("bfloat16", "none"),
            ("float16", "none"),
            ("bfloat16", "int8"),
        ):
            engine = make_engine(
                Path(folder), dtype, kernels=variant, quantization=quantization, threads=2, page_size=8
            )
            pool = draw.sample(range(128), 128)
            requests = [
                Request(table, draw.choices(range(4, 400), k=5 + 37 * table), pool, page_size=8) for table in range(3)
            ]
            for chunk in (7, 1, 64, 64):
                engine.forward(
                    plan(*(request.row(chunk) for request in requests if request.computed < len(request.tokens)))
                )
    sys.stdout.write("computed\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
