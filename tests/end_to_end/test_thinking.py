"""Answers of small random models that think, call tools and are bound to schemas: in this process, and over HTTP."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import httpx
import jsonschema
import pytest
from support.checkpoints import make_checkpoint
from support.chunks import documents, put_together
from support.dialects import make_tokenizer
from support.kernel_variants import VARIANTS
from support.selection import by_night
from support.servers import eventually, serve
from tokenizers import Tokenizer

from ops.offline.stages import Stages
from ops.replay.compute import Computer
from pipeline.events import (
    Calls,
    Failed,
    Finished,
    Markup,
    SamplingParams,
    Submitted,
    Templating,
    TokensProduced,
    decode,
    new_uid,
)
from pipeline.flags import parse_config
from pipeline.recording import Recording
from pipeline.replaying import again
from pipeline.sampling import Constraint
from pipeline.views.recorded import History
from stages.generate.setup.config import GenerateConfig

pytestmark = pytest.mark.slow

NUM_EACH: Final = by_night(2, 60)
BUDGETS: Final = (0, 1, 3, 16, None)
NUM_OVER_HTTP: Final = 30
MOST_TOKENS: Final = 400
SIZES: Final = ("--page-size", "4", "--max-seq-len", "1600")
NEEDS_KERNELS: Final = pytest.mark.skipif(not VARIANTS, reason="torch alone promises no equal tokens")
THINK: Final = ("<think>", "</think>")


def schema(draw: random.Random, depth: int = 1) -> dict[str, Any]:
    """Return a schema whose answers are short, so that a model that says anything comes to their end."""
    match draw.randrange(5 if depth else 4):
        case 0:
            return {"type": "integer", "minimum": 0, "maximum": draw.randrange(10, 1000)}
        case 1:
            return {"type": "string", "maxLength": draw.randrange(1, 6)}
        case 2:
            return {"enum": draw.sample(["red", "grün", "a b"], draw.randrange(1, 4))}
        case 3:
            return {"type": "boolean"}
        case _:
            return arguments(draw, depth - 1)


def arguments(draw: random.Random, depth: int = 1) -> dict[str, Any]:
    names = draw.sample(["id", "name", "größe", "tags"], draw.randrange(1, 4))
    properties = {name: schema(draw, depth) for name in names}
    return {"type": "object", "properties": properties, "required": names[:1], "additionalProperties": False}


def tools(draw: random.Random) -> tuple[dict[str, Any], ...]:
    return tuple(
        {"type": "function", "function": {"name": name, "parameters": arguments(draw)}} for name in ("look", "wait")
    )


def message(seed: int) -> dict[str, str]:
    return {"role": "user", "content": f"{seed} She sells sea shells by the sea shore."}


class Checkpoint:
    """A model of random weights whose template is that of a family."""

    def __init__(self, folder: Path, template: str) -> None:
        make_checkpoint(folder, "qwen3", max_positions=2048)
        make_tokenizer(folder, template, num_tokens=440)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.folder, self.opens_thinking = folder, template == "qwq"
        self.bias = {self.id_of(THINK[1]): 4.0, self.id_of(THINK[0]): 8.0}
        """A random model hardly ever ends its thinking, so it is made more likely."""

    def id_of(self, text: str) -> int:
        """Return the added token with this text."""
        token = self.tokenizer.token_to_id(text)
        assert token is not None
        return int(token)

    def thought(self, token_ids: Sequence[int]) -> list[int]:
        """Return the tokens of an answer's thinking, without its markers."""
        begin, end = (self.id_of(text) for text in THINK)
        ids = list(token_ids)
        if not self.opens_thinking and ids[:1] != [begin]:
            return []
        ids = ids if self.opens_thinking else ids[1:]
        return ids[: ids.index(end)] if end in ids else ids


