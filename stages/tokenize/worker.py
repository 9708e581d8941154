"""Submitted -> Tokenized | Answered | Failed. Encodes the requests of one read as a batch and commits each by itself.

Long prompts, and long lists of token ids to decode, come after that batch, and only one of them before the next read,
so that the others wait for no more than one. A request that takes too long fails and ends the process: nothing can stop
the encoder. Another process checks grammars, one at a time. Only their own requests wait for it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import structlog

from pipeline.errors import LogError, LogUnavailable, RequestError, UndecodableEvent
from pipeline.events import Answered, Failed, Submitted, Tokenized
from pipeline.log.entries import request_of
from pipeline.log.protocol import DeadLetter, Entry, Inbox, RequestLog, Turn
from pipeline.log.redis import RedisLog
from pipeline.metrics.counters import Measures
from pipeline.metrics.families import BATCH_SECONDS, BURIED, COMMIT_SECONDS, PROMPTS, PROMPTS_TOKENS, REFUSALS
from pipeline.names import GENERATE, SEAL, TOKENIZE, base_uid
from pipeline.process.failpoints import failpoint
from pipeline.process.priority import give_way
from pipeline.scored import pairs_told, too_many
from pipeline.serving import Serving
from pipeline.stage.slots import Heartbeat, Offer, Reporter, read_statuses, wait_until_it_fits
from pipeline.stage.unreadable import UnreadableEntries, uids_of
from pipeline.stage.worker import BACKOFF_S, Stop, WorkerProcess, follow
from pipeline.walk import walk
from stages.tokenize.config import DEFAULT_CPU_S, TokenizeConfig
from stages.tokenize.constraints.checker import Checked, GrammarChecker
from stages.tokenize.placement import Placement
from stages.tokenize.prompts import PromptEncoder, Rendered, is_cut, limit_too_high, tokens_kept, too_long

logger = structlog.get_logger()

BRIEF_TOKENS = 16 << 10
"""Number of token ids that are decoded as fast as a short prompt is encoded."""
MOST_READ = 4
"""Largest number of entries of a read: few, so that several tokenizers share a burst, and enough for a batch."""
LONGEST_BATCH_S = 120.0
"""Patience of the watchdog with a batch; the CPU time for a request has its own limit."""
MOST_ANSWERED = 262_144
"""Largest number of token ids in an answer: the web process reads and writes that many in 50 ms."""
BODIES_COUNTED = 16
"""Number of bodies that are remembered, to count the prompt scores of each body together."""
MOST_HELD = 256
"""Number of requests that may wait for checks of their grammars. With fewer, a burst of honest ones would fail."""
CHECK_LOOK_S = 0.005
"""Time that a turn without new requests waits for a check."""
LEARN_EVERY_S = 1.0
GIVES_WAY = 10
"""Steps of niceness: a prompt of megabytes takes seconds of CPU time, and the streams go on meanwhile."""
LOAD_TIMEOUT_S = 600.0
"""Patience of the watchdog while the tokenizer is loaded."""
OF_THE_PROCESS = (KeyboardInterrupt, SystemExit)
"""Errors that end the process. All others fail one request, even if they are not an Exception, like a panic in the
tokenizer's Rust code."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Work:
    """A request to be encoded, decoded or answered."""

    entry: Entry
    submitted: Submitted
    prompt: Rendered | None
    """Prompt to encode; None: there is none."""
    num_kept: int | None = None
    """Number of the prompt's tokens that are kept; None: all."""
    grammar: str = ""
    """See Tokenized."""

    @property
    def is_brief(self) -> bool:
        """Whether it takes so little time that other requests need not be put off."""
        if self.prompt is None:
            return len(self.submitted.prompt_ids) <= BRIEF_TOKENS
        return not self.prompt.is_long


