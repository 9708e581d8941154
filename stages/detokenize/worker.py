"""StepCompleted -> histories and replies. The detokenizer in slot i serves engine i: one read in, one commit out."""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import orjson
import structlog
from tokenizers import AddedToken, Tokenizer

from pipeline.errors import ConfigError, LogError, NewerVersion, UndecodableEvent
from pipeline.events import Failed, StepCompleted, Tokenized, decode
from pipeline.log.entries import clipped
from pipeline.log.journal import JournalWriter
from pipeline.log.protocol import DeadLetter, Entry, Inbox, Produced
from pipeline.log.redis import RedisLog
from pipeline.metrics.counters import Measures
from pipeline.metrics.families import BURIED, COMMIT_SECONDS, UNREADABLE_ENTRIES
from pipeline.names import DETOKENIZE, GENERATE, SEAL, parse_id, slot_index, slot_name
from pipeline.process.failpoints import failpoint, is_armed
from pipeline.serving import Serving, tokenizer_fingerprint
from pipeline.stage.slots import SlotLease, acquire_guest
from pipeline.stage.unreadable import DAMAGED, STREAMS, UnreadableEntries
from pipeline.stage.worker import Stop, WorkerProcess, follow
from pipeline.vocabulary import read_vocabulary
from pipeline.walk import NOT_COMPUTED, Moment, walk
from stages.detokenize.config import DetokenizeConfig
from stages.detokenize.fold import DetokenizeFold
from stages.detokenize.meter import DetokenizeMeter
from stages.detokenize.text import Decoder, fixed_text_of, token_text_of

logger = structlog.get_logger()
T = TypeVar("T")

MOST_READ = 16
MOST_ROWS_TOGETHER = 256
"""Number of rows after which no further step joins a commit: Redis does nothing else meanwhile."""
LEARNT_TOGETHER = 8
"""Number of histories that are read at once."""
TURN = 1000
"""Number of events of a history that are read, or folded, between two signs of progress."""
MOST_TOGETHER = 2
"""Number of tries after which a step is folded one request at a time. That harms no request."""
FIRST_ALONE = MOST_TOGETHER + 1
ALONE = 3
"""Number of deaths after which a request that was in work alone is at fault."""
OF_ONE = 1000
"""Number by which the tries of a step count up for each of its requests."""
LOOK_EVERY_S = 0.3
"""Pause between two looks at the slots of other detokenizers. A slot that is free at two in a row gets a guest."""
LOAD_TIMEOUT_S = 600.0
"""Patience of the watchdog while the tokenizer is loaded."""
NOT_TOLD = NOT_COMPUTED - {"prompt", "prompt_ids"}
"""Fields of Submitted that no answer contains."""


@dataclass(frozen=True, slots=True)
class _Folded:
    """A folded step."""

    entry: Entry
    step: StepCompleted
    produced: Sequence[Produced]


