"""Answers that are bound to schemas, patterns and grammars: with all stages in this process, and on servers."""

from __future__ import annotations

import datetime
import decimal
import enum
import json
import random
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import httpx
import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from openai import BadRequestError, LengthFinishReasonError, OpenAI
from pydantic import BaseModel, ConfigDict, Field, create_model
from support.bodies_within_limits import EVILS, REFUSED_AS
from support.checkpoints import make_checkpoint
from support.chunks import documents, put_together
from support.kernel_variants import VARIANTS
from support.selection import by_night
from support.servers import Server, eventually, serve
from support.streams import Stream, events_of, num_of
from support.tool import Tool
from transformers import PreTrainedTokenizerFast

from ops.offline.stages import Stages
from ops.replay.compute import Computer
from pipeline.events import Admitted, Failed, Finished, Preempted, SamplingParams, Submitted, TakenOver
from pipeline.flags import parse_config
from pipeline.log.protocol import Inbox
from pipeline.names import GENERATE, slot_name
from pipeline.replaying import again
from pipeline.sampling import Constraint
from pipeline.stage.slots import read_statuses
from pipeline.views.recorded import History
from stages.generate.setup.config import GenerateConfig

pytestmark = pytest.mark.slow

NUM_SCHEMAS: Final = by_night(30, 1000)
NUM_EVILS: Final = by_night(5, 20)
NUM_REPLAYED: Final = by_night(10, 50)
MOST_TOKENS: Final = 300
DEPTH: Final = 2
SIZES: Final = ("--page-size", "4", "--max-seq-len", "352")
PROMPT: Final = "She sells sea shells by the sea shore; the shells she sells are sea shells. "
NEEDS_KERNELS: Final = pytest.mark.skipif(not VARIANTS, reason="torch alone promises no equal tokens")


def schema(draw: random.Random, depth: int = DEPTH) -> dict[str, Any]:
    """Return a schema whose answers are short, so that a model that says anything comes to their end."""
    kinds = ["integer", "string", "pattern", "enum", "const", "boolean", "format"]
    if depth:
        kinds += ["object", "object", "array", "anyOf"]
    match draw.choice(kinds):
        case "integer":
            least = draw.randrange(-1000, 1000)
            return {"type": "integer", "minimum": least, "maximum": least + draw.randrange(2000)}
        case "string":
            return {"type": "string", "minLength": draw.randrange(3), "maxLength": draw.randrange(3, 12)}
        case "pattern":
            return {
                "type": "string",
                "pattern": draw.choice(["^[a-f]{2,5}$", "^(yes|no)$", r"^\d{3}-\d{4}$", "^é?x+y$"]),
            }
        case "enum":
            return {"enum": draw.sample(["red", "grün", 3, None, False, "a b", [1], {"k": 1}], draw.randrange(1, 5))}
        case "const":
            return {"const": draw.choice(["fixed", 42, None, True, "“quoted”"])}
        case "format":
            return {"type": "string", "format": draw.choice(["date", "uuid", "ipv4", "time"])}
        case "object":
            names = draw.sample(["id", "name", "größe", "tags", "x y", "a/b"], draw.randrange(1, 4))
            required = [name for name in names if draw.random() < 0.6]
            properties = {name: schema(draw, depth - 1) for name in names}
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case "array":
            return {"type": "array", "items": schema(draw, depth - 1), "minItems": draw.randrange(2), "maxItems": 3}
        case "anyOf":
            return {"anyOf": [schema(draw, depth - 1) for _ in range(2)]}
        case _:
            return {"type": "boolean"}


SCHEMAS: Final = [schema(random.Random(number)) for number in range(NUM_SCHEMAS)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("bound") / "llama3", "llama3", max_positions=1024)


def started(model: Path, *flags: str) -> Stages:
    arguments = ["--model", str(model), "--dtype", "float32", *SIZES, *flags]
    return Stages(parse_config("stage generate", GenerateConfig, arguments, {}), model, lambda engine: engine)


@pytest.fixture(scope="module")
def stages(model: Path) -> Iterator[Stages]:
    stages = started(model, "--num-pages", "2048")
    yield stages
    stages.close()


def bound(kind: Literal["json", "regex", "grammar"], what: Any, seed: int, **sampling: Any) -> Submitted:
    constraint = Constraint(kind=kind, text=json.dumps(what) if kind == "json" else what, param="field")
    params = SamplingParams(**{"temperature": 1, "seed": seed, "max_tokens": MOST_TOKENS} | sampling)
    return Submitted(endpoint="e", frontend="", prompt=f"{seed} {PROMPT}", sampling=params, constraint=constraint)


