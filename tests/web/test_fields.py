"""The table of fields is complete, in the README, and what a row refuses is refused. Its effects: end_to_end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fields import FIELDS, Field, table

from pipeline.errors import RequestError
from pipeline.events import SamplingParams
from web.openai.schemas import ChatRequest, parse_chat

ROOT = Path(__file__).parents[2]
NAMES = [one.name for one in FIELDS]


def test_every_field_that_changes_the_tokens_has_a_row() -> None:
    assert set(NAMES) == set(SamplingParams.model_fields) | {"max_completion_tokens"}
    assert set(NAMES) <= set(ChatRequest.model_fields)


def test_the_table_is_the_one_in_the_readme() -> None:
    assert table() in (ROOT / "README.md").read_text(), "print it with: python tests/fields.py"


@pytest.mark.parametrize("row", FIELDS, ids=NAMES)
def test_what_a_field_does_not_take_is_refused_by_its_name(row: Field) -> None:
    body = {"messages": [{"role": "user", "content": "Hello!"}], row.name: row.refused}
    with pytest.raises(RequestError) as raised:
        parse_chat(json.dumps(body).encode())
    assert raised.value.status == 400 and (raised.value.param or "").split(".")[0] == row.name
