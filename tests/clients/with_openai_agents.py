"""OpenAI's Agents SDK on chat completions: tools that are `strict`, a forced one, streams, an answer of a type. Then on
responses, where each goes on from the one before."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

from agents import (
    Agent,
    FunctionToolResult,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunContextWrapper,
    Runner,
    ToolsToFinalOutputResult,
    function_tool,
    set_tracing_disabled,
)
from agents.items import ModelResponse, ToolCallItem
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


CLIENT = AsyncOpenAI(base_url=URL, api_key="none", max_retries=0)
SETTINGS = ModelSettings(temperature=0, max_tokens=64)
TOOLS = [function_tool(city_weather), function_tool(sum_of, strict_mode=False)]


async def chats() -> None:
    model = OpenAIChatCompletionsModel(MODEL, CLIENT)
    agent = Agent(name="helper", model=model, model_settings=SETTINGS, tools=[*TOOLS])
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
    typed = Agent(name="typist", model=model, model_settings=SETTINGS, output_type=Person)
    assert (await Runner.run(typed, "Write JSON for Ada, 42 years old.")).final_output == Person(name="Ada", age=42)


async def responses() -> None:
    model = OpenAIResponsesModel(MODEL, CLIENT)
    agent = Agent(name="helper", model=model, model_settings=SETTINGS, instructions="Be short.", tools=[*TOOLS])
    first = await Runner.run(agent, "What is the weather in Paris?", auto_previous_response_id=True)
    assert "sunny" in first.final_output, first.to_input_list()
    streamed = Runner.run_streamed(agent, "What is 17 plus 25?", previous_response_id=first.last_response_id)
    async for _ in streamed.stream_events():
        pass
    assert "42" in streamed.final_output, streamed.to_input_list()
    await chained([*first.raw_responses, *streamed.raw_responses])

    rounds = 0

    def after_three(_: RunContextWrapper[None], results: list[FunctionToolResult]) -> ToolsToFinalOutputResult:
        nonlocal rounds
        rounds += 1
        return ToolsToFinalOutputResult(is_final_output=rounds == 3, final_output=results[-1].output)

    forced = agent.clone(
        model_settings=ModelSettings(temperature=0, max_tokens=64, tool_choice="city_weather"),
        reset_tool_choice=False,
        tool_use_behavior=after_three,
    )
    run = await Runner.run(forced, "What is the weather in Paris?", auto_previous_response_id=True)
    assert rounds == 3 and run.final_output.endswith("sunny, 21 degrees"), run.to_input_list()
    await chained(run.raw_responses)


async def chained(told: list[ModelResponse]) -> None:
    """Check at the server that each response goes on from the one before, and has its calls."""
    before, calls = None, 0
    for each in told:
        assert each.response_id
        response = await CLIENT.responses.retrieve(each.response_id)
        assert response.previous_response_id == before, response
        inputs = await CLIENT.responses.input_items.list(each.response_id, limit=100)
        assert sum(item.type == "function_call" for item in inputs.data) == calls, inputs
        calls += sum(item.type == "function_call" for item in response.output)
        before = each.response_id
    assert len(told) >= 3 and calls >= 2


async def main() -> None:
    await chats()
    await responses()


set_tracing_disabled(True)
asyncio.run(main())
