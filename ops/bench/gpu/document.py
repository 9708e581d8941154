"""What a run of the phases found: the JSON file. The models here are its schema; schema.json is written from them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

Status = Literal["ok", "wrong", "failed", "killed", "timeout", "cut", "skipped"]
"""`wrong`: it ran, and an item is wrong. `cut`: the budget was spent before it, or while it ran."""
BAD: Final[frozenset[Status]] = frozenset(("wrong", "failed", "killed", "timeout"))


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Item(Frozen):
    """One thing that a phase measured or compared."""

    item: str
    ok: bool | None = Field(description="null: a figure, or skipped; there is nothing to be right or wrong")
    error: str = ""
    skipped: str = Field(default="", description="why it cannot run here")
    figures: dict[str, JsonValue] = {}


class Phase(Frozen):
    """What became of one phase. It has every item that the process reported, however it ended."""

    name: str
    status: Status
    reason: str = Field(description="of any status but ok")
    limit_s: float
    wall_s: float
    items: tuple[Item, ...] = ()

    @property
    def wrong(self) -> list[Item]:
        return [item for item in self.items if item.ok is False]


class Document(Frozen):
    """One run. It is written after every phase; `finished` is false until the last."""

    version: Literal[1] = 1
    arguments: tuple[str, ...]
    began: str = Field(description="UTC, ISO 8601")
    device: Literal["cuda", "cpu"]
    size: Literal["toy", "small", "full"]
    budget_s: float
    install_s: float | None = Field(description="null: no --wheels")
    wall_s: float
    finished: bool
    cut: tuple[str, ...] = Field(description="phases that the budget cut off, whole or in part")
    phases: tuple[Phase, ...]

    @property
    def ok(self) -> bool:
        return not any(phase.status in BAD for phase in self.phases)


def schema() -> str:
    """Return the JSON schema of the file, as it stands in schema.json."""
    return json.dumps(Document.model_json_schema(mode="serialization"), indent=2, sort_keys=True) + "\n"


def write(path: Path, document: Document) -> None:
    """Replace the file at *path* in one step: a reader, or a power cut, sees the old one or the new one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(document.model_dump_json(indent=2) + "\n")
    os.replace(beside, path)