class DetokenizeWorker:
    """Feeds the fold with steps and with the histories that it asks for, and commits its results."""

    def __init__(
        self, log: RedisLog, slot_lease: SlotLease, fold: DetokenizeFold, engine: str, measures: Measures | None = None
    ) -> None:
        self._log = log
        self._slot_lease = slot_lease
        self._fold = fold
        self._engine = engine
        self._measures = measures or Measures()
        self._meter = DetokenizeMeter(self._measures)
        self._unreadable = UnreadableEntries(log, Inbox.steps(log.names, engine), self._measures, slot_lease.owner)
        self._last = (0, 0)
        """Epoch and number of the last step."""
        self._read_epoch = 0
        """Epoch of the last step that could be read."""
        self._journal = JournalWriter() if log.limits.journal_bytes else None

    def handle(self, entries: Sequence[Entry]) -> None:
        """Fold each step, and commit together the steps that follow each other and need no history."""
        failpoint("detokenize.after_read")
        folded: list[_Folded] = []
        for entry in entries:
            step = self._next_step(entry, folded)
            if step is None:
                self._commit(folded)
                folded = []
                self._catch_up(entry)
                step = self._learnt_step(entry)
            self._last = parse_id(entry.id)
            if step is not None:
                folded += self._fold_step(entry, step, folded)
        self._commit(folded)

    def forget(self) -> None:
        """Forget all requests. Their histories are read again for the next steps."""
        self._fold.forget_all()
        self._meter.forget_all()

    def bury(self, entry: Entry, deaths: int) -> None:
        """Handle a step that killed its detokenizer *deaths* times, one request at a time."""
        try:
            step = self._step(entry)
        except UndecodableEvent as error:
            self._refuse(entry, error)
            return
        self.forget()
        self._tell_one_by_one(entry, step, deaths + 1)

    def _tell_one_by_one(self, entry: Entry, step: StepCompleted, tries: int) -> None:
        """Fold and commit the rows of each request alone, so that only one that is at fault ends; consume the step.

        The number of tries in the log shows which request is in work, so that the next worker knows it after a death:

            tries of the step          in work
            1 to MOST_TOGETHER         all its requests
            FIRST_ALONE                its first request; one more for each death
            FIRST_ALONE + OF_ONE       its second request; one more for each death
            FIRST_ALONE + 2 * OF_ONE   its third request; ..

        Each commit sets the number for the next request, and each new worker adds one.
        """
        uids = list(dict.fromkeys(row.uid for row in step.rows))
        place, deaths = divmod(tries - FIRST_ALONE, OF_ONE)
        for index, uid in enumerate(uids[place:], start=place):
            self._slot_lease.report_progress()
            part = step.model_copy(update={"rows": tuple(row for row in step.rows if row.uid == uid), "released": ()})
            if index == place and deaths >= ALONE:
                self._end_poisonous(uid, entry)
            folded = _Folded(entry, part, self._folded_alone(entry, part, uid))
            try:
                if self._produce([folded], tries=FIRST_ALONE + OF_ONE * (index + 1)):
                    self._meter.committed(part, folded.produced)
            except LogError:
                self._forget_steps([folded])
                raise
        rest = step.model_copy(update={"rows": ()})
        self._fold.apply(rest, entry.id)
        self._produce([_Folded(entry, step, [])])
        self._meter.committed(rest, [])

    def _folded_alone(self, entry: Entry, part: StepCompleted, uid: str) -> Sequence[Produced]:
        """Fold the rows of one request in a step, on its history. If they cannot be folded, end the request."""
        self._fold.forget(part)
        self._learn_all([uid])
        try:
            return self._fold.apply(part, entry.id)
        except Exception as error:  # numbers that no engine writes, such as a token below 0
            self._end_untold(uid, entry, f"the step cannot be told: {error!r}")
            return []

    def _end_poisonous(self, uid: str, entry: Entry) -> None:
        """End the request whose rows killed their detokenizer, the last times with no other request in work."""
        deaths = MOST_TOGETHER + ALONE
        message = f"The request ended its detokenizer {deaths} times, the last {ALONE} times alone."
        event = Failed(status=500, code="poisonous", message=message)
        if self._end(uid, event, DeadLetter(DETOKENIZE, entry.fields, deaths, message)):
            self._measures.add(BURIED)

    def _end_untold(self, uid: str, entry: Entry, reason: str) -> None:
        """End a request if its rows of a step cannot be folded."""
        reason = clipped(reason)
        message = f"The log's entry {entry.id} about this request cannot be read: {reason}"
        event = Failed(status=500, code=DAMAGED, message=message)
        ended = self._end(uid, event, DeadLetter(DETOKENIZE, {"id": entry.id, **entry.fields}, 0, message))
        stream = self._log.names.steps(self._engine)
        logger.error("entry_buried", stream=stream, id=entry.id, reason=reason, ended=[uid] if ended else [])
        self._measures.add(UNREADABLE_ENTRIES, STREAMS[DETOKENIZE])

    def _end(self, uid: str, event: Failed, dead: DeadLetter | None = None) -> bool:
        """End a request, and fold nothing more of it; return whether it had not ended before."""
        ended = self._log.end(uid, event, frontend=self._log.frontends_of([uid])[uid], dead=dead)
        if ended:
            self._meter.failed()
        self._fold.learn(uid, [])
        return ended

    def _next_step(self, entry: Entry, folded: Sequence[_Folded]) -> StepCompleted | None:
        """Return the step of *entry* if it can be folded on top of the uncommitted ones; else None."""
        if not folded or parse_id(entry.id) != (self._last[0], self._last[1] + 1):
            return None
        if sum(len(one.step.rows) for one in folded) >= MOST_ROWS_TOGETHER:
            return None
        try:
            step = self._step(entry)
        except UndecodableEvent:  # the next reader reports it
            return None
        return None if self._fold.unknown(step) else step

    def _catch_up(self, entry: Entry) -> None:
        """Forget the requests of an earlier epoch, and handle the unconsumed entries before *entry*.

        A log that comes back with older data gives an epoch to another engine, too. Then the numbers begin again.
        """
        last, this = self._last, parse_id(entry.id)
        if this[0] > last[0] or this <= last:
            self.forget()
        if not _follows(this, last):
            for earlier in self._stranded(entry):
                self._handle_alone(earlier)

    def _stranded(self, entry: Entry) -> list[Entry]:
        """Return the entries before *entry* that this slot has read and not consumed.

        A worker that stood still, and does not know yet that it lost this slot, may have read them.
        """
        mine = self._log.pending(Inbox.steps(self._log.names, self._engine), self._slot_lease.owner.slot)
        return [earlier for earlier in mine if parse_id(earlier.id) < parse_id(entry.id)]

    def _handle_alone(self, entry: Entry) -> None:
        step = self._learnt_step(entry)
        if step is not None:
            self._commit(self._fold_step(entry, step, []))

    def _learnt_step(self, entry: Entry) -> StepCompleted | None:
        """Return the step of *entry* once the histories that it needs are known; None: it was refused."""
        try:
            step = self._step(entry)
        except UndecodableEvent as error:
            self._refuse(entry, error)
            return None
        self._read_epoch = parse_id(entry.id)[0]
        self._learn_all(self._fold.unknown(step))
        return step

    def _fold_step(self, entry: Entry, step: StepCompleted, before: list[_Folded]) -> list[_Folded]:
        """Fold a step. If that fails, commit and remove the steps *before* it, and fold its requests one by one."""
        try:
            return [_Folded(entry, step, self._fold.apply(step, entry.id))]
        except Exception as error:  # numbers that no engine writes, such as a token below 0
            logger.warning("step_not_folded", id=entry.id, error=repr(error))
            self._commit(before)
            before.clear()
            self._tell_one_by_one(entry, step, FIRST_ALONE)
            return []

    def _learn_all(self, uids: Sequence[str]) -> None:
        """Learn the histories of requests, some at a time: they can be long."""
        for first in range(0, len(uids), LEARNT_TOGETHER):
            some = uids[first : first + LEARNT_TOGETHER]
            self._slot_lease.report_progress()
            for uid, history in zip(some, self._log.histories(some), strict=True):
                self._learn(uid, history)

    def _commit(self, folded: Sequence[_Folded]) -> None:
        """Commit steps together. If one of them was consumed before, fold and commit each alone."""
        if not folded:
            return
        self._slot_lease.report_progress()
        try:
            failpoint("detokenize.before_commit")
            is_done = self._produce(folded)
            if not is_done and len(folded) > 1:
                self._forget_steps(folded)
                for one in folded:
                    self._handle_alone(one.entry)
                return
            for one in folded:
                if is_done:
                    self._meter.committed(one.step, one.produced)
                else:
                    self._meter.forget(one.step)
            failpoint("detokenize.after_commit")
            if is_armed("detokenize.mid_character") and self._fold.holds_text(folded[-1].step):
                failpoint("detokenize.mid_character")
        except LogError:
            self._forget_steps(folded)
            raise

    def _forget_steps(self, folded: Sequence[_Folded]) -> None:
        for one in folded:
            self._fold.forget(one.step)
            self._meter.forget(one.step)

    def _refuse(self, entry: Entry, error: UndecodableEvent) -> None:
        """Bury a step, or leave it to a newer worker.

        A burial ends the requests that the step names. The others fail later, because tokens are missing.
        """
        if isinstance(error, NewerVersion) and self._is_no_step(entry):
            error = UndecodableEvent(f"{error}, but {self._engine} did not write it")
        if self._unreadable.refuse(entry, error, self._slot_lease.owner.slot, _named_in(entry)):
            self.forget()

    def _is_no_step(self, entry: Entry) -> bool:
        """Return whether the engine did not write *entry*: its steps have its epoch, and the version of its code."""
        epoch, holder = parse_id(entry.id)[0], self._log.lease(self._engine).holder
        return epoch == self._read_epoch or (holder != "" and epoch > int(holder.partition(":")[0]))

    def _step(self, entry: Entry) -> StepCompleted:
        step = decode(entry.fields)
        if not isinstance(step, StepCompleted):
            raise UndecodableEvent(f"{self._engine} wrote a {step.kind} among its steps")
        return step

    def _learn(self, uid: str, history: Sequence[Entry]) -> None:
        """Pass a history to the fold. If it does not decode, or has other tokens, only its request ends.

        The history of a request that has ended is not read.
        """
        if history and history[-1].id == SEAL:
            history = []
        try:
            moments = list(walk(self._in_turns(history), over_holes=True, without=NOT_TOLD))
            reason = self._why_not_continued(moments)
            if not reason:
                self._fold.learn(uid, self._in_turns(moments))
                self._meter.learn(uid, moments)
                return
            logger.error("begun_elsewhere", uid=uid, reason=reason)
            event = Failed(status=500, code="other_model", message=reason)
        except Exception as error:  # UndecodableEvent, or numbers that no event has, such as a token below 0
            reason = clipped(str(error))
            logger.error("history_undecodable", uid=uid, error=reason)
            message = f"The history of the request does not decode: {reason}"
            event = Failed(status=500, code=DAMAGED, message=message)
        self._end(uid, event)

    def _in_turns(self, parts: Iterable[T]) -> Iterator[T]:
        """Yield *parts* of long work, and report progress to the watchdog."""
        for index, part in enumerate(parts, start=1):
            yield part
            if index % TURN == 0:
                self._slot_lease.report_progress()

    def _why_not_continued(self, moments: Sequence[Moment]) -> str:
        mine = self._slot_lease.serving
        prompts = [moment.event for moment in moments if isinstance(moment.event, Tokenized)]
        return mine.why_not_continued(Serving(tokenizer=prompts[0].fingerprint)) if mine and prompts else ""

    def _produce(self, folded: Sequence[_Folded], *, tries: int = 0) -> bool:
        """Consume steps; return False if one of them was consumed before. *tries*: see RedisLog.produced."""
        writer = None if tries else self._journal
        journal = [writer.fields(one.entry, one.step) for one in folded] if writer is not None else []
        produced = [item for one in folded for item in one.produced]
        began_s = time.perf_counter()
        done = self._log.produced(
            self._slot_lease.owner, [one.entry for one in folded], self._engine, produced, journal, tries=tries
        )
        self._measures.observe(COMMIT_SECONDS, time.perf_counter() - began_s, "produced")
        return done