class Model(Checkpoint):
    """A model that all stages in this process serve."""

    def __init__(self, folder: Path, template: str) -> None:
        super().__init__(folder, template)
        self.stages = self.started("--num-pages", "8192")

    def started(self, *flags: str) -> Stages:
        """Start all stages with this model."""
        given = ["--model", str(self.folder), "--dtype", "float32", *SIZES, *flags]
        config = parse_config("stage generate", GenerateConfig, given, {})
        return Stages(config, self.folder, lambda engine: engine)

    def request(self, seed: int, budget: int | None, **more: Any) -> Submitted:
        bias = tuple(self.bias.items())
        return Submitted(
            endpoint="e",
            frontend="",
            messages=(message(seed),),
            sampling=SamplingParams(temperature=1, seed=seed, max_tokens=MOST_TOKENS, logit_bias=bias),
            thinking_budget=budget,
            **more,
        )

    def compute(self, requests: Sequence[Submitted]) -> list[History]:
        return Computer(self.stages.log, at_once=64).compute(requests)

    def siblings(self, requests: Sequence[Submitted]) -> list[History]:
        """Return the histories of requests that are submitted together, as `n` does it."""
        uid = new_uid()
        self.stages.log.submit(uid, list(requests))
        uids = [f"{uid}.{number}" for number in range(len(requests))]
        eventually(lambda: not self.stages.log.alive(uids), "all siblings have ended")
        found = zip(uids, self.stages.log.histories(uids), strict=True)
        return [History(Recording(one, tuple(entries))) for one, entries in found]

    def divided(self, history: History) -> tuple[list[int], str]:
        """Return the tokens of an answer's thinking, without its markers, and the text after it."""
        assert history.tokenized is not None, history.end
        assert history.tokenized.markup.opens_thinking == self.opens_thinking
        thinks = self.opens_thinking or history.token_ids[:1] == (self.id_of(THINK[0]),)
        text = history.text.partition(THINK[1])[2] if thinks else history.text
        return self.thought(history.token_ids), text