class TokenizeWorker:
    """The fold of the stage, between two commits of the log."""

    def __init__(
        self,
        log: RequestLog,
        slot_lease: Reporter,
        encoder: PromptEncoder,
        measures: Measures | None = None,
        *,
        limit_cpu_s: float = DEFAULT_CPU_S,
        checker: GrammarChecker | None = None,
        placement: Placement | None = None,
    ) -> None:
        self._log = log
        self._checker = checker
        self._held: dict[str, Entry] = {}
        """Entries that wait until their grammars are checked, in order, by id. Bodies are not kept: they are large."""
        self._checking: _Work | None = None
        """First of the held requests, once its check has begun."""
        self._limit_cpu_s = limit_cpu_s
        self.slot_lease = slot_lease
        self._encoder = encoder
        self._measures = measures or Measures()
        self._unreadable = UnreadableEntries(log, Inbox.submitted(log.names), self._measures)
        self.look = self._unreadable.look
        self.context = 0
        """Served context, as the engines last published it."""
        self._learnt_s = float("-inf")
        self._rendered: tuple[Submitted, Rendered] | None = None
        """Last of several siblings, without its own fields, and its prompt."""
        self._encoded: dict[int, tuple[Rendered, Sequence[int] | RequestError]] = {}
        """id() of a prompt -> the prompt and its tokens, for this batch and for the last of several siblings."""
        self._placement = placement
        self._told: dict[str, dict[str, int]] = {}
        """Base uid -> uid -> number of prompt scores that the answers contain, for the last bodies."""

    def held(self) -> Collection[str]:
        """Return the ids of the entries that wait until their grammars are checked."""
        return self._held.keys()

    def forget(self) -> None:
        """Forget all held requests: the log returns again what is not consumed."""
        self._held.clear()
        self._checking = None

    def handle(self, entries: Sequence[Entry]) -> list[Entry]:
        """Tokenize and commit. Return the entries that are put off: all long prompts but the first.

        Without *entries*, wait a moment for the check of a grammar. An error of one request fails only that request.
        """
        failpoint("tokenize.after_read")
        began_s = time.perf_counter()
        self.slot_lease.report_progress(patience_s=LONGEST_BATCH_S)
        self.learn_context()
        new = [entry for entry in entries if entry.id not in self._held]
        work = [ready for each in self._prepared(new) if (ready := self._with_grammar(each)) is not None]
        work += self._after_check(0 if new else CHECK_LOOK_S)
        brief = [each for each in work if each.is_brief]
        self._encode_all([each for each in brief if each.prompt is not None])
        long = [each for each in work if not each.is_brief]
        now = [each for each in long if each is long[0] or each.prompt is long[0].prompt is not None]
        for each in (*(each for each in brief if each.prompt is None), *now):
            if each.prompt is None:
                self._answer(each)
            else:
                self._encode_all([each])
        last = self._rendered[1] if self._rendered is not None else None  # the next batch may use it
        self._encoded = {key: known for key, known in self._encoded.items() if known[0] is last}
        self._measures.observe(BATCH_SECONDS, time.perf_counter() - began_s)
        return [each.entry for each in long if each not in now]

    def _prepared(self, entries: Sequence[Entry]) -> list[_Work]:
        """Return the work for each entry that is not finished already."""
        work: list[_Work] = []
        readable = [entry for entry in entries if self._is_readable(entry)]
        for entry, history in zip(readable, self._log.histories([e.fields["uid"] for e in readable]), strict=True):
            try:
                submitted = _submitted_of(history)
            except UndecodableEvent as error:
                self._refuse(entry, error)
                continue
            prepared = self._attempt("render_failed", [entry], partial(self._prepare, entry, submitted))
            if isinstance(prepared, RequestError):
                self._fail(entry, prepared)
            else:
                work.append(prepared)
        return work

    def _with_grammar(self, work: _Work) -> _Work | None:
        """Return the work with the grammar of its answer; None: it waits for a check, or is finished."""
        asked = work.prompt.asked if work.prompt is not None else None
        if asked is None:
            return work
        assert self._checker is not None, "only encoders without grammars have no checker"
        checked = self._checker.known(asked)
        if checked is not None:
            return self._checked(work, checked)
        if len(self._held) >= MOST_HELD:
            message = f"{len(self._held)} requests wait for the check of their grammars, the most there can be"
            error = RequestError(f"{message}; send it again later.", code="queue_full", param=asked.param, status=503)
            return self._checked(work, error)
        self._held[work.entry.id] = work.entry
        if self._checking is None:
            self._checking = work
            self._checker.begin(asked)
        return None

    def _checked(self, work: _Work, checked: Checked) -> _Work | None:
        if isinstance(checked, RequestError):
            self._fail(work.entry, checked)
            return None
        return replace(work, grammar=checked)

    def _after_check(self, timeout_s: float) -> list[_Work]:
        """Return the work that need not wait longer, and begin the next check. Wait *timeout_s* for the current one."""
        done: list[_Work | None] = []
        if self._checking is not None:
            assert self._checker is not None
            checked = self._checker.result(timeout_s)
            if checked is None:
                return []
            work, self._checking = self._checking, None
            del self._held[work.entry.id]
            done.append(self._checked(work, checked))
        while self._held and self._checking is None and len(done) < MOST_READ:  # of siblings the first is checked
            entry = self._held.pop(next(iter(self._held)))
            done += map(self._with_grammar, self._prepared([entry]))
        return [work for work in done if work is not None]

    def bury(self, entry: Entry, deaths: int) -> None:
        """End a request that killed its tokenizer *deaths* times, and write it to `dead`."""
        if not self._is_readable(entry):
            return
        message = f"The request ended its tokenizer {deaths} times."
        event = Failed(status=500, code="poisonous", message=message)
        ended = self._log.end(
            entry.fields["uid"],
            event,
            frontend=entry.fields["frontend"],
            consume=entry,
            dead=DeadLetter(TOKENIZE, entry.fields, deaths, message),
        )
        if ended:
            self._measures.add(REFUSALS, event.code)
            self._measures.add(BURIED)

    def learn_context(self) -> None:
        """Look up the served context once a second, and what the engines have cached; keep the last known context while
        no engine is there."""
        if self.context and time.monotonic() - self._learnt_s < LEARN_EVERY_S:
            return
        self._learnt_s = time.monotonic()
        statuses = read_statuses(self._log, GENERATE)
        if self._placement is not None:
            self._placement.learn(statuses)
        contexts = [status.context for status in statuses if status.context]
        if contexts:
            self.context = min(contexts)

    def _is_readable(self, entry: Entry) -> bool:
        """Return whether an entry names its request; if not, bury or leave it."""
        try:
            request_of(entry)
        except UndecodableEvent as error:
            self._refuse(entry, error)
            return False
        return True

    def _refuse(self, entry: Entry, error: UndecodableEvent) -> None:
        self._unreadable.refuse(entry, error, self.slot_lease.status.slot, uids_of(entry))

    def _prepare(self, entry: Entry, submitted: Submitted | RequestError) -> _Work:
        """Return the work for a request, with its prompt rendered.

        Raises:
            RequestError: The error that ends the request.
        """
        if isinstance(submitted, RequestError):
            raise submitted
        if submitted.task in ("detokenize", "describe"):
            return _Work(entry, submitted, None)
        num_kept = tokens_kept(submitted, self.context)
        prompt = self._render(submitted)
        if submitted.task == "generate" and num_kept is None:
            self._encoder.refuse_too_long(prompt, self.context)
        else:
            self._encoder.refuse_too_large(prompt, self.context)
        return _Work(entry, submitted, prompt, num_kept, prompt.grammar)

    def _render(self, submitted: Submitted) -> Rendered:
        """Return a prompt as text. Choices of one prompt follow each other, and get the same object."""
        if submitted.siblings == 1:
            return self._encoder.render(submitted)
        unlike = {"seed": 0, "prompt_logprobs": None}  # the first choice of a prompt has its scores
        alike = submitted.model_copy(update={"sampling": submitted.sampling.model_copy(update=unlike)})
        if self._rendered is None or self._rendered[0] != alike:
            self._rendered = alike, self._encoder.render(submitted)
        return self._rendered[1]

    def _encode_all(self, work: Sequence[_Work]) -> None:
        """Encode the prompts as one batch, and commit the result of each."""
        prompts = [each.prompt for each in work if each.prompt is not None]
        entries = [each.entry for each in work]
        for each, prompt, token_ids in zip(work, prompts, self._encode(entries, prompts), strict=True):
            if not isinstance(token_ids, RequestError) and each.num_kept is not None:
                first = each.submitted.truncation_side == "right"
                num_kept = each.num_kept if is_cut(each.submitted, len(token_ids), self.context) else len(token_ids)
                token_ids = self._encoder.keep(num_kept, prompt, token_ids, first=first)
            if isinstance(token_ids, RequestError):
                self._fail(each.entry, token_ids)
            elif each.submitted.task != "generate":
                self._answer(each, token_ids)
            elif not token_ids:
                self._fail(each.entry, RequestError("The prompt has no tokens; send some text.", param=prompt.param))
            elif len(token_ids) + 1 > self.context:
                self._fail(each.entry, too_long(str(len(token_ids)), self.context, prompt.param))
            elif high := limit_too_high(len(token_ids), each.submitted, self.context):
                self._fail(each.entry, high)
            elif scores := self._too_many_scores(each, len(token_ids)):
                self._fail(each.entry, scores)
            else:
                event = Tokenized(
                    token_ids=tuple(token_ids),
                    fingerprint=self._encoder.fingerprint,
                    by=self.slot_lease.status.slot,
                    bad_words=prompt.bad_words,
                    grammar=each.grammar,
                    markup=prompt.markup,
                    prediction=prompt.prediction,
                    grammar_param=prompt.asked.param if each.grammar and prompt.asked is not None else "",
                )
                failpoint("tokenize.before_commit")
                self._commit(each, event)
                failpoint("tokenize.after_commit")

    def _too_many_scores(self, work: _Work, num_tokens: int) -> RequestError | None:
        """Return the error if a prompt has too many scores, counted together with those of the siblings before it."""
        pairs = pairs_told(work.submitted, num_tokens)
        if not pairs:
            return None
        uid = work.entry.fields["uid"]
        told = self._told.pop(base_uid(uid), {})
        told[uid] = pairs
        self._told[base_uid(uid)] = told
        if len(self._told) > BODIES_COUNTED:
            del self._told[next(iter(self._told))]
        return too_many(sum(told.values()), work.submitted)

    def _encode(self, entries: Sequence[Entry], prompts: Sequence[Rendered]) -> list[Sequence[int] | RequestError]:
        """Return the tokens of each prompt. A prompt that several siblings share is encoded once."""
        new = {id(prompt): (entry, prompt) for entry, prompt in zip(entries, prompts, strict=True)}
        new = {key: each for key, each in new.items() if key not in self._encoded}
        if new:
            encoded = self._encode_new([entry for entry, _ in new.values()], [prompt for _, prompt in new.values()])
            for (key, (_, prompt)), token_ids in zip(new.items(), encoded, strict=True):
                self._encoded[key] = prompt, token_ids
        return [self._encoded[id(prompt)][1] for prompt in prompts]

    def _encode_new(self, entries: Sequence[Entry], prompts: Sequence[Rendered]) -> list[Sequence[int] | RequestError]:
        batch = self._attempt("batch_not_encoded", entries, partial(self._encoder.encode, prompts))
        if not isinstance(batch, RequestError):
            return list(batch)
        # Find out which of them is at fault.
        each = [
            self._attempt("prompt_not_encoded", [entry], partial(self._encoder.encode, [prompt]))
            for entry, prompt in zip(entries, prompts, strict=True)
        ]
        return [one if isinstance(one, RequestError) else one[0] for one in each]

    def _commit(self, work: _Work, event: Tokenized) -> None:
        began_s = time.perf_counter()
        submitted, prompt = work.submitted, len(event.token_ids)
        most, room = submitted.sampling.max_tokens, max(self.context - prompt, 0)
        answer = room if most is None else min(most, room or most)
        prefer = self._placement.prefer(event.token_ids) if self._placement is not None else ""
        turn = Turn(submitted.turn, submitted.weight, prompt + answer, submitted.priority, submitted.overtakes, prefer)
        done = self._log.tokenized(work.entry, event, stored=submitted.stored, turn=turn)
        self._measures.observe(COMMIT_SECONDS, time.perf_counter() - began_s, "tokenized")
        if done:
            self._measures.add(PROMPTS)
            self._measures.add(PROMPTS_TOKENS, amount=len(event.token_ids))

    def _answer(self, work: _Work, token_ids: Sequence[int] = ()) -> None:
        """End a request that only the tokenizer answers, with its answer or with an error."""
        event = self._attempt("not_answered", [work.entry], partial(self._answer_to, work, token_ids))
        if isinstance(event, RequestError):
            self._fail(work.entry, event)
            return
        failpoint("tokenize.before_commit")
        self._end(work.entry, event)
        failpoint("tokenize.after_commit")

    def _answer_to(self, work: _Work, token_ids: Sequence[int]) -> Answered:
        submitted, by = work.submitted, self.slot_lease.status.slot
        if work.prompt is not None:
            if len(token_ids) > MOST_ANSWERED:
                param = work.prompt.param
                message = f"{param}: has {len(token_ids)} tokens, but an answer has at most {MOST_ANSWERED}"
                raise RequestError(f"{message}; send it in parts.", code="request_too_large", param=param, status=413)
            pieces = self._encoder.pieces(token_ids) if submitted.return_pieces else ()
            return Answered(token_ids=tuple(token_ids), pieces=pieces, by=by)
        text = self._encoder.describe() if submitted.task == "describe" else self._encoder.decode(submitted)
        return Answered(text=text, by=by)

    def _fail(self, entry: Entry, error: RequestError) -> None:
        code, param = error.code or "invalid_value", error.param or ""
        self._end(entry, Failed(status=error.status, code=code, message=error.message, param=param))

    def _end(self, entry: Entry, event: Answered | Failed) -> None:
        ended = self._log.end(entry.fields["uid"], event, frontend=entry.fields["frontend"], consume=entry)
        if ended and isinstance(event, Failed):
            self._measures.add(REFUSALS, event.code)

    def _attempt(self, name: str, entries: Sequence[Entry], work: Callable[[], T]) -> T | RequestError:
        """Return the result of *work*, or an error for its request alone, whatever *work* raises; *name* is logged.

        The work on *entries* may take as much CPU time as `--tokenize-timeout` says.
        """
        self.slot_lease.report_progress(
            patience_s=LONGEST_BATCH_S, cpu_s=self._limit_cpu_s, give_up=partial(self._give_up, entries)
        )
        try:
            return work()
        except RequestError as error:
            return error
        except OF_THE_PROCESS:
            raise
        except BaseException as error:
            logger.exception(name, uids=_uids(entries))
            return RequestError(f"The prompt could not be tokenized: {error}", code="tokenizer_error")
        finally:
            self.slot_lease.report_progress(patience_s=LONGEST_BATCH_S)

    def _give_up(self, entries: Sequence[Entry], log: RedisLog) -> None:
        """End the request that takes too long. Of several it is not known which: the next tokenizer tries each alone.

        The watchdog calls this with its own *log*, and then ends the process.
        """
        logger.error("tokenizing_too_slow", uids=_uids(entries), limit_cpu_s=self._limit_cpu_s)
        if len(entries) == 1:
            entry = entries[0]
            message = (
                f"The tokenizer needs more than {self._limit_cpu_s:g} s for this request, which is the limit; shorten "
                "its messages or its prompt, or send it in parts."
            )
            event = Failed(status=400, code="tokenizer_timeout", message=message)
            log.end(entry.fields["uid"], event, frontend=entry.fields["frontend"], consume=entry)