def format_of(schema: Any) -> dict[str, Any]:
    """Return the field of a body that asks for JSON of a schema."""
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "any", "schema": schema}}}


def assert_replayed(server: Server, uids: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    """`minisgl replay run` finds the tokens of each request identical, which the server computes again."""
    told = Tool("replay run", server.redis_url, capsys).json(*uids)
    assert [(each["uid"], each["identical"]) for each in told] == [(uid, 1) for uid in uids]


REQUESTS: Final = [bound("json", schema, seed) for seed, schema in enumerate(SCHEMAS)]


@pytest.fixture(scope="module")
def undisturbed(stages: Stages) -> list[History]:
    """How each request was answered when nothing happened."""
    return Computer(stages.log, at_once=64).compute(REQUESTS)


def test_what_ends_by_itself_validates_and_what_is_cut_off_is_the_beginning_of_it(
    model: Path, undisturbed: list[History]
) -> None:
    eos_ids = json.loads((model / "generation_config.json").read_text())["eos_token_id"]
    tokenizer = LLTokenizer(str(model / "tokenizer.json"), None, eos_ids)
    num_stopped = 0
    for schema, history in zip(SCHEMAS, undisturbed, strict=True):
        assert isinstance(history.end, Finished), (schema, history.end)
        if history.end.reason == "stop":
            num_stopped += 1
            jsonschema.validate(json.loads(history.text), schema, cls=jsonschema.Draft202012Validator)
        else:
            assert history.tokenized is not None
            matcher = LLMatcher(tokenizer, history.tokenized.grammar)
            assert matcher.consume_tokens(list(history.token_ids)), (schema, history.text)
    assert num_stopped >= 0.9 * NUM_SCHEMAS
    assert len({history.text for history in undisturbed}) > 0.5 * NUM_SCHEMAS


@NEEDS_KERNELS
def test_preemptions_overlap_and_a_replay_give_the_same_tokens(
    model: Path, stages: Stages, undisturbed: list[History]
) -> None:
    expected = [history.token_ids for history in undisturbed]
    crowded = started(model, "--num-pages", "88", "--overlap", "on")
    try:
        for _ in range(5):  # requests that came too slowly found room
            found = Computer(crowded.log, at_once=64).compute(REQUESTS)
            assert [history.token_ids for history in found] == expected
            if any(entry.fields["kind"] == "preempted" for history in found for entry in history.recording.entries):
                break
        else:
            pytest.fail("no request was preempted")
    finally:
        crowded.close()
    replayed = Computer(stages.log, at_once=64).compute([again(history) for history in undisturbed])
    assert [history.token_ids for history in replayed] == expected


def test_evil_grammars_end_soon_and_disturb_no_other_request(stages: Stages) -> None:
    others = [
        Submitted(endpoint="e", frontend="", prompt=f"Tell {n}", sampling=SamplingParams(seed=n, max_tokens=200))
        for n in range(8)
    ]
    computer = Computer(stages.log, at_once=64)
    quiet = [history.token_ids for history in computer.compute(others)]
    began_s = time.monotonic()
    evils = [bound(kind, what, 0, max_tokens=50) for kind, what in EVILS[:NUM_EVILS]]
    histories = computer.compute([*others, *evils])
    assert time.monotonic() - began_s < 10 * by_night(1, 4)
    assert [history.token_ids for history in histories[:8]] == quiet
    for (kind, what), history in zip(EVILS, histories[8:], strict=False):
        if isinstance(history.end, Failed):
            assert (history.end.status, history.end.param) == (400, "field"), (kind, what, history.end)
            assert history.end.code in REFUSED_AS, history.end
        else:
            assert isinstance(history.end, Finished), (kind, what, history.end)
    assert any(isinstance(history.end, Failed) for history in histories[8:])


def test_no_other_wish_breaks_a_constraint(stages: Stages) -> None:
    wishes: list[dict[str, Any]] = [
        {"ignore_eos": True},
        {"min_tokens": 100},
        {"logit_bias": ((300, 100.0),)},
        {"allowed_token_ids": (300, 301)},
        {"bad_words": ("yes", "no", "y", "n")},
        {"temperature": 0, "repetition_penalty": 2.0},
        {"temperature": 2, "typical_p": 0.1, "logprobs": 2},
    ]
    asked = [bound("regex", "yes|no", 1, **wish) for wish in wishes]
    for wish, history in zip(wishes, Computer(stages.log, at_once=64).compute(asked), strict=True):
        assert isinstance(history.end, Finished) and history.end.reason == "stop", (wish, history.end)
        assert history.text in ("yes", "no"), wish


@NEEDS_KERNELS
@pytest.mark.night
@pytest.mark.parametrize("num_engines", [1, 2])
def test_after_each_death_of_an_engine_bound_answers_are_those_of_the_quiet_run(
    model: Path, undisturbed: list[History], tmp_path: Path, num_engines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """With two engines, the other one goes on with some of the requests. Few pages are there, so some are preempted."""

    def ask(request: Submitted) -> tuple[str, str]:
        assert request.constraint is not None
        sampling = {"temperature": 1, "seed": request.sampling.seed, "max_tokens": MOST_TOKENS}
        body = {"prompt": request.prompt, **format_of(json.loads(request.constraint.text)), **sampling}
        response = http.post("/v1/completions", json=body)
        return response.json()["choices"][0]["text"], response.headers["x-minisgl-uid"]

    expected = {request.prompt: history.text for request, history in zip(REQUESTS, undisturbed, strict=True)}
    engines = ("--lease", "1", "--dp", str(num_engines), "--num-pages", "88")
    with (
        serve(tmp_path, "--model", str(model), "--dtype", "float32", *SIZES, *engines) as server,
        server.log() as log,
        httpx.Client(base_url=server.url, timeout=120) as http,
        ThreadPoolExecutor(50) as pool,
    ):
        taken_over = moved = preempted = 0
        uids, inbox = list[str](), Inbox.tokenized(log.names)
        for number in range(1, 4):
            asked = [(request.prompt, pool.submit(ask, request)) for request in REQUESTS[:50]]
            victim = server.command.workers(GENERATE)[0]
            slot = slot_name(GENERATE, int(victim.cmdline()[victim.cmdline().index("--slot") + 1]))
            eventually(lambda slot=slot: len(log.pending(inbox, slot)) > 3, "the engine has requests in hand")  # type: ignore[misc]
            victim.kill()
            for prompt, answer in asked:
                text, uid = answer.result()
                assert text == expected[prompt], (number, prompt)
                uids.append(uid)
                events = events_of(log, uid)
                taken_over += num_of(events, TakenOver)
                preempted += num_of(events, Preempted)
                moved += len({event.engine for event in events if isinstance(event, (Admitted, TakenOver))}) > 1
            eventually(lambda: len(read_statuses(log, GENERATE)) == num_engines, "an engine has come in its place")
        assert taken_over + moved and preempted
        assert num_engines == 1 or moved, "another engine has gone on with some"
        assert_replayed(server, uids, capsys)


@pytest.mark.xdist_group("llama3_server")
@pytest.mark.night  # by day a client parses one
def test_over_http_a_bound_answer_is_the_same_whole_and_streamed_and_in_a_replay(
    llama3_server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(seed: int) -> tuple[str, str]:
        """Return why the answer ended, and its uid."""
        prompt = [{"role": "user", "content": f"{seed} {PROMPT}"}]
        body = {"messages": prompt, "seed": seed, "max_tokens": MOST_TOKENS, **format_of(SCHEMAS[seed])}
        whole = http.post("/v1/chat/completions", json=body)
        (choice,) = whole.json()["choices"]
        content, reason = choice["message"]["content"], choice["finish_reason"]
        stream = http.post("/v1/chat/completions", json=body | {"stream": True})
        said = put_together(documents(stream.content))
        assert (said["content"], said["reason"]) == (content, reason), SCHEMAS[seed]
        if reason == "stop":
            jsonschema.validate(json.loads(content), SCHEMAS[seed], cls=jsonschema.Draft202012Validator)
        return reason, whole.headers["x-minisgl-uid"]

    with httpx.Client(base_url=llama3_server.url, timeout=120) as http, ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(NUM_SCHEMAS)))
    assert [reason for reason, _ in answers].count("stop") >= 0.9 * NUM_SCHEMAS
    if VARIANTS:
        assert_replayed(llama3_server, [uid for _, uid in answers[:NUM_REPLAYED]], capsys)


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Step(BaseModel):
    explanation: str
    output: str


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str


class Tree(BaseModel):
    value: int
    children: list[Tree] = Field(max_length=1)


def of_fields(name: str, /, **fields: Any) -> type[BaseModel]:
    return create_model(name, **fields)


MODELS: Final = (
    of_fields("Answer", steps=(list[Step], ...), final=(str, ...)),
    of_fields("Person", name=(str, ...), age=(Annotated[int, Field(ge=0, le=120)], ...)),
    of_fields("Optional", a=(int | None, ...), b=(str | None, None)),
    of_fields("Union", value=(int | str, ...)),
    of_fields("Colors", color=(Color, ...), both=(list[Color], ...)),
    of_fields("Choice", answer=(Literal["yes", "no"], ...)),
    of_fields("Number", value=(Annotated[float, Field(gt=0, lt=1)], ...)),
    of_fields("Flags", on=(bool, ...), off=(None, ...)),
    of_fields("Dates", day=(datetime.date, ...), time=(datetime.time, ...)),
    of_fields("Moment", at=(datetime.datetime, ...)),
    of_fields("Identity", id=(uuid.UUID, ...)),
    of_fields("Code", code=(Annotated[str, Field(pattern=r"^[A-Z]{2}-\d{3}$")], ...)),
    of_fields("Short", text=(Annotated[str, Field(min_length=2, max_length=5)], ...)),
    of_fields("Few", items=(Annotated[list[int], Field(min_length=1, max_length=3)], ...)),
    of_fields("Pair", pair=(tuple[int, str], ...)),
    of_fields("Nested", rows=(list[list[int]], ...)),
    of_fields("Pet", pet=(Annotated[Cat | Dog, Field(discriminator="kind")], ...)),
    of_fields("Pets", pets=(list[Cat | Dog], ...)),
    of_fields("Money", amount=(decimal.Decimal, ...)),
    of_fields("Named", value=(Annotated[int, Field(alias="class", description="a class")], ...)),
    of_fields("Multiple", value=(Annotated[int, Field(multiple_of=5)], ...)),
    Tree,
    of_fields("Unique", values=(set[int], ...)),  # `uniqueItems`
)


@pytest.mark.xdist_group("llama3_server")
def test_typical_pydantic_models_are_parsed(llama3_server: Server, llama3: Path) -> None:
    """The model may use few letters, so that it comes to the end of its texts."""
    client = OpenAI(base_url=f"{llama3_server.url}/v1", api_key="none", max_retries=0)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(llama3)
    ids = tokenizer('{}[]":,.-0123456789abTZ', add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    parsed, refused = [], []
    for model in MODELS[:: by_night(-4, -1)]:
        try:
            answer = client.chat.completions.parse(
                model="default",
                messages=[{"role": "user", "content": "Say it."}],
                response_format=model,
                max_tokens=400,
                seed=1,
                extra_body={"allowed_token_ids": sorted(set(ids))},
            )
            assert isinstance(answer.choices[0].message.parsed, model)
            parsed.append(model.__name__)
        except BadRequestError as error:
            refused.append((model.__name__, error.code))
        except LengthFinishReasonError:
            pass
    assert refused == [("Unique", "unsupported_schema")] and len(parsed) >= by_night(4, 20), parsed


class Place(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Literal["here", "there"]
    number: int | None


@pytest.mark.xdist_group("llama3_server")
def test_a_client_parses_what_it_asked_for_streamed_or_whole_and_it_is_replayed(
    llama3_server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    client = OpenAI(base_url=f"{llama3_server.url}/v1", api_key="none")
    answer = client.chat.completions.parse(
        model="default", messages=[{"role": "user", "content": "Where?"}], response_format=Place, seed=2, max_tokens=80
    )
    assert isinstance(answer.choices[0].message.parsed, Place)
    schema = {"type": "json_schema", "json_schema": {"name": "place", "schema": Place.model_json_schema()}}
    body = {"messages": [{"role": "user", "content": "Where?"}], "response_format": schema, "seed": 2, "max_tokens": 80}
    whole = llama3_server.post(body)
    text = whole.json()["choices"][0]["message"]["content"]
    streamed = Stream(llama3_server, "Where?", response_format=schema, seed=2, max_tokens=80, temperature=1)
    assert streamed.answer == (text, "stop")
    asked = {"text": "Where?", "sampling_params": {"regex": "here|there", "n": 2}}
    assert {one["text"] for one in llama3_server.ask("/generate", asked)} <= {"here", "there"}
    bad = llama3_server.post(body | {"response_format": {"type": "json_object", "schema": {"not": {}}}})
    error = bad.json()["error"]
    assert (bad.status_code, error["code"], error["param"]) == (400, "unsupported_schema", "response_format.schema")
    uid = whole.headers["x-minisgl-uid"]
    run = Tool("replay run", llama3_server.redis_url, capsys).run
    for where in ((), ("--url", llama3_server.url)):
        code, out, _ = run(uid, "--json", *where)
        assert (code, json.loads(out)[0]["identical"]) == (0, 1) or not VARIANTS
    traced = Tool("trace", llama3_server.redis_url, capsys)(uid)
    assert any("constraint=json" in line for line in traced)
