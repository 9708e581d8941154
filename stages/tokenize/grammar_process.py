"""The process in which a tokenizer has grammars made and checked: one at a time, each within a bound of work.

It holds nothing that is worth anything, so a grammar that goes beyond ends it. Linux ends it at the limit of CPU time
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
from stages.tokenize.answers import answer_grammar
from stages.tokenize.asked import Asked
from stages.tokenize.frames import read_frame, write_frame
from stages.tokenize.grammars import byte_tokens
from stages.tokenize.markup import Dialect

STATUS: Final = Path("/proc/self/status")


def main() -> int:
    """Answer questions until the tokenizer ends; return the exit code.

    Arguments: CPU seconds and bytes of memory for each question. The first message is the model's dialect.
    """
    die_with_supervisor(os.environ)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tokenizer, which may go on
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    questions, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    limit_cpu_s, limit_bytes = float(sys.argv[1]), int(sys.argv[2])
    if (said := read_frame(questions)) is None:
        return 0
    dialect = Dialect.read(said)
    byte_tokens()

    def answer_all() -> None:
        _limit_memory(limit_bytes)
        while (question := read_frame(questions)) is not None:
            signal.setitimer(signal.ITIMER_PROF, limit_cpu_s)
            answer = _answer(question, dialect)
            signal.setitimer(signal.ITIMER_PROF, 0)
            write_frame(answers, answer)

    with_stack(answer_all)
    return 0


def _answer(question: bytes, dialect: Dialect) -> bytes:
    """Return the grammar, or the error of its request, in JSON."""
    asked = Asked.model_validate_json(question)
    try:
        return orjson.dumps({"grammar": answer_grammar(asked, dialect)})
    except RequestError as error:
        return _said(error)
    except Exception as error:
        message = f"{asked.param}: no grammar can be made: {error!r}"[:500]
        return _said(RequestError(message, code="tokenizer_error", param=asked.param))


def _said(error: RequestError) -> bytes:
    return orjson.dumps({"message": error.message, "code": error.code, "param": error.param, "status": error.status})


def _limit_memory(num_bytes: int) -> None:
    """Let this process have so many bytes more. Only Linux says how much it has, and only Linux keeps such a limit."""
    if not STATUS.exists():
        return
    (has_kb,) = (line.split()[1] for line in STATUS.read_text().splitlines() if line.startswith("VmData:"))
    most = (int(has_kb) << 10) + num_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


if __name__ == "__main__":
    sys.exit(main())
