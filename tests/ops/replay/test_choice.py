"""Which requests `--since`, `--until` and `--where` mean."""

from __future__ import annotations

import argparse
import time

import pytest

from ops.replay.source import ChoiceConfig, conditions, matches, since, until
from ops.shell.config import ShellConfig
from pipeline.errors import ConfigError
from pipeline.events import Cancelled, SamplingParams, Submitted, encode, new_uid
from pipeline.flags import parse_flags, split_names
from pipeline.log.protocol import Entry
from pipeline.names import SEAL, SUBMITTED_ID
from web.wire.uids import drawn_ms

NINE_MS = 1795424400_000  # 2026-11-23 09:00 UTC


@pytest.mark.parametrize(
    "text", ["2026-11-23T09:00", "2026-11-23 09:00:00.000", "2026-11-23T09:00Z", "2026-11-23T10:30+01:30"]
)
def test_a_moment_without_an_offset_is_utc(text: str) -> None:
    assert since(text) == NINE_MS
    assert until(text) == NINE_MS


@pytest.mark.parametrize(("text", "ago_s"), [("-10m", 600), ("10m", 600), ("-2h", 7200), ("-1.5d", 129600), ("-3s", 3)])
def test_a_moment_may_be_some_time_ago(text: str, ago_s: float) -> None:
    assert since(text) / 1000 == pytest.approx(time.time() - ago_s, abs=2)


def test_a_uid_means_its_moment_and_until_it_includes_it() -> None:
    uid = new_uid()
    assert since(uid) == since(f"chatcmpl-{uid.upper()}") == drawn_ms(uid)
    assert until(uid) == drawn_ms(uid) + 1


@pytest.mark.parametrize("text", ["yesterday", "", "10", "-5y", "2026-13-01T00:00", "0" * 32])
def test_what_is_no_moment_is_refused_with_what_one_looks_like(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="2026-11-23T09:00"):
        since(text)


@pytest.mark.parametrize("text", ["1970-01-01", "0001-01-01T00:00+14:00", "-999999d", "9" * 400 + "d"])
def test_the_earliest_moment_is_the_beginning_of_1970_and_counts_as_one(text: str) -> None:
    (choice,) = parse_flags("tool", (ChoiceConfig,), [f"--since={text}"], {})
    assert choice.since_ms == 0 and choice.names_moments
    (choice,) = parse_flags("tool", (ChoiceConfig,), [], {})
    assert not choice.names_moments


def test_what_is_in_the_future_can_only_be_the_end() -> None:
    ahead, far = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(time.time() + 30)), "f" * 12 + new_uid()[12:]
    assert since(ahead) / 1000 == pytest.approx(time.time() + 30, abs=2)
    for text in ("2999-01-01", far):
        with pytest.raises(argparse.ArgumentTypeError, match="future"):
            since(text)
        assert until(text) / 1000 > time.time() + 60


@pytest.mark.parametrize(
    "moments",
    [("-1h", "-2h"), ("2026-11-23T09:00", "2026-11-23T09:00"), ("2026-11-23T09:00", "2026-11-23T09:30+01:00")],
)
def test_an_end_that_is_not_later_than_the_beginning_is_refused(moments: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"--until: .*--since"):
        parse_flags("tool", (ChoiceConfig,), [f"--since={moments[0]}", f"--until={moments[1]}"], {})


def history(**fields: object) -> list[Entry]:
    event = Submitted.model_validate(
        {"endpoint": "/v1/completions", "frontend": "web-0", "sampling": SamplingParams()} | fields
    )
    return [Entry(SUBMITTED_ID, encode(event)), Entry(SEAL, encode(Cancelled(by="client")))]


def test_all_conditions_must_hold() -> None:
    asked = history(model="demo", owner="team", labels={"user": "ann", "store": True, "state": "odd"})
    for text in ("model=demo", "state=cancelled", "owner=team,user=ann", "endpoint=/v1/completions", "store=true"):
        assert matches(asked, conditions(text)), text
    for text in ("model=other", "state=finished", "owner=team,user=bob", "safety_identifier=x", "safety_identifier="):
        assert not matches(asked, conditions(text)), text
    assert matches(asked, ())


def test_what_cannot_be_read_fulfils_no_condition() -> None:
    assert not matches([Entry(SUBMITTED_ID, {"kind": "odd"})], conditions("model="))
    assert not matches(history()[1:], conditions("state=cancelled"))
    assert matches([Entry(SUBMITTED_ID, {"kind": "odd"})], ())
    assert matches([], ()) and not matches([], conditions("model=demo"))


@pytest.mark.parametrize("text", ["model", "user=b,c", "state=over"])
def test_a_condition_has_a_name_and_a_value(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="NAME=VALUE"):
        conditions(text)


def test_a_condition_with_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        conditions("user=ann,modle=demo")
    assert str(caught.value) == (
        "'user=ann,modle=demo': no request has 'modle'; NAME must be one of model, endpoint, owner, state, user, "
        "metadata, store, service_tier, safety_identifier, prompt_cache_key, copy_of, requeued_from, custom_id, "
        "imported_from"
    )


def test_flags_and_names_may_be_mixed_and_values_may_begin_with_a_dash() -> None:
    names, flags = split_names(["a", "--since", "-10m", "b", "--where=model=x", "--until", "-5m", "c"], (ChoiceConfig,))
    assert names == ["a", "b", "c"]
    (choice,) = parse_flags("tool", (ChoiceConfig,), flags, {})
    assert choice.where == (("model", "x"),)
    assert choice.until_ms / 1000 == pytest.approx(time.time() - 300, abs=2)
    assert choice.since_ms / 1000 == pytest.approx(time.time() - 600, abs=2)


def test_a_flag_of_several_values_takes_all_words_up_to_the_next_flag() -> None:
    arguments = ["a", "--set", "b=1", "c=2", "--since", "-10m", "d", "--set"]
    names, flags = split_names(arguments, (ChoiceConfig, ShellConfig))
    assert names == ["a", "d"]
    assert flags == ["--set", "b=1", "c=2", "--since=-10m", "--set"]


def test_an_unknown_flag_and_one_without_its_value_are_errors() -> None:
    for arguments in (["--sinse", "-10m"], ["file", "--since"]):
        with pytest.raises(ConfigError):
            parse_flags("tool", (ChoiceConfig,), split_names(arguments, (ChoiceConfig,))[1], {})
