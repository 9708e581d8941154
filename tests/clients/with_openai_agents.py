"""OpenAI's Agents SDK on chat completions: tools that are `strict`, a forced one, streams, and an answer of a type."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from agents.items import ToolCallItem
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

URL, MODEL = sys.argv[1:]


class Person(BaseModel):
    """A person."""

    name: Annotated[str, Field(max_length=12)]
    age: int


def city_weather(city: str) -> str:
    """Get the weather in a city."""
    return f"{city.upper()}: sunny, 21 degrees"


def sum_of(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def main() -> None:
    model = OpenAIChatCompletionsModel(MODEL, AsyncOpenAI(base_url=URL, api_key="none", max_retries=0))
    settings = ModelSettings(temperature=0, max_tokens=64)
    tools = [function_tool(city_weather), function_tool(sum_of, strict_mode=False)]
    agent = Agent(name="helper", model=model, model_settings=settings, tools=tools)
    for question, answer in (
        ("What is the weather in Paris?", "It is sunny and 21 degrees in Paris."),
        ("What is 17 plus 25?", "17 + 25 = 42"),
    ):
        run = await Runner.run(agent, question)
        assert run.final_output == answer, run.to_input_list()
        assert sum(isinstance(item, ToolCallItem) for item in run.new_items) == 1
        streamed = Runner.run_streamed(agent, question)
        async for _ in streamed.stream_events():
            pass
        assert streamed.final_output == answer, streamed.to_input_list()
    forced = agent.clone(
        model_settings=ModelSettings(temperature=0, max_tokens=64, tool_choice="city_weather"),
        tool_use_behavior="stop_on_first_tool",
    )
    run = await Runner.run(forced, "Is it warm in Paris?")
    assert run.final_output == "PARIS: sunny, 21 degrees", run.to_input_list()
    typed = Agent(name="typist", model=model, model_settings=settings, output_type=Person)
    assert (await Runner.run(typed, "Write JSON for Ada, 42 years old.")).final_output == Person(name="Ada", age=42)


set_tracing_disabled(True)
asyncio.run(main())
