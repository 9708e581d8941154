"""`/set NAME=VALUE`: what values are, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from ops.shell.params import NotSet, Settings, read_settings


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("temperature=0.2 max_tokens=64", {"temperature": 0.2, "max_tokens": 64}),
        ("ignore_eos=true seed=null", {"ignore_eos": True, "seed": None}),
        ('stop=["a b", "c"] user=me', {"stop": ["a b", "c"], "user": "me"}),
        ('user="two words"', {"user": "two words"}),
        ('metadata={"a": {"b=c": 1}}', {"metadata": {"a": {"b=c": 1}}}),
        ("seed=123456789012345678901234567890", {"seed": 123456789012345678901234567890}),
        ("user=1x", {"user": "1x"}),
        ("user=NaN", {"user": "NaN"}),
        ("user=a=b", {"user": "a=b"}),
        ("user=" + 50_000 * "[", {"user": 50_000 * "["}),
        ("a=1 a=2", {"a": 2}),
        ("  ", {}),
    ],
)
def test_a_value_is_json_or_else_a_text(text: str, values: dict[str, Any]) -> None:
    assert read_settings(text) == Settings(values, ())


def test_a_name_without_a_value_takes_it_back() -> None:
    assert read_settings("a= b=1 c=") == Settings({"b": 1}, ("a", "c"))
    assert read_settings("a=1 a=") == Settings({}, ("a",))
    assert read_settings("a= a=1") == Settings({"a": 1}, ())


@pytest.mark.parametrize(("text", "seen"), [("temperature", "temperature:"), ("a=b c", "c:"), ("=1", "=1:")])
def test_what_is_no_setting_is_refused_with_what_was_seen(text: str, seen: str) -> None:
    with pytest.raises(NotSet, match=f"^{seen} expected NAME=VALUE"):
        read_settings(text)


@pytest.mark.parametrize("name", ["model", "messages", "stream", "stream_options", "n"])
def test_what_is_the_shells_own_cannot_be_set(name: str) -> None:
    with pytest.raises(NotSet, match=f"^{name} cannot be set: "):
        read_settings(f"temperature=1 {name}=2")
