"""What the workers of a namespace serve together: one model's weights, one tokenizer, one context.

The log keeps what each stage serves while one of its workers lives. A worker that does not fit gets no slot.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Literal

import orjson

from pipeline.vocabulary import token_files


@dataclass(frozen=True, slots=True)
class Serving:
    """What one worker serves, or all living workers of a stage. An empty part fits to everything."""

    model: str = ""
    """Name or folder of the model, for people."""
    weights: str = ""
    """Fingerprint of the weights and the model's config, whatever the dtype."""
    tokenizer: str = ""
    """Fingerprint of the tokenizer and the chat template."""
    context: int = 0
    """Number of tokens, prompt + output: of a worker, the most that it can serve; of a stage, how many it serves."""
    context_flag: str = field(default="", compare=False)
    """Flag that bounds this worker's context."""
    context_step: int = field(default=1, compare=False)
    """Tokens of context for each 1 of that flag."""

    def difference(self, served: Serving) -> Literal["", "weights", "tokenizer", "context"]:
        """Return the part in which this worker does not fit to *served*; "" if it fits. More context fits, too."""
        if self.weights and served.weights and self.weights != served.weights:
            return "weights"
        if self.tokenizer and served.tokenizer and self.tokenizer != served.tokenizer:
            return "tokenizer"
        return "context" if 0 < self.context < served.context else ""

    def refusal(self, served: Serving, stage: str, namespace: str) -> str:
        """Return the line for the user of a worker that does not fit to what *stage* serves."""
        what = self.difference(served)
        if what == "context":
            least = -(-served.context // self.context_step)
            return (
                f"{self.context_flag}: gives a context of {self.context} tokens, but the {stage} workers of --namespace"
                f" {namespace} serve {served.context}; pass {self.context_flag} {least} or more, or stop them first"
            )
        mine, theirs = (f"{serving.model} ({what} {getattr(serving, what)})" for serving in (self, served))
        return (
            f"--namespace {namespace}: its {stage} workers serve {theirs}, but this worker has {mine}; pass another"
            " --namespace, or stop them first"
        )

    def why_not_continued(self, begun: Serving) -> str:
        """Return why a worker cannot continue a request that *begun* served, for the client; "" if it can."""
        what = self.difference(begun)
        if not what:
            return ""
        theirs, mine = (getattr(serving, what) for serving in (begun, self))
        return f"The request was begun with another model ({what} {theirs}), this server has {mine}; send it again."

    def text(self) -> str:
        """Return the form that the log keeps: JSON, without empty parts."""
        kept = ("model", "weights", "tokenizer", "context")
        return orjson.dumps({name: value for name in kept if (value := getattr(self, name))}).decode()

    @classmethod
    def parse(cls, text: str | bytes) -> Serving:
        """Return the Serving of a `text`. Leave out parts of a newer version, and parts that `text` never has."""
        try:
            parts = dict(orjson.loads(text))
        except (ValueError, TypeError):
            return cls()
        defaults = {field.name: field.default for field in dataclasses.fields(cls)}
        return cls(**{name: parts[name] for name in defaults if type(parts.get(name)) is type(defaults[name])})


@dataclass(frozen=True, slots=True)
class Served:
    """What a stage serves at one moment."""

    serving: Serving
    ttl_ms: int
    """Time for which it holds without another sign of life from one of its workers."""


def tokenizer_fingerprint(folder: Path) -> str:
    """Return 16 hex digits that identify the tokenizer of a model folder: all bytes of the files that define it."""
    digest = sha256()
    for name in (*token_files(folder), "chat_template.jinja"):
        path = folder / name
        digest.update(path.read_bytes() if path.exists() else b"")
    return digest.hexdigest()[:16]
