"""Turns prompts into token ids and back, with `PreTrainedTokenizerFast` alone, which imports no torch.

Prompts that come as token ids stay as they are. A long text is encoded in parts, cut where `borders.py` finds that a
cut changes no token.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson
from transformers import PreTrainedTokenizerFast

from pipeline.errors import ConfigError, RequestError
from pipeline.events import Submitted
from pipeline.markup import Markup
from pipeline.serving import tokenizer_fingerprint
from pipeline.vocabulary import read_vocabulary
from stages.tokenize.borders import Borders
from stages.tokenize.constraints.asked import Asked, asked_of
from stages.tokenize.description import description
from stages.tokenize.markup import Dialect
from stages.tokenize.shape import Shape
from stages.tokenize.templates import conversation_text

LARGEST_TEXT_BYTES: Final = 4 << 20
"""Largest number of bytes to encode if the served context does not bound them. A BPE takes 2 us for each, and up to 330
bytes of memory where a text has no border (tokenizers 0.23). Meanwhile this process encodes no other prompt."""
LARGEST_DECODED_BYTES: Final = 4 * LARGEST_TEXT_BYTES
LARGEST_PART_BYTES: Final = 128 << 10
"""Most bytes of a part of a long text, if the tokenizer has borders. No text in a language has such a part."""
LONG_TEXT: Final = 64 << 10
"""Number of characters above which a text is encoded in parts, and other prompts do not wait for it."""
NO_MARKUP: Final = Markup()


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as text. A chat template writes the special tokens itself, so none are added to its text."""

    text: str
    add_special_tokens: bool
    param: str
    """Field of the request that holds it."""
    token_ids: tuple[int, ...] = ()
    """Token ids of a prompt that came as tokens and is not encoded; else empty."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Bad words of the request as tokens."""
    grammar: str = ""
    """Grammar of a replayed request, see Tokenized."""
    markup: Markup = NO_MARKUP
    """See Tokenized."""
    prediction: tuple[int, ...] = ()
    """See Tokenized."""
    asked: Asked | None = None
    """Demands on the answer, from which a grammar is made; None: there are none, or `grammar` is given."""

    @property
    def is_long(self) -> bool:
        """Whether the text is long, so other prompts must not wait until it is encoded."""
        return len(self.text) > LONG_TEXT


