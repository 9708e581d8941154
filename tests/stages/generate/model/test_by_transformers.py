"""Models of architectures that we do not know are computed by transformers, and what cannot work is refused."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import make_engine, reference_model, reference_tokens
from support.foreign_models import CONFIGS, make_foreign
from support.plans import Request, generate, shuffled_pages

from minisgl import LLM, SamplingParams
from pipeline.errors import ConfigError
from stages.generate.forward import engine as engine_module
from stages.generate.model import by_transformers
from stages.generate.model.checkpoint import check_folder
from stages.generate.model.spec import Loading
from stages.generate.setup.config import EngineConfig
from stages.generate.setup.resolve import resolve

THROUGH = Loading(by="transformers")
NUM_TOKENS = 20
CHANCE = random.Random(8)
PREFIX = CHANCE.choices(range(4, 300), k=33)
PROMPTS = [
    *([*PREFIX, *CHANCE.choices(range(4, 300), k=count)] for count in (1, 4, 9, 20, 26, 31)),
    *(CHANCE.choices(range(4, 300), k=count) for count in (1, 3, 17, 32, 47, 60)),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder, made = tmp_path_factory.mktemp("foreign"), set[str]()

    def model(name: str) -> Path:
        if name not in made:
            make_foreign(folder / name, name)
            made.add(name)
        return folder / name

    return model


def expected(folder: Path) -> list[list[int]]:
    """Return what transformers generates greedily after each prompt, alone."""
    model, answers = reference_model(folder), []
    model.generation_config.eos_token_id = None
    for prompt in PROMPTS:
        with torch.inference_mode():
            found = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NUM_TOKENS)
        answers.append(found[0, len(prompt) :].tolist())
    return answers


@pytest.mark.parametrize("name", CONFIGS)
def test_twelve_requests_at_once_get_the_tokens_of_transformers(models: Callable[[str], Path], name: str) -> None:
    """Their prompts come in chunks and share pages, and there are so few pages that some are preempted."""
    folder = models(name)
    answers = expected(folder)
    assert len({token for answer in answers for token in answer}) > 40, "a model that repeats itself proves nothing"
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    settings: dict[str, Any] = {"dtype": "float32", "page_size": 16, "num_pages": 14, "max_prefill_length": 24}
    with LLM(folder, **settings) as llm:
        completions = llm.generate(PROMPTS, greedy, progress=False)
        assert [list(each.token_ids) for each in completions] == answers
        assert "/transformers-" in llm.settings.numerics and not llm.settings.batch_invariant
        again = llm.generate(PROMPTS[:6], greedy, progress=False)
        assert [list(each.token_ids) for each in again] == answers[:6]
        assert max(each.cached_tokens for each in again) >= 32


@pytest.mark.parametrize("name", ["stablelm", "llama"])
def test_what_transformers_says_of_a_class_does_not_decide(models: Callable[[str], Path], name: str) -> None:
    """StableLM says that it does not support other attentions, and does; and a model that we know may go this way."""
    engine = make_engine(models(name), loading=THROUGH, kernels="torch")
    assert engine.num_pages


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("falcon", "0 of its 2 layers call transformers' AttentionInterface; all must (TypeError: "),
        ("bloom", "0 of its 2 layers call transformers' AttentionInterface; all must"),
        ("llama4", "it has layers of type chunked_attention; supported: full_attention, sliding_attention"),
        ("mamba", "cannot be computed through transformers: it"),
        ("longrope", "its rope is of type longrope, where a token depends on the length of its row"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(models: Callable[[str], Path], name: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_engine(models(name), loading=THROUGH, kernels="torch")
    assert reason in str(caught.value) and "\n" not in str(caught.value)


def test_an_attention_that_computes_something_else_is_found_by_the_trial(
    models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = by_transformers._attention

    def wrong(module: Any, query: Any, *arguments: Any, **named: Any) -> Any:
        return right(module, query * 1.1, *arguments, **named)

    monkeypatch.setattr(by_transformers, "_attention", wrong)
    with pytest.raises(ConfigError, match=r"a trial of 64 tokens gave other logits than transformers alone"):
        make_engine(models("olmo2"), loading=THROUGH, kernels="torch")


def test_an_argument_that_is_not_known_here_is_named(
    models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = by_transformers._attention

    def more(*arguments: Any, **named: Any) -> Any:
        return right(*arguments, position_bias=torch.ones(1), **named)

    monkeypatch.setattr(by_transformers, "_attention", more)
    with pytest.raises(ConfigError, match="arguments that are not known here: position_bias"):
        make_engine(models("olmo2"), loading=THROUGH, kernels="torch")


def test_a_window_that_is_in_a_mask_alone_is_refused(
    models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = by_transformers._attention

    def without(*arguments: Any, sliding_window: Any = None, **named: Any) -> Any:
        return right(*arguments, **named)

    monkeypatch.setattr(by_transformers, "_attention", without)
    with pytest.raises(ConfigError, match="layer 0 is of type sliding_attention, and its window is in a mask alone"):
        make_engine(models("cohere2"), loading=THROUGH, kernels="torch")
    with pytest.raises(ConfigError, match="its config has a sliding_window, which is in a mask alone"):
        make_engine(models("starcoder2"), loading=THROUGH, kernels="torch")


def test_sinks_are_computed_in_torch(models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "WITH_SINKS", ("reference",))
    engine = make_engine(models("gpt-oss"), loading=THROUGH, kernels="torch", attention="torch")
    assert engine.num_pages


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"tp": 2}, "--tp 2: transformers computes this model, which cannot do that; leave it out"),
        ({"quantization": "int8"}, "--quantization int8: transformers computes this model"),
        ({"deterministic": True}, "--deterministic: transformers computes this model"),
        ({"graph": 4}, "--graph 4: transformers computes this model"),
    ],
)
def test_flags_that_only_our_decoder_can_honour_are_refused(
    models: Callable[[str], Path], flags: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(EngineConfig(device="cpu", **flags), check_folder(models("olmo2")))
    assert str(caught.value).startswith(said)


def test_native_names_what_it_knows_and_a_gguf_file_goes_no_other_way(models: Callable[[str], Path]) -> None:
    with pytest.raises(
        ConfigError, match=r'architectures says \["Olmo2ForCausalLM"\]; --model-impl native knows Llama'
    ):
        check_folder(models("olmo2"), Loading(by="native"))
    assert check_folder(models("olmo2")).by == "transformers"
    assert check_folder(models("llama")).by == "native"


def test_an_unknown_architecture_and_code_of_its_own_are_refused(models: Callable[[str], Path], tmp_path: Path) -> None:
    config = json.loads((models("olmo2") / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((models("olmo2") / "model.safetensors").read_bytes())
    (tmp_path / "tokenizer.json").write_bytes((models("olmo2") / "tokenizer.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "nobody", "architectures": ["Nobody"]}))
    with pytest.raises(ConfigError, match="transformers cannot read it: ValueError"):
        check_folder(tmp_path)
    (tmp_path / "theirs.py").write_text("raise SystemExit('this ran')\n")
    own = {"auto_map": {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "nobody"} | own))
    with pytest.raises(ConfigError, match="--trust-remote-code"):
        check_folder(tmp_path)


def copied(folder: Path, parent: Path) -> Path:
    return shutil.copytree(folder, parent / folder.name)


def test_an_answer_ends_with_every_token_that_the_configs_name(models: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copied(models("llama"), tmp_path)
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    settings: dict[str, Any] = {"dtype": "float32", "model_impl": "transformers", "num_pages": 16}
    with LLM(folder, **settings) as llm:
        [whole] = llm.generate([PROMPTS[0]], greedy, progress=False)
    end = whole.token_ids[5]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, end]}))
    with LLM(folder, **settings) as llm:
        [cut] = llm.generate([PROMPTS[0]], greedy, progress=False)
    assert list(cut.token_ids) == list(whole.token_ids)[: list(whole.token_ids).index(end) + 1]


def test_weights_that_are_missing_are_named(models: Callable[[str], Path], tmp_path: Path) -> None:
    folder, name = copied(models("olmo2"), tmp_path), "model.layers.1.self_attn.q_proj.weight"
    weights = load_file(folder / "model.safetensors")
    whole = weights.pop(name)
    for broken in (weights, weights | {name: whole[:32].contiguous()}):
        save_file(broken, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(ConfigError) as caught:
            make_engine(folder, loading=THROUGH, kernels="torch")
        assert f"its files lack {name}, or have it in another shape" in str(caught.value)
    save_file(weights | {name: whole, "odd.weight": torch.zeros(2)}, folder / "model.safetensors", {"format": "pt"})
    with structlog.testing.capture_logs() as lines:
        make_engine(folder, loading=THROUGH, kernels="torch")
    assert [(line["event"], line["first"], line["count"]) for line in lines] == [("weights_ignored", "odd.weight", 1)]


def test_two_models_in_threads_do_not_take_each_others_steps(models: Callable[[str], Path]) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    names = ("olmo2", "cohere2")
    settings: dict[str, Any] = {"dtype": "float32", "page_size": 16, "num_pages": 64}
    with LLM(models(names[0]), **settings) as one, LLM(models(names[1]), **settings) as other:
        llms = dict(zip(names, (one, other), strict=True))

        def tokens(name: str) -> list[list[int]]:
            return [list(each.token_ids) for each in llms[name].generate(PROMPTS, greedy, progress=False)]

        alone = [tokens(name) for name in names]
        with ThreadPoolExecutor(2) as threads:
            assert list(threads.map(tokens, names)) == alone


def test_random_weights_are_the_same_in_every_engine(models: Callable[[str], Path]) -> None:
    dummy = Loading(dummy=True, by="transformers")
    engines = [make_engine(models("olmo2"), loading=dummy, kernels="torch") for _ in range(2)]
    first, second = (generate(each, Request(0, list(PREFIX), shuffled_pages()), 8, 64) for each in engines)
    assert first == second
    assert check_folder(models("olmo2"), dummy).num_weights == check_folder(models("olmo2")).num_weights


def test_a_head_that_calls_an_inner_part_of_the_model_works(models: Callable[[str], Path]) -> None:
    engine = make_engine(models("opt"), loading=THROUGH, kernels="torch")
    tokens, gap = reference_tokens(models("opt"), PREFIX, 8)
    assert gap > 1e-4
    assert generate(engine, Request(0, list(PREFIX), shuffled_pages()), 8, 64) == tokens


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_attention_heads": 0}, "its config has num_attention_heads 0; expected a positive number"),
        ({"num_key_value_heads": -1}, "its config has heads of -1"),
        ({"architectures": True}, ""),
    ],
)
def test_a_broken_config_is_refused(
    models: Callable[[str], Path], tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    folder = copied(models("olmo2"), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    if not said:
        assert check_folder(folder).architecture
        return
    with pytest.raises(ConfigError) as caught:
        check_folder(folder)
    assert said in str(caught.value) or "transformers cannot read it" in str(caught.value)
