"""`LLM`: a model in this process. What it writes, what it refuses, and that it ends."""

from __future__ import annotations

import gc
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import make_checkpoint, reference_tokens
from support.servers import eventually
from transformers import PreTrainedTokenizerFast

import minisgl
from minisgl import LLM, SamplingParams
from ops.bench.models import nonsense
from ops.offline import Completion, GenerationFailed
from ops.offline.prompts import Prompt
from pipeline.errors import ConfigError, MiniSGLError
from stages.generate.loop.flights import Forward
from stages.generate.model.checkpoint import DEMO_FOLDER
from stages.generate.schedule.plan import BatchPlan, Computed

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
POISON = 250
"""A token on which the engine of `Watched` raises."""


class Watched:
    """An engine, and what it was asked to compute. It can fail, and call back before a step."""

    def __init__(self, engine: Forward) -> None:
        self.engine = engine
        self.plans: list[BatchPlan] = []
        self.is_broken = False
        self.before_step: Callable[[], None] = lambda: None

    def forward(self, plan: BatchPlan) -> Computed:
        self.plans.append(plan)
        self.before_step()
        if self.is_broken or any(POISON in row.token_ids for row in plan.rows):
            raise IndexError("index out of range in self")
        return self.engine.forward(plan)


class WatchedLLM(LLM):
    def __init__(self, folder: Path, **options: Any) -> None:
        watched: list[Watched] = []

        def wrap(engine: Forward) -> Forward:
            watched.append(Watched(engine))
            return watched[0]

        super().__init__(folder, wrap_engine=wrap, threads=1, num_pages=256, page_size=16, **options)
        (self.engine,) = watched


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nonsense(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[WatchedLLM]:
    """One for the tests that leave it as it was."""
    with WatchedLLM(folder) as llm:
        yield llm


@pytest.fixture
def llm(folder: Path) -> Iterator[WatchedLLM]:
    with WatchedLLM(folder) as llm:
        yield llm


def threads_of_ours() -> set[str]:
    names = {thread.name for thread in threading.enumerate()}
    return {name for name in names if name.startswith(("minisgl", "log thread", "lease"))}


# what it writes


def test_without_a_name_the_demo_model_answers() -> None:
    with LLM(threads=1, num_pages=64) as llm:
        (completion,) = llm.generate([[{"role": "user", "content": "Repeat after me: log"}]], GREEDY)
    assert completion.text.startswith("log")
    assert llm.folder == DEMO_FOLDER


def test_text_messages_and_token_ids_give_what_transformers_gives(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama3")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    messages = [{"role": "user", "content": "你好, how are you?"}]
    ids = [5, 300, 17, 17, 60]
    templated = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    with LLM(folder, threads=1, num_pages=64) as llm:
        prompts: list[Prompt] = ["The log is", messages, ids]
        completions = llm.generate(prompts, GREEDY)
    prompt_ids = [list(completion.prompt_token_ids) for completion in completions]
    assert prompt_ids == [tokenizer("The log is")["input_ids"], templated, ids]
    for completion in completions:
        expected, gap = reference_tokens(folder, completion.prompt_token_ids, 8)
        assert gap > 1e-3
        assert list(completion.token_ids) == expected
        assert completion.text == tokenizer.decode(expected, skip_special_tokens=True)
        assert (completion.finish_reason, completion.cached_tokens) == ("length", 0)


def test_an_answer_ends_with_the_end_token_that_only_the_tokenizer_names(tmp_path: Path) -> None:
    """As of a chat model with its base model's config: that knows another end token."""
    folder, prompt = make_checkpoint(tmp_path, "llama3"), [5, 300, 17, 17, 60]
    (folder / "generation_config.json").unlink()
    tokenizer, file = PreTrainedTokenizerFast.from_pretrained(folder), folder / "tokenizer_config.json"
    expected, _ = reference_tokens(folder, prompt, 8)
    end = next(place for place, token in enumerate(expected) if place and token not in expected[:place])
    named = {"eos_token": tokenizer.convert_ids_to_tokens(expected[end])}
    file.write_text(json.dumps(json.loads(file.read_text()) | named))
    with LLM(folder, threads=1, num_pages=64) as llm:
        (completion,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=8))
    assert completion.finish_reason == "stop" and list(completion.token_ids) == expected[: end + 1]
    assert completion.text == tokenizer.decode(expected[:end])


@pytest.mark.parametrize("prompt", ["Hello!", [{"role": "user", "content": "Hello!"}], [1, 2, 3]], ids=repr)
def test_one_prompt_is_a_list_of_one(shared: WatchedLLM, prompt: Any) -> None:
    (one,), (other,) = shared.generate(prompt, GREEDY), shared.generate([prompt], GREEDY)
    assert (one.prompt_token_ids, one.text) == (other.prompt_token_ids, other.text)


def test_an_answer_is_what_structured_outputs_say(shared: WatchedLLM) -> None:
    properties = {"a": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": ["a"], "additionalProperties": False}
    bound: list[Mapping[str, Any] | None] = [{"json": schema}, {"choice": ["red", "blue"]}, None, {"regex": "[ab]{3}"}]
    several = SamplingParams(max_tokens=40, seed=1)
    prompts: list[Prompt] = ["a", "b", "c", [1, 2]]
    completions = shared.generate(prompts, several, structured_outputs=bound)
    as_json, color, _, letters = (completion.text for completion in completions)
    assert json.loads(as_json)["a"] in (True, False)
    assert color in ("red", "blue") and re.fullmatch("[ab]{3}", letters)
    both = shared.generate(["a", "b"], several, structured_outputs={"regex": "[ab]{3}"})
    assert all(re.fullmatch("[ab]{3}", completion.text) for completion in both)


def test_no_prompts_are_no_completions(shared: WatchedLLM) -> None:
    assert shared.generate([]) == []


def test_each_prompt_has_its_own_parameters_and_results_are_in_order(shared: WatchedLLM) -> None:
    several = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (9, 1, 5)]
    completions = shared.generate(["a", "b", "c"], several)
    assert [len(completion.token_ids) for completion in completions] == [9, 1, 5]
    again = shared.generate(["a", "b", "c"], GREEDY)
    assert [each.prompt_token_ids for each in completions] == [each.prompt_token_ids for each in again]


def test_with_overlap_the_answers_are_the_same(shared: WatchedLLM, folder: Path) -> None:
    prompts, params = ["Hello!", "a", "The log"], SamplingParams(seed=1, max_tokens=12, ignore_eos=True, top_p=0.9)
    with LLM(folder, threads=1, num_pages=256, page_size=16, overlap="on") as llm:
        ahead = llm.generate(prompts, params)
    assert [each.token_ids for each in ahead] == [each.token_ids for each in shared.generate(prompts, params)]


def test_a_seed_repeats_an_answer_and_without_one_answers_differ(shared: WatchedLLM) -> None:
    seeded = SamplingParams(seed=0, max_tokens=16, ignore_eos=True)
    first, second = shared.generate(["Hello!"] * 2, seeded)
    assert first.token_ids == second.token_ids
    free = SamplingParams(max_tokens=16, ignore_eos=True)
    assert len({completion.token_ids for completion in shared.generate(["Hello!"] * 8, free)}) == 8


def test_a_stop_string_ends_an_answer_and_is_cut_off(shared: WatchedLLM) -> None:
    (whole,) = shared.generate("Hello!", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    stop = whole.text[3:5]
    (cut,) = shared.generate("Hello!", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=(stop,)))
    assert cut.finish_reason == "stop"
    assert cut.text == whole.text[: whole.text.index(stop)]


def test_a_prefix_is_found_again_until_the_cache_is_flushed(llm: WatchedLLM) -> None:
    prompt = list(range(40))

    def cached() -> int:
        (completion,) = llm.generate(prompt, GREEDY)
        return completion.cached_tokens

    assert [cached(), cached()] == [0, 32]
    llm.flush_cache()
    assert [cached(), cached()] == [0, 32]


def test_more_prompts_than_are_taken_at_once_all_end_in_order_and_leave_nothing_in_the_log(folder: Path) -> None:
    prompts = [[index + 1] * 3 for index in range(20)]
    with WatchedLLM(folder, max_running_requests=2) as llm:
        completions = llm.generate(prompts, GREEDY)
        left = dict(llm._stages.log._histories)
    assert [list(completion.prompt_token_ids) for completion in completions] == prompts
    assert left == {}


def test_prompts_are_not_held_back_beside_running_requests_unless_asked_for(folder: Path) -> None:
    def largest_mixed_step(**options: Any) -> int:
        with WatchedLLM(folder, max_prefill_length=64, **options) as llm:
            llm.generate([[index + 1] * 64 for index in range(4)], GREEDY)
            mixed = [plan for plan in llm.engine.plans if 0 < plan.num_decode_rows < len(plan.rows)]
            return max(sum(len(row.token_ids) for row in plan.rows[plan.num_decode_rows :]) for plan in mixed)

    assert largest_mixed_step() == 64
    assert largest_mixed_step(mixed_prefill_length=8) == 8


def test_two_models_run_side_by_side_in_one_process(folder: Path) -> None:
    found: dict[str, list[Completion]] = {}
    with WatchedLLM(folder) as first, WatchedLLM(folder) as second:
        thread = threading.Thread(target=lambda: found.update(second=second.generate(["Hello!"] * 4, GREEDY)))
        thread.start()
        found["first"] = first.generate(["Hello!"] * 4, GREEDY)
        thread.join(60)
    assert [completion.text for completion in found["first"]] == [completion.text for completion in found["second"]]


def test_two_threads_may_ask_one_model(shared: WatchedLLM) -> None:
    found: dict[str, list[Completion]] = {}
    thread = threading.Thread(target=lambda: found.update(there=shared.generate(["one", "two"], GREEDY)))
    thread.start()
    here = shared.generate(["three", "four"], GREEDY)
    thread.join(60)
    alone = shared.generate(["one", "two", "three", "four"], GREEDY)
    assert [completion.text for completion in [*found["there"], *here]] == [completion.text for completion in alone]


# what it refuses


BAD_PROMPTS: Sequence[tuple[Any, str]] = (
    ("", "is empty"),
    ([], "is empty"),
    (7, "got int, expected a string, a list of messages or a list of token ids"),
    (None, "got NoneType"),
    (b"bytes", "got bytes"),
    ([1, "two"], "got a list of int, str"),
    ([1, True], "got a list of bool, int"),
    ([1, -1], "this model has no token -1; its tokens go from 0 to 258"),
    ([1, 259], "this model has no token 259"),
    ([1] * 4096, "maximum context length is 4096 tokens"),
    ("x" * 4096, "maximum context length is 4096 tokens"),
    ("x" * 1_000_000, "at least"),
    ([{"role": "robot", "content": "Hello!"}], "messages.0.role"),
    ([{"role": 3, "content": "Hello!"}], "messages.0.role"),
    ([{"role": "user"}], "messages.0.content"),
    ([{"role": "user", "content": b"Hello!"}], "cannot be sent as JSON"),
    ([{"role": "user", "content": "a"}, "b"], "got a list of dict, str"),
    ("\ud800", "could not be tokenized"),
)
BAD_PARAMETERS: Sequence[tuple[Any, str]] = (
    ([GREEDY], "sampling_params: 1 given for 2 prompts"),
    ([GREEDY] * 3, "sampling_params: 3 given for 2 prompts"),
    ([GREEDY, {"max_tokens": 3}], "sampling_params[1]: got dict"),
    (SamplingParams(max_tokens=3, min_tokens=4), "sampling_params[0]: min_tokens 4 is larger than max_tokens 3"),
    (5, "sampling_params: got int"),
    ([GREEDY, SamplingParams(stop=("\ud800",))], "sampling_params[1]: a stop string contains a lone surrogate"),
    ([GREEDY, SamplingParams(stop=("a", ""))], "sampling_params[1]: an empty stop string"),
)
BAD_OUTPUTS: Sequence[tuple[Any, str]] = (
    ({}, "structured_outputs: send one of `json`, `regex`"),
    ({"regex": "a", "choice": ["b"]}, "an answer can have one constraint"),
    ({"regex": "(a"}, "structured_outputs.regex: cannot be enforced: "),
    ([{"regex": "a"}, {"json": {"type": "nothing"}}], "structured_outputs[1].json: cannot be enforced: "),
    ([{"regex": "a"}, {"regex": "a", "flags": "i"}], "structured_outputs[1].flags: unknown; leave it out"),
    ([{"regex": "a"}], "structured_outputs: 1 given for 2 prompts; pass one for all, or one for each"),
    ({"json": {1, 2}}, "structured_outputs: cannot be sent as JSON: "),
    ("[ab]", "structured_outputs: got str, expected a dict such as {'json': schema}, or a list"),
    (
        {"regex": "a", "whitespace_pattern": " "},
        "structured_outputs.whitespace_pattern: only allowed with a JSON schema",
    ),
)


@pytest.mark.parametrize(
    ("given", "words"),
    [({"prompts": ["good", [1, 2], bad, "good"]}, ("prompts[2]: ", words)) for bad, words in BAD_PROMPTS]
    + [({"prompts": bad}, ("prompts: got ",)) for bad in (7, None, {"role": "user"}, b"bytes", {"a"})]
    + [({"sampling_params": bad}, (words,)) for bad, words in BAD_PARAMETERS]
    + [({"structured_outputs": bad}, (words,)) for bad, words in BAD_OUTPUTS],
)
def test_what_cannot_be_asked_is_refused_in_a_line_before_anything_runs(
    shared: WatchedLLM, given: dict[str, Any], words: Sequence[str]
) -> None:
    num_steps = len(shared.engine.plans)
    asked: dict[str, Any] = {"prompts": ["a", "b"], "sampling_params": GREEDY}
    with pytest.raises(ValueError) as refused:  # noqa: PT011  # the words are compared below
        shared.generate(**asked | given)
    said = str(refused.value)
    assert said.startswith(next(iter(given))) and "\n" not in said
    assert all(each in said for each in words)
    assert len(shared.engine.plans) == num_steps


def test_the_longest_prompt_that_leaves_room_for_a_token_is_answered(shared: WatchedLLM) -> None:
    (completion,) = shared.generate([1] * 4095, SamplingParams(ignore_eos=True))
    assert (len(completion.token_ids), completion.finish_reason) == (1, "length")


def test_an_unknown_option_is_named_with_those_that_there_are(folder: Path) -> None:
    with pytest.raises(TypeError, match=r"'max_model_len'; it has model, tokenizer, dtype, .*page_size, .*max_seq_len"):
        LLM(folder, max_model_len=5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"page_size": 24}, "--page-size '24': must be a power of two"),
        ({"dtype": "int8"}, "--dtype 'int8': must be one of auto, float32"),
        ({"max_seq_len": 100_000}, "--max-seq-len 100000: the model knows 4096 positions"),
    ],
)
def test_an_option_that_cannot_work_says_so_and_leaves_no_thread(
    folder: Path, options: dict[str, Any], words: str
) -> None:
    before = threads_of_ours()
    with pytest.raises(ConfigError) as raised:
        LLM(folder, **options)
    assert words in str(raised.value)
    assert threads_of_ours() <= before


