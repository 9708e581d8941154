"""The parts of docs/ that are made from code: request fields, flags, metrics.

`make docs` writes them between their markers; `tests/test_docs.py` compares them with the files.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from unittest import mock

from support import fields

import minisgl
from ops.shell.lines import COMMANDS
from pipeline.metrics.families import FAMILIES
from web.wire.constraints import StructuredOutputs
from web.wire.fields import TABLE, Field, Place
from web.wire.openai.messages import Message
from web.wire.openai.schemas import ChatRequest, CompletionRequest, StreamOptions
from web.wire.openai.strict import Strict
from web.wire.openai.tokenizer import DetokenizeRequest, TokenizeRequest
from web.wire.sglang.schemas import AbortRequest, SGLangRequest, SGLangSampling

ROOT = Path(__file__).resolve().parents[2]
STAGES = ("tokenize", "generate", "detokenize", "web", "archive")
BENCHES = ("offline", "serve", "pipeline", "compare", "tail", "cost", "gpu")


class _Found(BaseException):
    """Leaves a command with the parser that would read its flags."""


def parser_of(command: str) -> argparse.ArgumentParser:
    """Return the parser of `minisgl COMMAND`, wherever its flags are declared."""

    def stop(parser: argparse.ArgumentParser, *_: object) -> None:
        raise _Found(parser)

    try:
        with mock.patch.object(argparse.ArgumentParser, "parse_args", stop):
            minisgl.main([*command.split(), "--help"])
    except _Found as found:
        parser: argparse.ArgumentParser = found.args[0]
        return parser
    raise ValueError(f"minisgl {command} reads no flags")


def flags_of(command: str) -> list[tuple[str, str, str]]:
    """Return the flags of a command as cells of a table: names with choices, meaning, default."""
    found = []
    for action in parser_of(command)._actions:
        if not action.option_strings or "--help" in action.option_strings:
            continue
        first, *others = action.option_strings
        values = str(action.metavar) if str(action.metavar).startswith("{") else ""  # else a name, such as PORT
        names = ", ".join(f"`{each}`" for each in (f"{first} {values}".strip(), *others))
        text = re.fullmatch(r"(.*?)(?: \[([^\]]*)\])?", (action.help or "").replace("%%", "%"), re.DOTALL)
        assert text is not None  # every text matches
        found.append((_cell(names), _cell(text[1]), _cell(text[2] or "")))
    return found


def flags(commands: Mapping[str, str], *, without: str = "") -> str:
    """Return a table of the flags of several *commands*, each with the name that the last column has for it. Those that
    the command *without* has, too, are left out.
    """
    left_out = flags_of(without) if without else []
    users: dict[tuple[str, str, str], list[str]] = {}
    for command, name in commands.items():
        for row in (row for row in flags_of(command) if row not in left_out):
            users.setdefault(row, []).append(name)
    head, line = "| flag | meaning | default | used by |", "|---|---|---|---|"
    return "\n".join([head, line, *(f"| {' | '.join([*row, ', '.join(names)])} |" for row, names in users.items())])


def more_flags(command: str) -> str:
    """Return a table of the flags of *command* that `minisgl serve` does not have."""
    rows = [row for row in flags_of(command) if row not in flags_of("serve")]
    return "\n".join(["| flag | meaning | default |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def all_fields() -> str:
    """Return the table of all fields of requests that generate."""
    rows = []
    for row in sorted(TABLE["generate"], key=lambda row: row.name):
        chat, completions, generate = (
            _outcome(row, model.model_fields) for model in (ChatRequest, CompletionRequest, SGLangRequest)
        )
        if row.name in SGLangSampling.model_fields:
            generate = "in `sampling_params`"
        rows.append(f"| `{row.name}` | {chat} | {completions} | {generate} | {_told(row)} |")
    head = "| field | chat | completions | /generate | values that pass | use instead |"
    return "\n".join([head, "|---|---|---|---|---|---|", *rows])


def other_fields() -> str:
    """Return the table of all fields of other objects."""
    objects: Mapping[Place, tuple[str, type[Strict]]] = {
        "message": ("a message", Message),
        "stream_options": ("`stream_options`", StreamOptions),
        "structured_outputs": ("`structured_outputs`", StructuredOutputs),
        "tokenize": ("/tokenize", TokenizeRequest),
        "detokenize": ("/detokenize", DetokenizeRequest),
        "abort": ("/abort_request", AbortRequest),
    }
    rows = [
        f"| {name} | `{row.name}` | {_outcome(row, _names(model))} | {_told(row)} |"
        for place, (name, model) in objects.items()
        for row in sorted(TABLE[place], key=lambda row: row.name)
    ]
    return "\n".join(["| of | field | here | values that pass | use instead |", "|---|---|---|---|---|", *rows])


def _names(model: type[Strict]) -> list[str]:
    return [info.alias or name for name, info in model.model_fields.items()]


def _outcome(row: Field, declared: Collection[str]) -> str:
    if row.name in declared:
        return "yes" if row.kind == "effect" else "kept"
    return "refused" if row.kind == "effect" else "noted"


def _told(row: Field) -> str:
    return f"{', '.join(f'`{json.dumps(value)}`' for value in row.neutral)} | {_cell(row.instead)}"


def metrics() -> str:
    """Return the table of all metric families."""
    rows = [
        f"| `{one.shown_as}` | {one.kind} | {', '.join(f'`{label}`' for label in one.labels)} | "
        f"{', '.join(one.stages) or 'log'} | {_cell(one.help)} |"
        for one in FAMILIES
    ]
    return "\n".join(["| metric | kind | labels | measured by | meaning |", "|---|---|---|---|---|", *rows])


def shell_commands() -> str:
    """Return the table of the commands in a chat."""
    rows = [
        f"| {_cell(f'`{name} {argument}`'.replace(' `', '`'))} | {_cell(effect)} |"
        for name, (argument, effect) in COMMANDS.items()
    ]
    return "\n".join(["| command | effect |", "|---|---|", *rows])


REPLAYS = ("replay show", "replay run", "replay diff", "replay dump", "replay import", "replay forget")
TOOLS = ("trace", "top", "dead ls", "dead show", "dead requeue", "dead drop")
BLOCKS: Mapping[str, Callable[[], str]] = {
    "fields": fields.table,
    "all fields": all_fields,
    "fields of other objects": other_fields,
    "metrics": metrics,
    "flags of serve and stage": partial(flags, {"serve": "serve"} | {f"stage {name}": name for name in STAGES}),
    "flags of trace, top and dead": partial(flags, {name: name for name in TOOLS}),
    "flags of keys": partial(flags, {f"keys {name}": name for name in ("add", "ls", "revoke", "rotate")}),
    "flags of replay": partial(flags, {name: name for name in REPLAYS}, without="serve"),
    "flags of replay schedule": partial(more_flags, "replay schedule"),
    "commands of shell": shell_commands,
    "flags of replay drive": partial(more_flags, "replay drive"),
    "flags of shell": partial(more_flags, "shell"),
    **{f"flags of bench {name}": partial(more_flags, f"bench {name}") for name in BENCHES},
}
"""Name of a block -> what it holds."""


def marked(name: str) -> re.Pattern[str]:
    """Return the pattern of the block *name* with its markers."""
    return re.compile(rf"(<!-- made by `make docs`: {re.escape(name)} -->\n).*?(\n<!-- end -->)", re.DOTALL)


def pages() -> Sequence[Path]:
    """Return the pages that may have blocks."""
    return sorted((ROOT / "docs").glob("*.md"))


def written(text: str) -> str:
    """Return the *text* of a page with every block as the code says now."""
    for name, make in BLOCKS.items():
        if marked(name).search(text):
            block = make()
            text = marked(name).sub(lambda found, block=block: found[1] + block + found[2], text)  # type: ignore[misc]
    return text


if __name__ == "__main__":
    for page in pages():
        before = page.read_text()
        after = written(before)
        if after != before:
            page.write_text(after)
            sys.stdout.write(f"{page.relative_to(ROOT)} is written\n")
