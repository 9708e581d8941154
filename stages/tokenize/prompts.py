"""Prompts become token ids: chat templates and encoding, on `PreTrainedTokenizerFast` alone, which imports no torch.

What comes as token ids stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import jinja2
from transformers import PreTrainedTokenizerFast

from pipeline.errors import ConfigError, RequestError
from pipeline.events import SamplingParams, Submitted


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as text; a chat template writes its special tokens itself, so none are added to what it made."""

    text: str
    add_special_tokens: bool
    param: str
    """The field of the request that it came from."""
    token_ids: tuple[int, ...] = ()
    """Not empty: the prompt came as tokens and is not encoded."""


class PromptEncoder:
    """The tokenizer of one model folder."""

    def __init__(self, folder: Path) -> None:
        try:
            self._tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        except Exception as error:
            raise ConfigError(
                f"{folder / 'tokenizer.json'}: not a tokenizer ({error}); copy the model's again"
            ) from error
        self.fingerprint = _fingerprint(folder)
        self._num_tokens = len(self._tokenizer)
        self._longest_token = max((len(token) for token in self._tokenizer.get_vocab()), default=1)

    def render(self, event: Submitted) -> Rendered:
        """Return the text of a request's prompt.

        Raises:
            RequestError: There is no chat template, or it refuses the conversation; the message has its words. Or the
                request names a token that there is not.
        """
        self._refuse_unknown_tokens(event.sampling)
        if event.prompt_ids:
            return Rendered("", False, "prompt", event.prompt_ids)
        if not event.messages:
            return Rendered(event.prompt, True, "prompt")
        if self._tokenizer.chat_template is None:
            raise RequestError(
                "This model has no chat template, so it takes no `messages`; send `prompt` instead.",
                code="no_chat_template",
                param="messages",
            )
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in event.messages], tokenize=False, add_generation_prompt=True
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise RequestError(
                f"The model's chat template refuses this conversation: {error}", code="template_error", param="messages"
            ) from error
        assert isinstance(text, str)
        return Rendered(text, False, "messages")

    def encode(self, prompts: Sequence[Rendered]) -> list[tuple[int, ...]]:
        """Return the token ids of each prompt; the ones of one kind are encoded as one batch, in parallel."""
        encoded = [prompt.token_ids for prompt in prompts]
        texts = [(place, prompt) for place, prompt in enumerate(prompts) if not prompt.token_ids]
        for special in (True, False):
            places = [place for place, prompt in texts if prompt.add_special_tokens is special]
            if places:
                batch = self._tokenizer(
                    [prompts[place].text for place in places], add_special_tokens=special, return_attention_mask=False
                )
                for place, ids in zip(places, batch["input_ids"], strict=True):
                    encoded[place] = tuple(ids)
        return encoded

    def _refuse_unknown_tokens(self, sampling: SamplingParams) -> None:
        """Refuse what names a token that this tokenizer does not have; it was meant for another model.

        Raises:
            RequestError: There is one.
        """
        named = {
            "logit_bias": [token for token, _ in sampling.logit_bias],
            "allowed_token_ids": sampling.allowed_token_ids,
        }
        for param, token_ids in named.items():
            unknown = next((token for token in token_ids if token >= self._num_tokens), None)
            if unknown is not None:
                raise RequestError(
                    f"{param}: token {unknown} is none of this model's, which go from 0 to {self._num_tokens - 1}.",
                    code="invalid_value",
                    param=param,
                )

    def refuse_too_long(self, prompt: Rendered, context: int) -> None:
        """Refuse, without encoding it, a text that cannot fit even if every token were the vocabulary's longest.

        Raises:
            RequestError: It cannot fit.
        """
        least = -(-len(prompt.text) // self._longest_token)
        if least + 1 > context:
            raise too_long(f"at least {least}", context, prompt.param)


def too_long(tokens: str, context: int, param: str) -> RequestError:
    """Return the error for a prompt of *tokens* tokens."""
    return RequestError(
        f"This model's served context is {context} tokens, and one at least is for the answer, but the prompt has "
        f"{tokens} tokens; shorten the prompt.",
        code="context_length_exceeded",
        param=param,
    )


def _fingerprint(folder: Path) -> str:
    digest = sha256()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        path = folder / name
        digest.update(path.read_bytes() if path.exists() else b"")
    return digest.hexdigest()[:16]
