"""Tokenizers whose chat templates write tool calls and thinking as those of the known families of models do."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from support.checkpoints import train_tokenizer
from tokenizers import AddedToken

from stages.tokenize.markup import MARKERS
from stages.tokenize.prompts import PromptEncoder

TEMPLATES: Final = Path(__file__).resolve().parents[1] / "stages" / "tokenize" / "templates"
PLAIN: Final = (
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "<|thought_start|>", "<|thought_end|>", "<tool_response>"),
    *(marker for name in ("glm", "kimi_k2", "deepseek") for marker in MARKERS[name] if "tool_call>" not in marker),
)
"""Added tokens that are not special, as in the tokenizers of Qwen, GLM, Kimi and DeepSeek."""
SPECIAL: Final = (
    *("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "<|python_tag|>"),
    *(*MARKERS["lfm2"], *MARKERS["apertus"], *MARKERS["harmony"]),
)
"""Special tokens, as in the tokenizers of Mistral, Llama, LFM2, Apertus and gpt-oss."""


def make_tokenizer(folder: Path, template: str, *, num_tokens: int = 480, added: bool = True) -> Path:
    """Write the tokenizer of a family to *folder*; without *added* tokens, markers are texts of several tokens."""
    tokenizer = train_tokenizer(num_tokens, with_bos=False)
    if added:
        tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in PLAIN])
        tokenizer.add_tokens(
            [AddedToken(text, special=True, normalized=False) for text in SPECIAL], special_tokens=True
        )
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    tokenizer.save_pretrained(folder)
    return folder


def make_encoder(folder: Path, template: str, tool_parser: str = "auto", *, added: bool = True) -> PromptEncoder:
    """Return the encoder of a family."""
    return PromptEncoder(make_tokenizer(folder, template, added=added), tool_parser)
