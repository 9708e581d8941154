"""pydantic-ai: an agent with tools, whole and streamed, and answers of a type by a schema and by a tool."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

URL, MODEL = sys.argv[1:]


class Person(BaseModel):
    """A person."""

    name: Annotated[str, Field(max_length=12)]
    age: int


class Weather(BaseModel):
    """Get the weather in a city."""

    city: str


model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key="none"))
settings = ModelSettings(temperature=0, max_tokens=64)
asked: list[str] = []


def weather_for(city: str) -> str:
    """Get the weather in a city."""
    asked.append(city)
    return "sunny, 21 degrees"


def sum_numbers(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


agent = Agent(model, model_settings=settings, tools=[weather_for, sum_numbers])


async def streamed(question: str) -> str:
    async with agent.run_stream(question) as result:
        return "".join([text async for text in result.stream_text(delta=True)])


for question, answer in (
    ("What is the weather in Paris?", "It is sunny and 21 degrees in Paris."),
    ("What is 17 plus 25?", "17 + 25 = 42"),
    ("How are you?", "I am fine, thank you."),
):
    run = agent.run_sync(question)
    assert run.output == answer, run.all_messages()
    assert asyncio.run(streamed(question)) == answer
assert asked == ["Paris", "Paris"], asked

person = Agent(model, output_type=NativeOutput(Person), model_settings=settings)
assert person.run_sync("Write JSON for Ada, 42 years old.").output == Person(name="Ada", age=42)
weather = Agent(model, output_type=ToolOutput(Weather), model_settings=settings)
assert weather.run_sync("What is the weather in Paris?").output == Weather(city="Paris")
