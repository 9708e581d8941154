"""generation_config.json, as it is published: what of it becomes a default, and what is said of the rest."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from stages.generate.model.config import GENERATION_CONFIG
from stages.generate.model.recommended import read_recommended


def write(folder: Path, text: str) -> Path:
    (folder / GENERATION_CONFIG).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"bos_token_id": 1, "eos_token_id": [2, 3], "max_new_tokens": 2048, "transformers_version": "4.51.0"}, {}),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": 7},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        ),
        ({"repetition_penalty": 1.05, "min_p": 0.01}, {"repetition_penalty": 1.05, "min_p": 0.01}),
        ({"do_sample": False, "temperature": 0.9}, {"temperature": 0.9}),
        ({"do_sample": False}, {}),
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"temperature": 0.000001}, {"temperature": 0.000001}),
        ({"temperature": None, "top_k": None, "top_p": None, "min_p": None, "repetition_penalty": None}, {}),
        ({"temperature": 1, "top_p": 1, "top_k": 50.0}, {"temperature": 1.0, "top_p": 1.0, "top_k": 50}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 0, "min_p": 0}, {"top_k": 0, "min_p": 0.0}),
        ({"top_k": 2**31 - 1}, {"top_k": 2**31 - 1}),
    ],
    ids=str,
)
def test_what_a_request_might_give_is_a_default(
    tmp_path: Path, fields: dict[str, object], expected: dict[str, float]
) -> None:
    recommended = read_recommended(write(tmp_path, json.dumps(fields)))
    assert recommended.sampling == expected and recommended.ignored == ()
    assert {name: type(value) for name, value in recommended.sampling.items()} == {
        name: int if name == "top_k" else float for name in expected
    }


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ('"temperature": 3', "temperature is 3: Input should be less than or equal to 2"),
        ('"temperature": -1', "temperature is -1: Input should be greater than or equal to 0"),
        ('"temperature": "0.7"', "temperature is '0.7': expected a number"),
        ('"temperature": true', "temperature is True: expected a number"),
        ('"temperature": NaN', "temperature is nan: expected a number"),
        ('"temperature": Infinity', "temperature is inf: expected a number"),
        ('"temperature": [0.6]', "temperature is [0.6]: expected a number"),
        ('"temperature": {"a": "' + 100 * "b" + '"}', "temperature is {'a': '" + 43 * "b" + ": expected a number"),
        ('"top_p": 0', "top_p is 0: Input should be greater than 0"),
        ('"top_p": 1.5', "top_p is 1.5: Input should be less than or equal to 1"),
        ('"top_k": -2', "top_k is -2: Input should be greater than or equal to 0"),
        ('"top_k": 2.5', "top_k is 2.5: Input should be a valid integer, got a number with a fractional part"),
        ('"top_k": 2147483648', "top_k is 2147483648: expected a number"),
        ('"min_p": 1.1', "min_p is 1.1: Input should be less than or equal to 1"),
        ('"repetition_penalty": 0', "repetition_penalty is 0: Input should be greater than 0"),
    ],
)
def test_what_no_request_may_give_is_ignored_alone_and_said(tmp_path: Path, value: str, reason: str) -> None:
    other = '"top_p": 0.5' if "top_p" not in value else '"min_p": 0.5'
    recommended = read_recommended(write(tmp_path, f"{{{value}, {other}}}"))
    assert recommended.ignored == (reason,)
    assert list(recommended.sampling.values()) == [0.5]


def test_a_model_without_the_file_recommends_nothing(tmp_path: Path) -> None:
    assert read_recommended(tmp_path).sampling == {}


@pytest.mark.parametrize(("text", "message"), [("{", "is not JSON"), ("[]", "holds a JSON list; expected an object")])
def test_a_file_that_is_no_object_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_recommended(write(tmp_path, text))


def test_reading_it_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, stages.generate.model.recommended;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