class PromptEncoder:
    """The tokenizer of one model folder."""

    def __init__(self, folder: Path, tool_parser: str = "auto") -> None:
        """*tool_parser*: see `MarkupConfig`.

        Raises:
            ConfigError: The folder has no tokenizer, or its chat template does not show a user's message.
        """
        vocabulary = read_vocabulary(folder)
        try:
            self._tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        except Exception as error:
            raise ConfigError(
                f"{folder / 'tokenizer.json'}: not a tokenizer ({error}); copy the model's again"
            ) from error
        self.fingerprint = tokenizer_fingerprint(folder)
        self._config = _json_of(folder / "tokenizer_config.json")
        self._num_tokens = len(self._tokenizer)
        self._num_embeddings = _vocab_size(_json_of(folder / "config.json")) or self._num_tokens
        self._longest_token = max((len(token) for token in self._tokenizer.get_vocab()), default=1)
        self._spelling = vocabulary.spelling
        alone = self._tokenizer("a", return_special_tokens_mask=True)
        added = alone["special_tokens_mask"]
        num_before = len(list(itertools.takewhile(bool, added)))
        num_after = len(list(itertools.takewhile(bool, reversed(added[num_before:]))))
        ids = alone["input_ids"]
        self._before, self._after = tuple(ids[:num_before]), tuple(ids[len(ids) - num_after :])
        """Special tokens around a text."""
        self.bos = str(self._tokenizer.convert_ids_to_tokens(ids[0])) if num_before else ""
        """Text of the token that is put before a prompt; empty: there is none."""
        self.has_chat_template = self._tokenizer.chat_template is not None
        self._shape = Shape.of(self._tokenizer)
        self.dialect = Dialect.of(self._tokenizer, self._shape, vocabulary.added, tool_parser)
        backend = self._tokenizer.backend_tokenizer
        stands_between = ids == [*self._before, *backend.encode("a", add_special_tokens=False).ids, *self._after]
        self._borders = Borders.of(backend) if stands_between else None

    def render(self, event: Submitted) -> Rendered:
        """Return the text of a request's prompt.

        Raises:
            RequestError: There is no chat template, or it refuses the conversation (the message quotes it), or the
                request names an unknown token, or sets a variable that clients cannot set.
        """
        sampling = event.sampling
        # A client that names a token which this tokenizer lacks means another model.
        self._refuse_unknown("logit_bias", [token for token, _ in sampling.logit_bias], self._num_tokens)
        self._refuse_unknown("allowed_token_ids", sampling.allowed_token_ids, self._num_tokens)
        self._refuse_unknown("logprob_token_ids", sampling.logprob_token_ids, self._num_tokens)
        if event.replay is None:
            bad_words, grammar, markup = self._bad_words(sampling.bad_words), "", NO_MARKUP
        else:
            bad_words, grammar, markup = event.replay.bad_words, event.replay.grammar, event.replay.markup
        prediction = self._predicted(event.prediction)
        decided = bad_words, grammar, markup, prediction
        if event.prompt_ids:
            self._refuse_unknown("prompt", event.prompt_ids, self._num_embeddings)
            return Rendered("", False, "prompt", event.prompt_ids, *decided, asked_of(event, markup))
        if not event.messages:
            special, asked = event.add_special_tokens is not False, asked_of(event, markup)
            return Rendered(event.prompt, special, "prompt", (), *decided, asked)
        text = conversation_text(self._tokenizer, self._shape, event)
        if event.replay is None:
            markup = self.dialect.markup(event, text)
        special, asked = event.add_special_tokens is True, asked_of(event, markup)
        return Rendered(text, special, "messages", (), bad_words, grammar, markup, prediction, asked)

    def _predicted(self, text: str) -> tuple[int, ...]:
        """Return a prediction as tokens: as many as its first LONG_TEXT characters have."""
        if not text:
            return ()
        encoded = self._tokenizer.backend_tokenizer.encode(text[:LONG_TEXT], add_special_tokens=False)
        return tuple(encoded.ids)

    def encode(self, prompts: Sequence[Rendered]) -> list[Sequence[int]]:
        """Return the token ids of each prompt. Short ones of one kind are encoded as one batch, in parallel.

        Bypass transformers, which also records every token's place in the text: that doubles the time.
        """
        encoded: list[Sequence[int]] = [prompt.token_ids for prompt in prompts]
        texts = [(place, prompt) for place, prompt in enumerate(prompts) if not prompt.token_ids]
        for place, prompt in texts:
            if prompt.is_long:
                encoded[place] = self._encode_long(prompt)
        for special in (True, False):
            some = [(place, each) for place, each in texts if each.add_special_tokens is special and not each.is_long]
            if some:
                batch = self._tokenizer.backend_tokenizer.encode_batch_fast(
                    [each.text for _, each in some], add_special_tokens=special
                )
                for (place, _), found in zip(some, batch, strict=True):
                    encoded[place] = tuple(found.ids)
        return encoded

    def _encode_long(self, prompt: Rendered) -> Sequence[int]:
        """Return the token ids of a long text, in four bytes each."""
        encode, special = self._tokenizer.backend_tokenizer.encode_batch_fast, prompt.add_special_tokens
        if self._borders is None:
            return array("I", encode([prompt.text], add_special_tokens=special)[0].ids)
        token_ids = array("I", self._before if special else ())
        for part in self._borders.parts(prompt.text):
            token_ids.extend(encode([part], add_special_tokens=False)[0].ids)
        token_ids.extend(self._after if special else ())
        return token_ids

    def keep(
        self, num_tokens: int, prompt: Rendered, token_ids: Sequence[int], *, first: bool = False
    ) -> tuple[int, ...]:
        """Return the last *num_tokens* of a prompt's tokens, or the *first* ones.

        As with `truncation_side` in transformers, the special tokens around the text stay and count, if there is room
        for others beside them.
        """
        if len(token_ids) <= num_tokens:
            return tuple(token_ids)
        before, after = (len(self._before), len(self._after)) if prompt.add_special_tokens else (0, 0)
        if before + after >= num_tokens:
            before = after = 0
        if first:
            return (*token_ids[: num_tokens - after], *token_ids[len(token_ids) - after :])
        return (*token_ids[:before], *token_ids[len(token_ids) - (num_tokens - before) :])

    def pieces(self, token_ids: Sequence[int]) -> tuple[str, ...]:
        """Return each token as the vocabulary writes it, as in vLLM: `Ġis`, not ` is`."""
        return tuple(self._tokenizer.convert_ids_to_tokens(list(token_ids)))

    def decode(self, event: Submitted) -> str:
        """Return the text of a request's token ids.

        Raises:
            RequestError: A token is unknown, or the text is too large.
        """
        num_bytes = {token: len(spelled) for token, spelled in self._bytes_of(event.prompt_ids, "tokens").items()}
        total = sum(num_bytes[token] for token in event.prompt_ids)
        if total > LARGEST_DECODED_BYTES:
            raise _too_large(f"are {total}", LARGEST_DECODED_BYTES, "tokens")
        text = self._tokenizer.decode(list(event.prompt_ids), skip_special_tokens=event.sampling.skip_special_tokens)
        assert isinstance(text, str)
        return text

    def describe(self) -> str:
        """Return the description of the tokenizer for clients, in JSON."""
        return description(self._tokenizer, self._config)

    def refuse_too_long(self, prompt: Rendered, context: int) -> None:
        """Refuse a text, without encoding it, that would not fit even if every token were the vocabulary's longest.

        Raises:
            RequestError: It cannot fit.
        """
        least = self._least_tokens(prompt)
        if least + 1 > context:
            raise too_long(f"at least {least}", context, prompt.param)
        self._refuse_uncut(prompt)

    def refuse_too_large(self, prompt: Rendered, context: int) -> None:
        """Refuse a text, without encoding it, that need not fit into the context but is too large to encode.

        Raises:
            RequestError: It is too large.
        """
        if self._least_tokens(prompt) + 1 > context and 4 * len(prompt.text) > LARGEST_TEXT_BYTES:
            num_bytes = len(prompt.text.encode())
            if num_bytes > LARGEST_TEXT_BYTES:
                raise _too_large(f"has {num_bytes}", LARGEST_TEXT_BYTES, prompt.param)
        self._refuse_uncut(prompt)

    def _refuse_uncut(self, prompt: Rendered) -> None:
        """Refuse a long text if one of its parts takes too much memory to encode."""
        if self._borders is None or not prompt.is_long:
            return
        parts = (part for part in self._borders.parts(prompt.text) if 4 * len(part) > LARGEST_PART_BYTES)
        largest = max((len(part.encode()) for part in parts), default=0)
        if largest > LARGEST_PART_BYTES:
            raise RequestError(
                f"{prompt.param}: has {largest} bytes in a row where the tokenizer finds no end of a word, such as one "
                f"letter again and again; at most {LARGEST_PART_BYTES} are accepted. Put spaces or marks between them, "
                "or send the text in parts.",
                code="request_too_large",
                param=prompt.param,
                status=413,
            )

    def _least_tokens(self, prompt: Rendered) -> int:
        return -(-len(prompt.text) // self._longest_token)

    def _bad_words(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of each word at the beginning of a text, and after a space if only the first token differs.

        vLLM does the same (`SamplingParams.update_from_tokenizer`).

        Raises:
            RequestError: A word has no tokens, or the words are too long together.
        """
        given = [word.lstrip() for word in words]
        if not given:
            return ()
        if sum(map(len, given)) > LONG_TEXT:
            raise RequestError(f"bad_words: more than {LONG_TEXT} characters together", param="bad_words")
        spelled = [*given, *(f" {word}" for word in given)]
        ids = self._tokenizer(spelled, add_special_tokens=False, return_attention_mask=False)["input_ids"]
        found = []
        for alone, spaced in zip(ids[: len(given)], ids[len(given) :], strict=True):
            if not alone:
                raise RequestError(
                    "bad_words: a word is empty or only space; to forbid a single token use `logit_bias`",
                    param="bad_words",
                )
            found.append(tuple(alone))
            if len(spaced) == len(alone) and spaced[0] != alone[0]:
                found.append(tuple(spaced))
        return tuple(dict.fromkeys(found))

    def _bytes_of(self, token_ids: Iterable[int], param: str) -> dict[int, bytes]:
        """Return token -> its bytes. Raise RequestError for an unknown token; there may be gaps between tokens."""
        found: dict[int, bytes] = {}
        for token in dict.fromkeys(token_ids):
            piece = self._tokenizer.convert_ids_to_tokens(token) if 0 <= token < 2**32 else None
            if not isinstance(piece, str):
                raise self._unknown(param, token, self._num_tokens)
            found[token] = self._spelling.bytes_of(piece)
        return found

    def _refuse_unknown(self, param: str, token_ids: Iterable[int], num_tokens: int) -> None:
        unknown = next((token for token in token_ids if not 0 <= token < num_tokens), None)
        if unknown is not None:
            raise self._unknown(param, unknown, num_tokens)

    def _unknown(self, param: str, token: int, num_tokens: int) -> RequestError:
        return RequestError(
            f"{param}: this model has no token {token}; its tokens go from 0 to {num_tokens - 1}.",
            code="invalid_value",
            param=param,
        )


def tokens_kept(event: Submitted, context: int) -> int | None:
    """Return how many of the last tokens of a request's prompt are kept, if it `is_cut`; None: all of them.

    -1 keeps as many as fit into the *context* beside `max_tokens`, or beside one token if that is not given. An answer
    that need not fit has at most half of the context.

    Raises:
        RequestError: There is no room for any.
    """
    if event.truncate_prompt_tokens != -1:
        return event.truncate_prompt_tokens
    num_answer = event.sampling.max_tokens or 1
    if not event.limit:
        return context - min(num_answer, context // 2)
    if num_answer >= context:
        raise RequestError(
            f"max_tokens: {num_answer} leaves no room for a prompt in the served context of {context} tokens, so "
            "`truncate_prompt_tokens` cannot make it fit; lower max_tokens.",
            code="context_length_exceeded",
            param="max_tokens",
        )
    return context - num_answer


def is_cut(event: Submitted, num_tokens: int, context: int) -> bool:
    """Return whether a prompt of *num_tokens* is cut. One that leaves room for a token is not, if that is enough."""
    return bool(event.truncate_prompt_tokens != -1 or event.limit or num_tokens >= context)


def limit_too_high(num_tokens: int, event: Submitted, context: int) -> RequestError | None:
    """Return the error for a client's limit that does not fit into the *context* after *num_tokens* of prompt."""
    limit, most = event.limit, event.sampling.max_tokens
    if not limit or most is None or num_tokens + most <= context:
        return None
    return RequestError(
        f"This model's maximum context length is {context} tokens. However, the prompt has {num_tokens} tokens, and "
        f"{limit} is {most}; send at most {context - num_tokens}, or leave it out.",
        code="context_length_exceeded",
        param=limit,
    )


def too_long(tokens: str, context: int, param: str) -> RequestError:
    """Return the error for a prompt of *tokens* tokens. Client libraries recognize OpenAI's words at its beginning."""
    return RequestError(
        f"This model's maximum context length is {context} tokens. However, the prompt has {tokens} tokens, and the "
        "answer needs at least one; shorten the prompt.",
        code="context_length_exceeded",
        param=param,
    )


def _too_large(what: str, most: int, param: str) -> RequestError:
    message = f"{param}: {what} bytes of text, but the tokenizer accepts at most {most} at once; send it in parts."
    return RequestError(message, code="request_too_large", param=param, status=413)


def _json_of(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a model folder; empty if there is no such file, or no object in it."""
    try:
        value = orjson.loads(path.read_bytes())
    except (FileNotFoundError, orjson.JSONDecodeError):
        return {}
    return value if isinstance(value, dict) else {}


def _vocab_size(config: Mapping[str, Any]) -> int:
    """Return for how many tokens a model of this config.json has embeddings; 0: the file does not say."""
    text_config = config.get("text_config")
    size = config.get("vocab_size") or (text_config.get("vocab_size") if isinstance(text_config, dict) else 0)
    return size if isinstance(size, int) else 0