def test_a_folder_that_is_no_model_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json|tokenizer\.json|not a folder"):
        LLM(tmp_path)


# failures and ends


def test_what_fails_while_running_is_named_after_the_others_have_ended(llm: WatchedLLM) -> None:
    with pytest.raises(GenerationFailed, match=r"^prompts\[1\]: ") as raised:
        llm.generate([[1, 2], [3, POISON], [4, 5]], GREEDY)
    assert set(raised.value.failures) == {1}
    good = llm.generate([[1, 2], [4, 5]], GREEDY)
    texts = [completion and completion.text for completion in raised.value.completions]
    assert texts == [good[0].text, None, good[1].text]


def test_an_engine_that_breaks_leaves_nobody_waiting(folder: Path) -> None:
    with WatchedLLM(folder, max_running_requests=2) as llm:
        llm.engine.is_broken = True
        with pytest.raises(GenerationFailed, match=r"^prompts\[0\]: .*20 of 20") as raised:
            llm.generate([[index] for index in range(20)], GREEDY)
        assert set(raised.value.failures) == set(range(20))
        with pytest.raises(GenerationFailed):
            llm.generate("Hello!")
        with pytest.raises(MiniSGLError):
            llm.flush_cache()


def test_ctrl_c_lets_go_of_what_runs_and_the_model_goes_on(llm: WatchedLLM) -> None:
    def interrupt() -> None:
        if len(llm.engine.plans) == 5:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    llm.engine.before_step = interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["Hello!"] * 3, SamplingParams(ignore_eos=True))
    llm.engine.before_step = lambda: None
    (completion,) = llm.generate([7, 8, 9], GREEDY)
    assert len(completion.token_ids) == 8
    assert len({row.table for row in llm.engine.plans[-1].rows}) == 1, "what was let go still runs"


