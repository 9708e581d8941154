"""The stages behind a frontend, without a model: they commit to a real Redis what a test wants said.

Stages     one commit at a time, by hand
StandIn    a thread that answers what comes; what it says depends on the prompt:
           "refuse"   a Failed with status 400        "endless"   tokens until somebody ends the request
           "silent"   nothing at all                  "flood"     the same, 4 KB each
           "break"    one token, then a Failed with status 500
           "held"     "Hel", and the rest as soon as `released` is set
           "marked"   what `marked` says
           "say: .."  what follows, in pieces
           else       "Hel", "", "lo\u2028!", Finished
           A tokenizer's task is answered at once, but for "refuse" and "silent": a token is a letter's number.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from support.log_contract import FINISHED, LONG_MS, Scene, submitted

from pipeline.events import (
    Answered,
    End,
    Failed,
    Finished,
    Markup,
    PromptInfo,
    Submitted,
    Tokenized,
    TokensProduced,
    Usage,
    decode,
)
from pipeline.log.protocol import Entry, Produced
from pipeline.log.redis import RedisLog
from pipeline.names import DETOKENIZE, GENERATE, SEAL, TOKENIZE, Names, slot_name, tokens_id
from pipeline.stage.slots import Phase, Status
from stages.tokenize.worker import MOST_ANSWERED

MODELS = ("org/demo", "demo")
BOS = "<s>"
CONTEXT = 128
NUMERICS = "bfloat16/none/avx512/1/64/torch-2.13.0+cpu-avx512/sampler-2"
RENEW_S = 3.0
SAY = "say: "
PIECE = 24
"""Characters of a token of what it is told to say."""

Script = Iterator[tuple[int, TokensProduced | End] | None]
"""What is said of a request, a piece at a time; None: nothing yet."""


def finished(n: int) -> Finished:
    usage = Usage(prompt_tokens=5, completion_tokens=n, cached_tokens=2)
    return FINISHED.model_copy(update={"n": n, "usage": usage})


def tokens(n: int, text: str = "x", *, count: int = 1) -> TokensProduced:
    return TokensProduced(count=count, tokens=(7,) * count, text=text, step=f"1-{n}")


class Stages:
    """All three stages, each with its slot 0."""

    def __init__(self, url: str, sampling_defaults: Mapping[str, int | float] | None = None) -> None:
        """*sampling_defaults*: what the engine's model recommends."""
        self.has_chat_template = self.batch_invariant = True
        self.tokenizer = "of the model"
        self.sampling_defaults = dict(sampling_defaults or {})
        self.log = RedisLog(url, Names())
        self._scene = Scene(self.log)
        self._scene.prepare()
        self._owners = {stage: self._scene.own(slot_name(stage, 0)) for stage in (TOKENIZE, GENERATE, DETOKENIZE)}
        self._numbers = itertools.count(1)
        self._control = "0-0"
        self._entries: dict[str, str] = {}
        self._tasks: dict[str, Entry] = {}

    def close(self) -> None:
        self.log.close()

    def say_phase(self, phase: Phase, *stages: str) -> None:
        """Publish a status, for 10 s."""
        for stage in stages or tuple(self._owners):
            owner = self._owners[stage]
            status = Status(slot=owner.slot, owner=str(owner), pid=1, host="here", phase=phase)
            if stage == GENERATE:
                served = {"models": MODELS, "context": CONTEXT, "sampling_defaults": self.sampling_defaults}
                how = {"numerics": NUMERICS, "batch_invariant": self.batch_invariant}
                status = status.model_copy(update=served | how)
            if stage == TOKENIZE:
                what = {"bos": BOS, "has_chat_template": self.has_chat_template, "fingerprint": self.tokenizer}
                status = status.model_copy(update=what)
            assert self.log.renew(owner, LONG_MS, status.model_dump_json())

    def leave(self, stage: str) -> None:
        """Give the stage's slot back, as a worker does that ends in good order."""
        self._owners[stage] = self._scene.own_after(self._owners[stage])

    def waiting(self) -> int:
        """Return how many requests no tokenizer has."""
        return self.log.backlog(self._scene.submitted)

    def take_in(self) -> list[tuple[str, Submitted]]:
        """Tokenize and take what was submitted; what is for the tokenizer alone waits for `answer`."""
        came = []
        for entry in self.log.read(self._scene.submitted, "tokenize-0", max_entries=8, block_ms=0):
            uid = entry.fields["uid"]
            (history,) = self.log.histories([uid])
            if not history:  # it was erased
                continue
            event = decode(history[0].fields)
            assert isinstance(event, Submitted)
            if _words(event) == "refuse":
                refusal = Failed(status=400, code="context_length_exceeded", message="Too long.", param="messages")
                self.log.end(uid, refusal, frontend=event.frontend, consume=entry)
            elif event.task != "generate":
                self._tasks[uid] = entry
                came.append((uid, event))
            elif self.log.tokenized(entry, Tokenized(token_ids=(1, 2, 3, 4, 5), fingerprint="f", by="tokenize-0")):
                came.append((uid, event))
        taken = self.log.take(self._owners[GENERATE], 8, control_cursor=self._control)
        self._entries |= {entry.fields["uid"]: entry.id for entry in taken.entries}
        return came

    def answer(self, uid: str, event: Submitted) -> None:
        """Answer what is for the tokenizer alone."""
        entry = self._tasks.pop(uid)
        self.log.end(uid, _answer(event), frontend=event.frontend, consume=entry)

    def begin(self, uid: str, frontend: str) -> None:
        """Submit a request as a frontend would, and take it in."""
        self.log.submit(uid, [submitted(frontend)])
        self.take_in()

    def say(self, uid: str, n: int, *events: TokensProduced | End, frontend: str) -> tuple[str, ...]:
        """Commit events of one step, tokens up to number *n*; return who was ended by others."""
        ends = any(not isinstance(event, TokensProduced) for event in events)
        entries = [self._entries[uid]] if ends and uid in self._entries else []
        committed = self._scene.step(self._owners[GENERATE], next(self._numbers), *entries, cursor=self._control)
        self._control = committed.control_cursor
        entry = self._scene.read_one(self._scene.steps, "detokenize-0")
        produced = [
            Produced(uid, tokens_id(n) if isinstance(event, TokensProduced) else SEAL, n, event, frontend)
            for event in events
        ]
        assert self.log.produced(self._owners[DETOKENIZE], [entry], "generate-0", produced)
        return committed.ended

    def ends(self, uid: str) -> End | None:
        """Return what sealed the history of *uid*."""
        entries = self.log.histories([uid])[0]
        last = decode(entries[-1].fields) if entries else None
        return last if isinstance(last, End) else None


