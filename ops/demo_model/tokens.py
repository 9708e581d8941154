"""The demo model's tokenizer and chat template, and conversations as tokens. Knows nothing of the network.

It is a byte-level BPE whose merges are none: a word that the corpus speaks with is one token, everything else its
letters (`ignore_merges`, as in Llama 3). So what is to be spelled, reversed or repeated comes in letters.
"""

from __future__ import annotations

import functools
import itertools
import json
import string
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, Template
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from ops.demo_model.corpus import conversations, frame_words
from ops.demo_model.messages import Conversation

END, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS: Final = (END, START, STOP)
MARKS: Final = ("<tools>", "</tools>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Tokens that are text, too: clients look for them in the output."""
CONTEXT: Final = 4096
NUM_SAMPLED: Final = 20_000
LEAST_SEEN: Final = 12
"""The vocabulary comes from sampled conversations; rarer words stay letters."""
PIECES: Final = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # Qwen's, less its 's and 'll
)
CHAT_TEMPLATE: Final = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'system' %}
{%- if not loop.first %}{{- '<|im_start|>system\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{%- if call.function.arguments is string %}{{- call.function.arguments }}{%- else %}
{{- call.function.arguments | tojson }}
{%- endif %}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


@functools.cache
def _template() -> Template:
    environment = Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    return environment.from_string(CHAT_TEMPLATE)


def render(conversation: Conversation) -> str:
    """Return *conversation* as `CHAT_TEMPLATE` renders it, but faster than transformers do."""
    return _template().render(messages=conversation.messages, tools=conversation.tools)


def answer_of(message: dict[str, Any]) -> str:
    """Return the text that the model writes for a *message* of the assistant."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    written = [
        f'<tool_call>\n{{"name": "{call["name"]}", "arguments": {json.dumps(call["arguments"], ensure_ascii=False)}}}'
        "\n</tool_call>"
        for call in calls
    ]
    return "\n".join(written) or str(message["content"])


def make_tokenizer() -> Tokenizer:
    """Return the tokenizer; its words are the frame words of the corpus."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    space = _byte_level(" ")
    letters = [space + letter for letter in string.ascii_letters]
    words = [word for word in _words() if len(word) > 1 and word not in letters]
    vocabulary = {token: index for index, token in enumerate((*alphabet, *letters, *words))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = _pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKS])
    return tokenizer


def _pre_tokenizer() -> Any:
    split = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _words() -> list[str]:
    """Return the pieces that become tokens, in byte-level spelling, frequent ones first."""
    pre_tokenizer, seen = _pre_tokenizer(), Counter[str]()
    for conversation in itertools.islice(conversations("vocabulary"), NUM_SAMPLED):
        text = render(conversation)
        for token in (*SPECIAL_TOKENS, *MARKS):
            text = text.replace(token, "\n")
        seen.update(piece for piece, _ in pre_tokenizer.pre_tokenize_str(text))
    frame = frame_words()

    def is_frame(piece: str) -> bool:
        letters = [letter for letter in piece if letter in string.ascii_letters]
        return not letters or "".join(letters).casefold() in frame

    kept = [(-times, piece) for piece, times in seen.items() if times >= LEAST_SEEN and is_frame(piece)]
    return [piece for _, piece in sorted(kept)]


def _byte_level(text: str) -> str:
    ((piece, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return str(piece)


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the tokenizer's files into *folder*."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": STOP,
        "pad_token": END,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def id_of(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a token of *tokenizer*."""
    found = tokenizer.token_to_id(token)
    assert found is not None, token
    return found


class Encoder:
    """Turns conversations into tokens, and marks the learned ones."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._opening = [id_of(tokenizer, token) for token in (START, "assistant", _byte_level("\n"))]
        self._stop = id_of(tokenizer, STOP)

    def encode(self, batch: Sequence[Conversation]) -> list[tuple[list[int], list[bool]]]:
        """Return the tokens of each conversation, and whether each is learned: answers and their end marks are."""
        encoded = self._tokenizer.encode_batch_fast([render(conversation) for conversation in batch])
        return [(each.ids, self._learned(each.ids)) for each in encoded]

    def _learned(self, ids: Sequence[int]) -> list[bool]:
        learned, inside = [False] * len(ids), False
        for place, token in enumerate(ids):
            learned[place] = inside
            if token == self._stop:
                inside = False
            elif list(ids[max(0, place - 2) : place + 1]) == self._opening:
                inside = True
        return learned
