"""What people pass as --model that is no checkpoint for us gets one line: what it is, what is supported, what to do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from stages.generate.model.folder import model_folder

CONVERTED = "is not supported; convert it with transformers: `AutoTokenizer.from_pretrained(folder).save_pretrained"
MERGE = "adapters are not supported; merge it into its model (`merge_and_unload` of peft)"


def refused(model: str, *, text_alone: bool = False) -> str:
    with pytest.raises(ConfigError) as caught:
        model_folder(model, text_alone=text_alone)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("qwen3-q4.gguf", "not found; for a file of the Hugging Face hub pass owner/name:FILE.gguf"),
        ("models/qwen3.GGUF", "not found; for a file"),
        ("https://huggingface.co/a/b-GGUF/blob/main/b.gguf", "this is no page of a model"),
        ("qwen3:0.6b", "this is a name for Ollama; supported are folders, GGUF files, and models of the Hugging Face"),
        ("llama3.2:latest", "pass owner/name as on https://huggingface.co, such as Qwen/Qwen3-0.6B"),
        ("https://huggingface.co/Qwen", "this is no page of a model on https://huggingface.co; pass owner/name"),
        ("http://localhost:8000/v1", "this is no page of a model"),
    ],
)
def test_a_name_of_another_kind_is_told_what_it_is(model: str, words: str) -> None:
    said = refused(model)
    assert said.startswith(f"--model {model}: ") and words in said


def test_a_file_of_a_model_is_told_the_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    said = refused(str(tmp_path / "model.safetensors"))
    assert said.endswith(f": this is a file; pass the folder that holds it, {tmp_path}")


CONFIG: Mapping[str, str] = {"config.json": '{"architectures": ["LlamaForCausalLM"]}'}
ADAPTER = json.dumps({"base_model_name_or_path": "Qwen/Qwen3-0.6B", "peft_type": "LORA"})


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"qwen3-q4.gguf": ""}, "q4.gguf: not a GGUF file"),
        ({**CONFIG, "a.gguf": "", "tokenizer.json": "{}"}, "a.gguf: not a GGUF file"),
        ({"a-00002-of-00002.gguf": ""}, "a-00001-of-00002.gguf: not found"),
        ({"mmproj-a.gguf": ""}, "not found"),
        ({"adapter_config.json": ADAPTER}, f": this is a LoRA adapter of Qwen/Qwen3-0.6B, not a whole model; {MERGE}"),
        ({"adapter_config.json": "{", "tokenizer.json": "{}"}, f": this is a LoRA adapter, not a whole model; {MERGE}"),
    ],
)
def test_a_folder_of_another_kind_is_told_what_it_is(tmp_path: Path, files: Mapping[str, str], words: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    said = refused(str(tmp_path))
    assert said.startswith(str(tmp_path)) and words in said


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tekken.json", f"tokenizer.json: not found; tekken.json is Mistral's own format, which {CONVERTED}"),
        ("tokenizer.model", f"tokenizer.json: not found; tokenizer.model is SentencePiece, which {CONVERTED}"),
        ("vocab.json", f"tokenizer.json: not found; vocab.json is an older format, which {CONVERTED}"),
        ("adapter_config.json", ": this is a LoRA adapter"),
        ("model.gguf", "model.gguf: not a GGUF file"),
        ("merges.txt", "tokenizer.json: not found; save the tokenizer as a fast one"),
    ],
)
def test_a_folder_without_a_tokenizer_is_told_what_to_do_with_the_one_it_has(
    tmp_path: Path, name: str, words: str
) -> None:
    for each in (*CONFIG, name):
        (tmp_path / each).write_text("{}")
    said = refused(str(tmp_path), text_alone=True)
    assert said.startswith(str(tmp_path)) and words in said
