"""smolagents: an agent that calls tools and one that writes code, whole and streamed.

The demo model cannot write code, nor does it know the long instructions of these agents: what is looked at is that each
step is answered, and the call of the first one.
"""

from __future__ import annotations

import sys
from typing import Any

from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool
from smolagents.agents import EMPTY_PROMPT_TEMPLATES
from smolagents.memory import ActionStep

URL, MODEL = sys.argv[1:]
QUIET: dict[str, Any] = {"max_steps": 2, "verbosity_level": 0}


@tool  # type: ignore[untyped-decorator]
def get_weather(city: str) -> str:
    """Get the weather in a city.

    Args:
        city: The city.
    """
    return "sunny, 21 degrees"


def steps_of(agent: ToolCallingAgent | CodeAgent, question: str) -> list[ActionStep]:
    """Ask *agent*; return its steps, all of which the server answered: an agent raises the errors of its model."""
    agent.run(question)
    steps = [step for step in agent.memory.steps if isinstance(step, ActionStep)]
    assert steps and all(step.token_usage and step.token_usage.output_tokens for step in steps), steps
    return steps


model = OpenAIServerModel(
    MODEL, api_base=URL, api_key="none", temperature=0, max_tokens=64, client_kwargs={"max_retries": 0}
)
for streams in (False, True):
    caller = ToolCallingAgent([get_weather], model, EMPTY_PROMPT_TEMPLATES, stream_outputs=streams, **QUIET)
    first = steps_of(caller, "What is the weather in Paris?")[0]
    assert first.tool_calls and first.tool_calls[0].arguments == {"city": "Paris"}, first
    assert first.observations == "sunny, 21 degrees", first
    coder = CodeAgent([get_weather], model, EMPTY_PROMPT_TEMPLATES, stream_outputs=streams, **QUIET)
    steps_of(coder, "What is the weather in Paris?")
