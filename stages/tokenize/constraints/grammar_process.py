"""The tokenizer's process that makes and checks grammars: one at a time, each within a bound of work.

The process holds no state of value, so a grammar that exceeds a bound ends it. Linux ends it at the limit of CPU time
(ITIMER_PROF), and refuses memory beyond the other limit, for which llguidance aborts. It ends with its tokenizer.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path
from typing import Final

import orjson

from pipeline.errors import RequestError
from pipeline.grammars import with_stack
from pipeline.process.parent import die_with_supervisor
from stages.tokenize.constraints.answers import answer_grammar
from stages.tokenize.constraints.asked import Asked
from stages.tokenize.constraints.frames import read_frame, write_frame
from stages.tokenize.constraints.grammars import byte_tokens, tokens_of
from stages.tokenize.markup import Dialect

READ_BYTES: Final = 32
"""Memory for each byte of a question, which may have 4 MiB of tools beside the one that is called."""
STATUS: Final = Path("/proc/self/status")


def main() -> int:
    """Answer questions until the tokenizer ends; return the exit code.

    Arguments: CPU seconds and bytes of memory for each question. The first message is the model's dialect.
    """
    die_with_supervisor(os.environ)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tokenizer, which may go on
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    questions, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is not an answer
    limit_cpu_s, limit_bytes = float(sys.argv[1]), int(sys.argv[2])
    if (said := read_frame(questions)) is None:
        return 0
    dialect = Dialect.read(said)
    byte_tokens()
    tokens_of(dialect.added)

    def answer_all() -> None:
        at_rest = _memory()
        while (question := read_frame(questions)) is not None:
            if at_rest:
                most = at_rest + limit_bytes + READ_BYTES * len(question)
                resource.setrlimit(resource.RLIMIT_DATA, (most, resource.RLIM_INFINITY))
            signal.setitimer(signal.ITIMER_PROF, limit_cpu_s)
            answer = _answer(question, dialect)
            signal.setitimer(signal.ITIMER_PROF, 0)
            write_frame(answers, answer)

    with_stack(answer_all)
    return 0


def _answer(question: bytes, dialect: Dialect) -> bytes:
    """Return the grammar, or the error of its request, in JSON."""
    param = ""
    try:
        asked = Asked.model_validate_json(question)
        param = asked.param
        return orjson.dumps({"grammar": answer_grammar(asked, dialect)})
    except RequestError as error:
        return _said(error)
    except Exception as error:
        message = f"{param}: no grammar can be made: {error!r}"[:500]
        return _said(RequestError(message, code="tokenizer_error", param=param))


def _said(error: RequestError) -> bytes:
    return orjson.dumps({"message": error.message, "code": error.code, "param": error.param, "status": error.status})


def _memory() -> int:
    """Return how many bytes this process may write to; 0: not on Linux, and only Linux reports and limits it."""
    if not STATUS.exists():
        return 0
    (num_kb,) = (line.split()[1] for line in STATUS.read_text().splitlines() if line.startswith("VmData:"))
    return int(num_kb) << 10


if __name__ == "__main__":
    sys.exit(main())
