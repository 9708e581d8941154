"""What siblings share: how it is written, and that it reads as if each had written it for itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pipeline.events import SamplingParams, Submitted, Templating, Tokenized, as_plain, as_words, encode
from pipeline.log.protocol import Entry
from pipeline.log.shared import digests_in, referring, submitted_fields, submitted_words, whole_history
from pipeline.names import SUBMITTED_ID, TOKENIZED_ID

LONG = "all work and no play " * 10


def choices(count: int, **fields: Any) -> list[Submitted]:
    """Return the choices of one prompt, which differ in their seeds alone."""
    sampling = SamplingParams(stop=(LONG,), logit_bias=((1, 2.0),))
    first = Submitted(endpoint="e", frontend="web-0", sampling=sampling, **fields)
    return [first.model_copy(update={"sampling": sampling.model_copy(update={"seed": -5 + i})}) for i in range(count)]


def stored(events: Sequence[Submitted]) -> tuple[list[Entry], dict[str, str]]:
    """Return the first entry of each history, and what they share, as they are read."""
    histories, shared = submitted_words(events)
    entries = [Entry(SUBMITTED_ID, {name: text.decode() for name, text in words.items()}) for words in histories]
    return entries, {digest: text.decode() for digest, text in shared.items()}


def bytes_of(entries: Sequence[Entry]) -> int:
    return sum(len(name) + len(text.encode()) for entry in entries for name, text in entry.fields.items())


def test_a_single_request_is_written_as_it_is() -> None:
    (event,) = choices(1, prompt=LONG, labels={"user": LONG})
    (entry,), shared = stored([event])
    assert (entry.fields, shared) == (encode(event), {})


def test_the_choices_of_a_prompt_have_their_seeds_for_themselves_and_share_the_rest() -> None:
    events = choices(100, messages=({"role": "user", "content": LONG},), labels={"user": LONG})
    entries, shared = stored(events)
    assert sum(len(text) for text in shared.values()) < 2 * bytes_of([Entry("", encode(events[0]))])
    assert bytes_of(entries) < 100 * 500
    for entry, event in zip(entries, events, strict=True):
        assert whole_history([entry], shared) == [
            Entry(SUBMITTED_ID, encode(event.model_copy(update={"siblings": 100})))
        ]


def test_prompts_share_all_but_themselves_and_a_prompt_is_kept_once_for_its_choices() -> None:
    events = [event for i in range(5) for event in choices(3, prompt=f"{i} {LONG}", labels={"user": LONG})]
    entries, shared = stored(events)
    assert sorted(text for text in shared.values() if text.endswith(f" {LONG}")) == [f"{i} {LONG}" for i in range(5)]
    assert sum(LONG in text for text in shared.values()) == 5 + 2  # labels and sampling, once
    assert not any(LONG in text for entry in entries for text in entry.fields.values())


def test_who_looks_only_at_the_short_fields_needs_nothing_shared() -> None:
    frontend = "f" * 100
    events = [event.model_copy(update={"frontend": frontend}) for event in choices(2)]
    for entry in stored(events)[0]:
        assert (entry.fields["kind"], entry.fields["endpoint"], entry.fields["frontend"]) == (
            "submitted",
            "e",
            frontend,
        )


def test_tokens_of_a_sibling_are_shared_by_their_content() -> None:
    event = Tokenized(token_ids=tuple(range(100)), fingerprint="f", by="tokenize-0")
    words, texts = referring(as_words(Tokenized, as_plain(event)))
    fields = {name: text.decode() for name, text in words.items()}
    assert len(texts) == 1 and sum(map(len, fields.values())) < 100
    history = whole_history([Entry(TOKENIZED_ID, fields)], {digest: text.decode() for digest, text in texts.items()})
    assert history == [Entry(TOKENIZED_ID, encode(event))]


def test_a_history_whose_shared_texts_are_gone_is_gone() -> None:
    entries, _ = stored(choices(2))
    assert digests_in(entries[:1])
    assert whole_history(entries[:1], {}) is None


def test_what_is_no_beginning_of_a_history_refers_to_nothing() -> None:
    entry = Entry("1-0", {"kind": "tokens", "text@": "x"})
    assert digests_in([entry]) == [] and whole_history([entry], {}) == [entry]


def test_in_memory_equal_texts_are_one_object() -> None:
    first, second = submitted_fields(choices(2, prompt=LONG, templating=Templating(variables={"a": LONG})))
    assert first["prompt"] is second["prompt"] and first["templating"] is second["templating"]
    assert first["sampling"] != second["sampling"]


TEXTS = st.text(max_size=3) | st.sampled_from(('"seed":0', LONG, LONG + '"seed":0'))
EVENTS = st.builds(
    Submitted,
    endpoint=st.just("e"),
    frontend=st.just("web-0"),
    model=TEXTS,
    messages=st.lists(st.dictionaries(TEXTS, TEXTS, max_size=2), max_size=2).map(tuple),
    prompt=TEXTS,
    prompt_ids=st.lists(st.integers(0, 9), max_size=50).map(tuple),
    sampling=st.builds(SamplingParams, seed=st.integers(-(2**63), 2**63 - 1), stop=st.tuples(TEXTS)),
    priority=st.integers(0, 1),
    labels=st.dictionaries(TEXTS, TEXTS, max_size=1),
)


@given(st.lists(EVENTS, min_size=1, max_size=5))
def test_whatever_they_hold_siblings_read_as_they_were_said(events: list[Submitted]) -> None:
    entries, shared = stored(events)
    said = [encode(event.model_copy(update={"siblings": len(events)})) for event in events]
    assert [(whole_history([entry], shared) or [entry])[0].fields for entry in entries] == said
    assert submitted_fields(events) == said
    assert len(shared) == len(set(shared.values()))