@pytest.fixture(scope="module", params=["qwen3", "qwq"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    model = Model(tmp_path_factory.mktemp("thinking") / request.param, request.param)
    yield model
    model.stages.close()


def markup_told(history: History) -> list[Markup | None]:
    events = [decode(entry.fields) for entry in history.recording.entries if entry.fields["kind"] == "tokens"]
    return [event.markup for event in events if isinstance(event, TokensProduced)]


def called(text: str) -> list[tuple[str, Any]]:
    """Return the calls that a text consists of, as this family writes them."""
    found = []
    for part in text.strip("\n").split("\n</tool_call>")[:-1]:
        call = json.loads(part.strip("\n").removeprefix("<tool_call>\n"))
        assert sorted(call) == ["arguments", "name"]
        found.append((call["name"], call["arguments"]))
    return found


def ended(history: History) -> bool:
    """Return whether an answer came to its end by itself."""
    assert isinstance(history.end, Finished), history.end
    return history.end.reason == "stop"


@pytest.fixture(scope="module")
def bound(model: Model) -> list[tuple[Any, Submitted, History]]:
    """Schemas and tools, requests with them, and their answers."""
    asked: list[tuple[Any, Submitted]] = []
    for seed, budget in itertools.product(range(NUM_EACH), BUDGETS):
        draw = random.Random(seed)
        wanted, offered = schema(draw), tools(draw)
        constraint = Constraint(kind="json", text=json.dumps(wanted), param="response_format")
        asked.append((wanted, model.request(seed, budget, constraint=constraint)))
        templating, calls = Templating(tools=offered), Calls(choice="required", parallel=seed % 2 == 0)
        asked.append((offered, model.request(seed, budget, calls=calls, templating=templating)))
    histories = model.compute([request for _, request in asked])
    return [(wanted, request, history) for (wanted, request), history in zip(asked, histories, strict=True)]


def test_what_comes_after_thinking_is_as_the_schema_or_the_tools_say(
    model: Model, bound: list[tuple[Any, Submitted, History]]
) -> None:
    num_stopped = num_thinking = 0
    for wanted, request, history in bound:
        thinking, text = model.divided(history)
        num_thinking += bool(thinking)
        if not ended(history):
            continue
        num_stopped += 1
        if request.constraint is not None:
            jsonschema.validate(json.loads(text), wanted, cls=jsonschema.Draft202012Validator)
            continue
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in wanted}
        calls = called(text)
        assert calls and (len(calls) == 1 or (request.calls is not None and request.calls.parallel)), text
        for name, values in calls:
            jsonschema.validate(values, schemas[name], cls=jsonschema.Draft202012Validator)
    assert num_stopped >= 0.7 * len(bound) and num_thinking >= 0.3 * len(bound)


def test_thinking_stays_within_its_budget_and_a_budget_of_none_ends_it_at_once(
    model: Model, bound: list[tuple[Any, Submitted, History]]
) -> None:
    lengths: dict[int | None, list[int]] = {budget: [] for budget in BUDGETS}
    for _, request, history in bound:
        lengths[request.thinking_budget].append(len(model.divided(history)[0]))
    assert [budget for budget, counts in lengths.items() if budget is not None and max(counts) > budget] == []
    assert max(lengths[16]) == 16 and max(lengths[None]) > 16


def test_the_markup_of_an_answer_is_told_with_its_first_token(bound: list[tuple[Any, Submitted, History]]) -> None:
    for _, request, history in bound:
        assert history.tokenized is not None, history.end
        markup, told = history.tokenized.markup, markup_told(history)
        assert markup.think == THINK and markup.tools == ("hermes" if request.calls else "")
        assert told == [markup, *[None] * (len(told) - 1)]


@NEEDS_KERNELS
@pytest.mark.night
def test_preemptions_and_overlap_give_the_same_tokens(
    model: Model, bound: list[tuple[Any, Submitted, History]]
) -> None:
    crowded = model.started("--num-pages", "640", "--overlap", "on")
    try:
        found = Computer(crowded.log, at_once=64).compute([request for _, request, _ in bound])
    finally:
        crowded.close()
    assert [history.token_ids for history in found] == [history.token_ids for _, _, history in bound]
    assert any(entry.fields["kind"] == "preempted" for history in found for entry in history.recording.entries)


@NEEDS_KERNELS
def test_a_replay_gives_the_same_tokens_and_the_same_markup(
    model: Model, bound: list[tuple[Any, Submitted, History]]
) -> None:
    before = [history for _, _, history in bound]
    after = model.compute([again(history) for history in before])
    assert [history.token_ids for history in after] == [history.token_ids for history in before]
    assert [history.text for history in after] == [history.text for history in before]
    assert [markup_told(history) for history in after] == [markup_told(history) for history in before]


def test_siblings_are_bound_each_by_itself(model: Model) -> None:
    wanted = {
        "type": "object",
        "properties": {"n": {"type": "boolean"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    constraint = Constraint(kind="json", text=json.dumps(wanted), param="response_format")
    for budget in (0, 16, None):
        histories = model.siblings([model.request(seed, budget, constraint=constraint) for seed in (1, 2)])
        for history in histories:
            thinking, text = model.divided(history)
            assert budget is None or len(thinking) <= budget
            if ended(history):
                jsonschema.validate(json.loads(text), wanted)
            assert history.tokenized is not None and markup_told(history)[0] == history.tokenized.markup
        assert any(ended(history) for history in histories)


def test_a_budget_alone_leaves_the_answer_as_it_is(model: Model) -> None:
    histories = model.compute([model.request(seed, budget) for seed in range(2) for budget in (0, 2, 16)])
    for history, budget in zip(histories, (0, 2, 16) * 2, strict=True):
        assert not isinstance(history.end, Failed), history.end
        assert len(model.divided(history)[0]) <= budget


def test_calls_that_begin_with_special_tokens_have_them_in_their_text(tmp_path: Path) -> None:
    model = Model(tmp_path / "mistral", "mistral_names")
    try:
        offered = ({"type": "function", "function": {"name": "wait"}},)
        calls = Calls(choice="required", parallel=False)
        request = model.request(1, None, calls=calls, templating=Templating(tools=offered, variables={}))
        first, second = model.siblings([request, request.model_copy(update={"thinking_budget": 0})])
        assert re.fullmatch(r"\[TOOL_CALLS\]wait\[ARGS\]\{\s*\}", second.text) and ended(second)
        assert not ended(first) or "[TOOL_CALLS]wait[ARGS]{" in first.text
    finally:
        model.stages.close()


Answer = dict[str, Any]


class Client:
    """Asks a server that thinks."""

    def __init__(self, checkpoint: Checkpoint, http: httpx.Client) -> None:
        self.checkpoint, self._http = checkpoint, http

    def ask(self, **body: Any) -> Any:
        """Return the body of an answer; of a stream, its chunks."""
        response = self._http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        return documents(response.content) if body.get("stream") else response.json()


@pytest.fixture(scope="module", params=["qwen3", "qwq"])
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("served")
    checkpoint = Checkpoint(folder / request.param, request.param)
    with (
        serve(folder, "--model", str(checkpoint.folder), "--dtype", "float32") as server,
        httpx.Client(base_url=server.url, timeout=120) as http,
    ):
        yield Client(checkpoint, http)


def whole(choice: Mapping[str, Any]) -> Answer:
    """Return what a choice of a whole answer says."""
    said = choice["message"]
    assert said.get("reasoning") == said.get("reasoning_content")
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in said.get("tool_calls") or ()]
    found = {name: said.get(name) or "" for name in ("content", "reasoning")}
    return found | {"calls": calls, "reason": choice["finish_reason"], "ids": choice["token_ids"]}


def streamed(chunks: Sequence[Mapping[str, Any]], index: int) -> Answer:
    """Return what a choice says in the chunks of a stream."""
    said = put_together(chunks, index)
    assert said["reasoning"] == said.pop("reasoning_content")
    said["calls"] = [call[1:] for call in said["calls"]]
    ids = [choice.get("token_ids") or [] for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return said | {"ids": list(itertools.chain(*ids))}


@pytest.mark.night
@pytest.mark.parametrize("wish", ["schema", "tools"])
def test_over_http_thinking_keeps_to_its_budget_and_the_answer_to_its_schema_or_tools(
    client: Client, wish: str
) -> None:
    def ask(seed: int, budget: int | None) -> tuple[list[Answer], int]:
        """Return the choices of an answer and how many tokens of thinking it tells."""
        draw = random.Random(seed)
        wanted, offered = schema(draw), tools(draw)
        if wish == "schema":
            bound: dict[str, Any] = {"response_format": {"type": "json_object", "schema": wanted}}
        else:
            bound = {"tools": offered, "tool_choice": "required"}
        body = {"messages": [message(seed)], "seed": seed, "max_tokens": MOST_TOKENS, "n": 2, **bound}
        body |= {"logit_bias": client.checkpoint.bias, "return_token_ids": True, "thinking_token_budget": budget}
        answer = client.ask(**body)
        choices = [whole(choice) for choice in answer["choices"]]
        chunks = client.ask(**body, stream=True, stream_options={"include_usage": True})
        assert [streamed(chunks, index) for index in range(2)] == choices
        alone = client.ask(**body | {"n": 1})
        assert [whole(choice) for choice in alone["choices"]] == choices[:1]
        for each in choices:
            if each["reason"] == "stop":
                jsonschema.validate(json.loads(each["content"]), wanted, cls=jsonschema.Draft202012Validator)
            elif each["reason"] == "tool_calls":
                schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in offered}
                for name, values in each["calls"]:
                    jsonschema.validate(json.loads(values), schemas[name], cls=jsonschema.Draft202012Validator)
        details = [told["usage"]["completion_tokens_details"] for told in (answer, chunks[-1], alone)]
        assert details[0] == details[1]
        assert details[2] == {"reasoning_tokens": len(client.checkpoint.thought(choices[0]["ids"]))}
        return choices, details[0]["reasoning_tokens"]

    with ThreadPoolExecutor(8) as pool:
        for budget in (0, 16, None):
            answers = list(pool.map(lambda seed, most=budget: ask(seed, most), range(NUM_OVER_HTTP)))
            thoughts = [[client.checkpoint.thought(each["ids"]) for each in choices] for choices, _ in answers]
            assert [num for _, num in answers] == [sum(map(len, both)) for both in thoughts]
            longest = max(len(thought) for both in thoughts for thought in both)
            assert longest == 0 if budget == 0 else longest > 0
            assert budget is None or longest <= budget
            choices = [each for both, _ in answers for each in both]
            assert all(bool(each["reasoning"]) <= (budget != 0) for each in choices)
            reasons = [each["reason"] for each in choices]
            expected = "stop" if wish == "schema" else "tool_calls"
            assert set(reasons) <= {expected, "length"}
            assert reasons.count(expected) >= 0.5 * len(reasons), reasons
