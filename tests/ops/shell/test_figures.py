"""What `/stats` shows of the answers of a session."""

from __future__ import annotations

from ops.shell.chat import AnswerTimes, table


def usage(prompt: int, output: int, cached: int) -> dict[str, object]:
    details = {"cached_tokens": cached}
    return {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": details}


def test_figures_are_of_the_last_answer_and_of_all() -> None:
    first = AnswerTimes(sent_s=0, first_s=0.1, ended_s=1.1, usage=usage(10, 21, 0))
    second = AnswerTimes(sent_s=10, first_s=10.3, ended_s=11.3, usage=usage(2000, 41, 1024))
    assert table([first, second]) == [
        ("answers", "1", "2"),
        ("time to first token", "300 ms", "200 ms on average"),
        ("tokens per second", "40.0", "30.0"),
        ("prompt tokens", "2,000", "2,010"),
        ("cached tokens", "1,024", "1,024"),
        ("output tokens", "41", "62"),
    ]


def test_what_was_not_said_is_not_made_up() -> None:
    """A cut answer has no counts: its stream was left before they came."""
    whole = AnswerTimes(sent_s=0, first_s=0.1, ended_s=1.1, usage=usage(10, 21, 0))
    cut = AnswerTimes(sent_s=0, first_s=0.1, ended_s=5, usage={})
    silent = AnswerTimes(sent_s=0, first_s=None, ended_s=5, usage={"prompt_tokens_details": None})
    assert table([cut])[2:] == [
        ("tokens per second", "-", "-"),
        *((f"{name} tokens", "-", "-") for name in ("prompt", "cached", "output")),
    ]
    rows = {name: session for name, _, session in table([whole, cut, silent])}
    assert rows["answers"] == "3" and rows["tokens per second"] == "20.0"
    assert rows["output tokens"] == "21 (+ 2 unknown)"