def _named_in(entry: Entry) -> list[str]:
    """Return the requests that a step names in its rows, as far as these can be read."""
    try:
        rows = orjson.loads(entry.fields.get("rows", ""))
    except orjson.JSONDecodeError:
        return []
    uids = [row.get("uid") for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return list(dict.fromkeys(uid for uid in uids if isinstance(uid, str) and uid))


def _follows(step: tuple[int, int], last: tuple[int, int]) -> bool:
    """Return whether no step lies between *last* and *step*: an engine numbers its steps from 1 in each epoch."""
    (epoch, number), (last_epoch, last_number) = step, last
    return step <= (last_epoch, last_number + 1) or (epoch > last_epoch > 0 and number == 1)


def load_decoder(folder: Path) -> Decoder:
    """Return the decoder of a model folder. It needs only the tokenizers library.

    Raises:
        ConfigError: A file of the folder is broken.
    """
    vocabulary = read_vocabulary(folder)
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises plain Exception for a broken file
        raise ConfigError(f"{folder / 'tokenizer.json'}: not a tokenizer ({error}); copy the model's again") from error
    tokenizer.add_tokens([AddedToken(**dataclasses.asdict(token)) for token in vocabulary.beside])
    plain, special = (functools.partial(tokenizer.decode, skip_special_tokens=skip) for skip in (True, False))
    pieces = token_text_of(tokenizer)
    return Decoder(plain, special, pieces, vocabulary.added.special, fixed_text_of(tokenizer))


def serve(log: RedisLog, slot_lease: SlotLease, decoder: Decoder, stop: Stop, measures: Measures | None = None) -> None:
    """Serve the engine of the slot of *slot_lease*, until *stop* or until the slot has another owner."""
    engine = slot_name(GENERATE, slot_index(slot_lease.owner.slot))
    worker = DetokenizeWorker(log, slot_lease, DetokenizeFold(decoder), engine, measures)
    follow_steps(log, Inbox.steps(log.names, engine), slot_lease, worker, stop)


def follow_steps(log: RedisLog, inbox: Inbox, slot_lease: SlotLease, worker: DetokenizeWorker, stop: Stop) -> None:
    """Feed *worker* with the steps of its engine."""
    follow(
        log,
        inbox,
        slot_lease,
        worker.handle,
        worker.bury,
        stop,
        max_entries=MOST_READ,
        forget=worker.forget,
        most_tries=MOST_TOGETHER,
    )


def run(config: DetokenizeConfig, open_log: Callable[[], RedisLog], folder: Path) -> int:
    """Run one detokenizer until SIGTERM; return the exit code."""
    process = WorkerProcess(DETOKENIZE, open_log, lease_ms=int(config.log.lease_s * 1000), preferred=config.worker.slot)
    with process.loading("tokenizer", LOAD_TIMEOUT_S):
        decoder = load_decoder(folder)
    serving = Serving(str(folder), tokenizer=tokenizer_fingerprint(folder))
    guests = threading.Thread(
        target=look_after_others,
        args=(open_log, decoder, process.lease_ms, process.stop, process.measures, serving),
        name="guests",
        daemon=True,
    )
    guests.start()
    for slot_lease in process.slot_leases(serving):
        slot_lease.say(phase="ready")
        _say_whom_it_waits_for(process.log, slot_name(GENERATE, slot_index(slot_lease.owner.slot)))
        serve(process.log, slot_lease, decoder, process.stop, process.measures)
    guests.join()
    return 0


def _say_whom_it_waits_for(log: RedisLog, engine: str) -> None:
    try:
        if log.lease(engine).is_free:
            logger.debug("waiting_for", stages=[engine])
    except LogError as error:
        logger.warning("log_unavailable", error=str(error))


def look_after_others(
    open_log: Callable[[], RedisLog],
    decoder: Decoder,
    lease_ms: int,
    stop: Stop,
    measures: Measures | None = None,
    serving: Serving | None = None,
) -> None:
    """Serve the engines whose own detokenizer was away at two looks, each in a thread, until it is back.

    This process counts their metrics.
    """
    log = open_log()
    before: set[str] = set()
    guests: dict[str, threading.Thread] = {}

    def be_guest(slot: str) -> None:
        log, lease_log = open_log(), open_log()
        try:
            owner = acquire_guest(log, slot, lease_ms, serving)
        except LogError as error:
            logger.warning("log_unavailable", error=str(error))
            return
        if owner is None:
            return  # another one was faster
        logger.info("guest", slot=slot, epoch=owner.epoch)
        slot_lease = SlotLease(lease_log, owner, lease_ms, serving=serving)
        try:
            serve(log, slot_lease, decoder, stop, measures)
        except Exception:  # the next guest counts one more try of that step; this process also has its own engine
            logger.exception("guest_broke", slot=slot)
        finally:
            slot_lease.leave()

    while not stop.wait(LOOK_EVERY_S):
        try:
            unattended = set(log.unattended())
        except LogError as error:
            logger.warning("log_unavailable", error=str(error))
            unattended = set()
        for engine in sorted(unattended & before):
            if engine not in guests or not guests[engine].is_alive():
                slot = slot_name(DETOKENIZE, slot_index(engine))
                guests[engine] = threading.Thread(target=be_guest, args=(slot,), name=f"guest {slot}", daemon=True)
                guests[engine].start()
        before = unattended
    for thread in guests.values():
        thread.join()
