"""Flags of `minisgl shell`."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.flags import first_word, flag
from web.config import DEFAULT_PORT


@dataclass(frozen=True, slots=True)
class ShellConfig:
    """Whom the shell talks to, and what it begins with."""

    url: str = flag("--url", default=f"http://127.0.0.1:{DEFAULT_PORT}", help="URL of the server, with or without /v1")
    model: str = flag("--model", default="", help="name of the model [the first that the server lists]")
    key: str = flag(
        "--api-key",
        default="",
        parse=first_word,
        secret=True,
        help=(
            "key to send; prefer MINISGL_API_KEY, because other users of this machine can read a command line [none]"
        ),
    )
    system: str = flag("--system", default="", help="system text, before the conversation [none]")
    params: tuple[str, ...] = flag(
        "--set",
        default=(),
        repeated=True,
        help=("fields of every request, NAME=VALUE: temperature=0.2 max_tokens=64 [the server's defaults]"),
    )
    prompt: str = flag("--prompt", "-q", default="", help="ask this one question, print the answer and exit")
