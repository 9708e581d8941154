"""What servers say when they do not answer, as one sentence."""

from __future__ import annotations

import json

import pytest

from ops.shell.refusals import Refusal, refusal_of


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "No.", "type": "t", "code": None}}, "No."),
        ({"error": {"error": {"message": "No."}}}, "No."),
        ({"error": "No."}, "No."),
        ({"detail": "No."}, "No."),
        ({"detail": [{"loc": ["x"]}]}, '[{"loc": ["x"]}]'),
        ({"object": "error", "message": "No."}, "No."),
        ({"error": {"code": 5}}, '{"code": 5}'),
    ],
)
def test_the_message_is_found_however_it_is_nested(body: object, message: str) -> None:
    assert refusal_of(400, json.dumps(body).encode()) == Refusal(f"HTTP 400: {message}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "HTTP 502"),
        (b"Bad\ngateway\x1b[31m", "HTTP 502: Bad gateway\\x1b[31m"),
        (b"<html><h1>Bad gateway</h1>\n</html>", "HTTP 502: Bad gateway"),
        (b"\xff", "HTTP 502: \N{REPLACEMENT CHARACTER}"),
        (b'{"ok": true}', 'HTTP 502: {"ok": true}'),
    ],
)
def test_any_other_body_is_shown_as_a_line(content: bytes, message: str) -> None:
    assert refusal_of(502, content).message == message


def test_a_page_is_cut() -> None:
    assert len(refusal_of(500, 10_000 * b"word ").message) < 500


@pytest.mark.parametrize(
    ("error", "is_too_long"),
    [
        ({"message": "No.", "code": "context_length_exceeded"}, True),
        ({"message": "This model's maximum context length is 128 tokens.", "code": 400}, True),
        ({"message": "The prompt is too long: 5 tokens."}, True),
        ({"message": "max_tokens: should be at least 1", "code": "invalid_value"}, False),
    ],
)
def test_a_context_that_is_too_long_is_known_by_its_code_or_its_words(
    error: dict[str, object], is_too_long: bool
) -> None:
    assert refusal_of(400, json.dumps({"error": error}).encode()).is_too_long == is_too_long
