"""Simon Willison's `llm`, from its command line: whole, streamed, conversations, schemas, tools, and what it logs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

URL, MODEL = sys.argv[1:]
NAME = "served"
SETTINGS = f"""
- model_id: {NAME}
  model_name: {MODEL}
  api_base: {URL}
  supports_schema: true
  supports_tools: true
- model_id: {NAME}-text
  model_name: {MODEL}
  api_base: {URL}
  completion: true
"""
TOOLS = '''
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return "sunny, 21 degrees"
'''
GREEDY = ("-o", "temperature", "0", "-o", "max_tokens", "64")

with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "extra-openai-models.yaml").write_text(SETTINGS)
    environment = {**os.environ, "LLM_USER_PATH": folder}

    def llm(*arguments: str) -> str:
        """Run `llm` with *arguments*; return what it prints."""
        command = [sys.executable, "-m", "llm", *arguments]
        ended = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        assert ended.returncode == 0, (arguments, ended.stderr)
        return ended.stdout.strip()

    assert f"OpenAI Chat: {NAME}" in llm("models")
    asked = ("-m", NAME, *GREEDY, "What is 17 plus 25?")
    assert llm("--no-stream", *asked) == "17 + 25 = 42"
    assert llm(*asked) == "17 + 25 = 42"
    logged = json.loads(llm("logs", "list", "--json", "-n", "2"))
    assert [each["response"] for each in logged] == ["17 + 25 = 42"] * 2, logged
    assert all(each["input_tokens"] and each["output_tokens"] for each in logged), logged
    assert llm("-c", *GREEDY, "And what is the weather in Paris?"), "a conversation that goes on"

    text = ("-m", f"{NAME}-text", *GREEDY, "Once upon a time")
    assert llm("--no-stream", *text) == llm(*text)

    person = ("-m", NAME, *GREEDY, "--schema", "name: at most 12 letters, age int", "Write JSON for Ada, 42 years old.")
    assert json.loads(llm(*person)) == {"name": "Ada", "age": 42}
    weather = ("-m", NAME, *GREEDY, "--functions", TOOLS, "What is the weather in Paris?")
    for stream in ((), ("--no-stream",)):
        assert llm(*stream, *weather) == "It is sunny and 21 degrees in Paris."
