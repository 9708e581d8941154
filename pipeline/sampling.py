"""How a request's tokens are chosen and presented: a value in its first event."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

TokenId = Annotated[int, Field(ge=0)]
MOST_LOGPROBS = 20
"""OpenAI's limit of `top_logprobs`."""


class Value(BaseModel):
    """A frozen value that refuses unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class SamplingParams(Value):
    """How tokens are chosen and when to stop. The seed is drawn before the submit, so that a replay can repeat it."""

    temperature: float = Field(default=1.0, ge=0, le=2)
    """0 is greedy: top_p, top_k, min_p, typical_p and seed have no effect."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    """0 switches it off."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    typical_p: float = Field(default=1.0, gt=0, le=1)
    """Locally typical sampling (Meister et al. 2022); 1 switches it off."""
    seed: int = Field(default=0, ge=-(2**63), lt=2**63)
    max_tokens: int | None = Field(default=None, ge=1)
    """Largest number of output tokens; None: the rest of the served context."""
    min_tokens: int = Field(default=0, ge=0)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Subtracted from the logit of each token in the output (OpenAI's formula)."""
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    """The same, multiplied by how often the output has the token."""
    repetition_penalty: float = Field(default=1.0, gt=0, le=2)
    """Divides the logit of each token in prompt or output, multiplies a negative one (CTRL, Keskar et al. 2019)."""
    logit_bias: tuple[tuple[TokenId, Annotated[float, Field(ge=-100, le=100)]], ...] = ()
    """Pairs (token id, number added to its logit)."""
    allowed_token_ids: tuple[TokenId, ...] = ()
    """The only tokens that the output may have; empty: all."""
    bad_words: tuple[str, ...] = ()
    """Texts that the output must not have; Tokenized has their token ids."""
    logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    """Number of top tokens returned with each chosen token and its log-probability; None: no log-probabilities."""
    logprob_token_ids: tuple[TokenId, ...] = ()
    """Tokens that are returned instead of the top ones, with `logprobs`."""
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    """Number of top tokens returned for each token of the prompt but the first. Then no cached page is read."""
    include_stop_str_in_output: bool = False
    """Whether the stop string, or the text of the stop token, is part of the answer."""
    skip_special_tokens: bool = True
    """Whether special tokens have no text."""

    @property
    def penalizes(self) -> bool:
        """Whether earlier tokens change the logits."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def shapes(self) -> bool:
        """Whether the logits are changed before a token is chosen."""
        return self.penalizes or bool(self.logit_bias or self.allowed_token_ids)


class Constraint(Value):
    """One of the four kinds of constraints on an answer. The tokenizer makes a grammar of it."""

    kind: Literal["json", "regex", "choice", "grammar"]
    text: str
    """JSON schema, regular expression, JSON list of texts, or grammar in GBNF or Lark."""
    whitespace: str | None = None
    """Pattern of whitespace between tokens of JSON, for a JSON schema; None: our own."""
    param: str
    """Field of the request that holds the constraint."""
    whitespace_param: str = ""
    """Field that holds `whitespace`."""