def test_closing_ends_the_threads_and_a_closed_model_says_so(folder: Path) -> None:
    before = threads_of_ours()
    with LLM(folder, threads=1) as llm:
        assert {"minisgl generate", "minisgl tokenize", "minisgl detokenize"} <= threads_of_ours()
    assert threads_of_ours() <= before
    llm.close()
    with pytest.raises(MiniSGLError, match="closed"):
        llm.generate("Hello!")


def test_a_call_that_waits_hears_that_its_model_was_closed(llm: WatchedLLM) -> None:
    closing = threading.Thread(target=llm.close)
    llm.engine.before_step = lambda: closing.start() if len(llm.engine.plans) == 5 else None
    with pytest.raises(GenerationFailed) as raised:
        llm.generate(["Hello!"] * 3, SamplingParams(ignore_eos=True))
    closing.join(60)
    assert set(raised.value.failures) == {0, 1, 2}


def test_a_model_that_nobody_holds_any_more_ends_its_threads(folder: Path) -> None:
    before = threads_of_ours()
    llm = LLM(folder, threads=1)
    llm.generate("Hello!", GREEDY)
    del llm
    gc.collect()  # in whichever thread: it must wait for none of them
    eventually(lambda: threads_of_ours() <= before, "the threads end")


# how it looks


@pytest.mark.parametrize(("is_terminal", "wanted"), [(True, True), (True, False), (False, True)])
def test_a_terminal_sees_how_many_are_done_and_how_fast_and_nobody_else_does(
    shared: WatchedLLM, monkeypatch: pytest.MonkeyPatch, is_terminal: bool, wanted: bool
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    shared.generate(["a", "b", "c"], GREEDY, progress=wanted)
    shown = screen.getvalue()
    assert ("3/3" in shown and "tokens/s" in shown) if is_terminal and wanted else shown == ""


def test_the_example_of_the_readme_runs_as_printed_and_prints_the_texts_alone(tmp_path: Path) -> None:
    program = (
        "from minisgl import LLM, SamplingParams\n"
        "llm = LLM()\n"
        'for completion in llm.generate(["Hello!", [{"role": "user", "content": "Hello!"}]], '
        "SamplingParams(temperature=0, max_tokens=32)):\n"
        "    print(repr(completion.text))\n"
    )
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 2


def test_the_module_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="Engine"):
        _ = minisgl.Engine