def _uids(entries: Sequence[Entry]) -> list[str]:
    return [entry.fields["uid"] for entry in entries]


def _submitted_of(history: Sequence[Entry]) -> Submitted | RequestError:
    """Return the request of a history, or the error that ends it.

    Raises:
        UndecodableEvent: An event of the history does not decode.
    """
    if history and history[-1].id == SEAL:
        # The log refuses a second end, but consumes the entry.
        return RequestError("The request has ended before.", code="ended")
    events = [moment.event for moment in walk(history)]
    if not events or not isinstance(events[0], Submitted):  # the history expired or was deleted
        return RequestError("The history of the request is gone.", code="log_lost", status=500)
    return events[0]


def run(config: TokenizeConfig, open_log: Callable[[], RedisLog], folder: Path) -> int:
    """Run one tokenizer until SIGTERM; return the exit code."""
    give_way(GIVES_WAY)
    process = WorkerProcess(TOKENIZE, open_log, lease_ms=int(config.log.lease_s * 1000), preferred=config.worker.slot)
    log, stop = process.log, process.stop
    with process.loading("tokenizer", LOAD_TIMEOUT_S) as announcement:
        encoder = PromptEncoder(folder, config.markup.tool_parser)
        serving = Serving(str(folder), tokenizer=encoder.fingerprint)
        wait_until_it_fits(log, serving, stop)
        limit_cpu_s = config.prompts.tokenize_cpu_s
        checker = GrammarChecker(encoder.dialect.written())
        placement = Placement(log.names.namespace, lambda: log.in_hand(Inbox.tokenized(log.names)))
        worker = TokenizeWorker(
            log,
            announcement,
            encoder,
            process.measures,
            limit_cpu_s=limit_cpu_s,
            checker=checker,
            placement=placement,
        )
        _wait_for_context(log, worker, encoder.fingerprint, announcement, stop)
    inbox = Inbox.submitted(log.names)
    for slot_lease in process.slot_leases(serving):
        worker.slot_lease = slot_lease
        worker.forget()
        slot_lease.say(
            phase="ready", fingerprint=encoder.fingerprint, bos=encoder.bos, has_chat_template=encoder.has_chat_template
        )
        checker.start()
        follow(
            log,
            inbox,
            slot_lease,
            worker.handle,
            worker.bury,
            stop,
            max_entries=MOST_READ,
            forget=worker.forget,
            look=worker.look,
            in_order=False,
            held=worker.held,
        )
    checker.close()
    return 0


def _wait_for_context(
    log: RedisLog, worker: TokenizeWorker, fingerprint: str, slot_lease: Heartbeat, stop: Stop
) -> None:
    """Wait for an engine: only engines know how long a prompt may be. On demand, the last one that was there counts."""
    said, last = False, Offer()
    with contextlib.suppress(LogError):  # none is kept, or an older list of users has no right to read it
        last = Offer.parse(log.last_engine())
    while not stop and not worker.context:
        slot_lease.report_progress()
        try:
            worker.learn_context()
            if not worker.context and last.tokenizer == fingerprint:
                worker.context = last.context
        except LogUnavailable as error:
            logger.warning("log_unavailable", error=str(error))
        if not worker.context:
            if not said:
                logger.debug("waiting_for", stages=[GENERATE], reason="it says how long a prompt may be")
                slot_lease.say(phase="waiting", detail=GENERATE, fingerprint=fingerprint)
                said = True
            stop.wait(BACKOFF_S / 4)
