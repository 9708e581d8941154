"""instructor in its modes TOOLS, JSON_SCHEMA and PARALLEL_TOOLS."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Annotated

import instructor
from instructor import Mode
from openai import OpenAI
from pydantic import BaseModel, Field, create_model

URL, MODEL = sys.argv[1:]


class Person(BaseModel):
    """A person."""

    name: Annotated[str, Field(max_length=12)]
    age: int


# A tool has the name of its class. The demo model copies names in small letters.
Weather = create_model("get_weather", __doc__="Get the weather in a city.", city=(str, ...))
Sum = create_model("add", __doc__="Add two numbers.", a=(int, ...), b=(int, ...))


for mode, question, answer in (
    (Mode.TOOLS, "What is the weather in Paris?", Weather(city="Paris")),
    (Mode.JSON_SCHEMA, "Write JSON for Ada, 42 years old.", Person(name="Ada", age=42)),
):
    client = instructor.from_openai(OpenAI(base_url=URL, api_key="none", max_retries=0), mode=mode)
    told = client.chat.completions.create(
        model=MODEL,
        response_model=type(answer),
        messages=[{"role": "user", "content": question}],
        max_retries=0,
        max_tokens=64,
        temperature=0,
    )
    assert told.model_dump() == answer.model_dump(), (mode, told)

client = instructor.from_openai(OpenAI(base_url=URL, api_key="none", max_retries=0), mode=Mode.PARALLEL_TOOLS)
for question, call in (("What is the weather in Paris?", Weather(city="Paris")), ("Add 17 and 25.", Sum(a=17, b=25))):
    calls = client.chat.completions.create(
        model=MODEL,
        response_model=Iterable[Weather | Sum],  # type: ignore[valid-type]  # made at run time
        messages=[{"role": "user", "content": question}],
        max_retries=0,
        max_tokens=64,
        temperature=0,
    )
    made = list(calls)  # of classes that instructor made of ours
    assert [each.model_dump() for each in made] == [call.model_dump()], (question, made)