class StandIn:
    """A thread that is all three stages; with *renews*, for longer than a minute."""

    def __init__(self, url: str, stages: Stages | None = None, *, renews: bool = False) -> None:
        self.stages = stages or Stages(url)
        self.released = threading.Event()
        self.seen: list[tuple[str, Submitted]] = []
        """Every request that was taken in, the frontend's probe included."""
        self.answers_probes = True
        self.marked: tuple[Markup, Sequence[str]] = (Markup(), ())
        """How the text of an answer is to be read, and that text, a token at a time."""
        self.scripts: dict[str, Callable[[Submitted], Script]] = {}
        """How a test answers certain words."""
        self._running: dict[str, tuple[Submitted, Script]] = {}
        self._renews = renews
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stand-in stages")
        self.stages.say_phase("ready")
        self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()
        self.stages.close()

    def requests(self) -> list[tuple[str, Submitted]]:
        return [(uid, event) for uid, event in self.seen if event.endpoint != "probe"]

    def _run(self) -> None:
        renewed_s = time.monotonic()
        while not self._stopped.wait(0.002):
            if self._renews and time.monotonic() - renewed_s > RENEW_S:
                renewed_s = time.monotonic()
                self.stages.say_phase("ready")
            for uid, event in self.stages.take_in():
                self.seen.append((uid, event))
                if event.task != "generate":
                    if _words(event) != "silent":
                        self.stages.answer(uid, event)
                    continue
                answered = self.answers_probes or event.endpoint != "probe"
                self._running[uid] = (event, self._script(event) if answered else iter(()))
            for uid, (event, script) in list(self._running.items()):
                following = next(script, None)
                if following is None:
                    continue
                n, said = following
                ended = self.stages.say(uid, n, said, frontend=event.frontend)
                for each in (*ended, *([] if isinstance(said, TokensProduced) else [uid])):
                    self._running.pop(each, None)

    def _script(self, event: Submitted) -> Script:
        match "marked" if event.replay is not None and self.marked[1] else _words(event):
            case words if words in self.scripts:
                yield from self.scripts[words](event)
            case "silent":
                return
            case "endless":
                for n in itertools.count(1):
                    yield n, tokens(n, f"{n} ")
            case "flood":
                for n in itertools.count(1):
                    yield n, tokens(n, "x" * 4096)
            case "break":
                yield 1, tokens(1)
                yield 1, Failed(n=1, status=500, code="engine_error", message="It broke.")
            case "marked":
                markup, texts = self.marked
                for n, text in enumerate(texts, 1):
                    yield n, tokens(n, text).model_copy(update={"markup": markup if n == 1 else None})
                yield len(texts), finished(len(texts))
            case "held":
                yield 1, tokens(1, "Hel")
                while not self.released.is_set():
                    yield None
                yield 2, tokens(2, "lo!")
                yield 2, finished(2)
            case words if words.startswith(SAY):
                text = words.removeprefix(SAY)
                pieces = [text[at : at + PIECE] for at in range(0, len(text), PIECE)]
                for n, piece in enumerate(pieces, 1):
                    yield n, tokens(n, piece)
                yield len(pieces), finished(len(pieces))
            case _:
                told = PromptInfo(num_tokens=5, cached_tokens=2) if event.presentation.tells_prompt else None
                for n, text in enumerate(("Hel", "", "lo\u2028!"), 1):
                    yield n, tokens(n, text).model_copy(update={"prompt": told if n == 1 else None})
                yield 3, finished(3)


def _answer(event: Submitted) -> Answered:
    match event.task:
        case "tokenize":
            letters = tuple(_words(event)[:MOST_ANSWERED])
            pieces = letters if event.return_pieces else ()
            return Answered(token_ids=tuple(map(ord, letters)), pieces=pieces, by="tokenize-0")
        case "detokenize":
            return Answered(text="".join(map(chr, event.prompt_ids)), by="tokenize-0")
        case _:
            return Answered(text='{"eos_token":"!"}', by="tokenize-0")


def _words(event: Submitted) -> str:
    return event.prompt or (str(event.messages[-1]["content"]) if event.messages else "")
