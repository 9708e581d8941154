"""What requests should become: a run that nobody disturbs, of which only those count that rounding cannot change.

A request is computed in another batch when it is computed again, so logits differ in their last bits. Where two tokens
are as good as equal that is another token, and no fault: such requests are left out, by trying it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import torch
from chaos.clients import Answer, Ask, stream
from transformers import AutoModelForCausalLM

from pipeline.errors import UndecodableEvent
from pipeline.events import Finished, SamplingParams, Submitted, Tokenized, TokensProduced, decode
from pipeline.log.protocol import Entry
from pipeline.log.redis import RedisLog
from pipeline.names import SEAL, Names, parse_id
from stages.generate.sampling.sampler import sample
from stages.generate.schedule.plan import Sample

AT_A_TIME = 16
NOISE = 1e-4
"""Standard deviation of what is added to logits to see whether they change a token; rounding is far below it."""
NUM_TRIES = 8
WORDS = ("the", "log", "is", "memory", "program", "stage", "fold", "over", "events", "sea", "shells", "and", "dies")


@dataclass(frozen=True, slots=True)
class Story:
    """A finished request, folded from its history."""

    prompt_ids: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str
    sampling: SamplingParams


def read_story(history: Sequence[Entry]) -> Story:
    """Fold the history of a request that should have finished.

    Raises:
        UndecodableEvent: Something else than Finished ends it, or tokens are missing or there twice.
    """
    submitted: Submitted | None = None
    prompt_ids: tuple[int, ...] = ()
    tokens: list[int] = []
    text = ""
    for entry in history:
        match decode(entry.fields):
            case Submitted() as submitted:
                pass
            case Tokenized() as tokenized:
                prompt_ids = tokenized.token_ids
            case TokensProduced() as event:
                if parse_id(entry.id) != (len(tokens) + event.count, 0) or event.count != len(event.tokens):
                    raise UndecodableEvent(f"after {len(tokens)} tokens comes {entry.id} with {event.count}")
                tokens += event.tokens
                text += event.text
    last = decode(history[-1].fields) if history else None
    if submitted is None or not isinstance(last, Finished) or history[-1].id != SEAL:
        raise UndecodableEvent(f"it ends with {last!r}, expected Finished")
    if not last.n == last.usage.completion_tokens == len(tokens):
        raise UndecodableEvent(f"{len(tokens)} tokens, but its end says {last.n} and {last.usage}")
    return Story(prompt_ids, tuple(tokens), text, submitted.sampling)


def some_bodies(count: int, num_tokens: int, seed: int) -> list[dict[str, Any]]:
    """Return bodies of requests, greedy and seeded in turn; the prompts begin with one of four heads of some pages."""
    draw = random.Random(seed)
    heads = [" ".join(draw.choices(WORDS, k=60)) for _ in range(4)]
    bodies: list[dict[str, Any]] = []
    for number in range(count):
        tail = " ".join(draw.choices(WORDS, k=draw.randrange(2, 12)))
        body = {"prompt": f"{draw.choice(heads)} {number} {tail}", "max_tokens": num_tokens, "ignore_eos": True}
        how = {"temperature": 0} if number % 2 else {"temperature": 0.9, "top_p": 0.95, "seed": draw.randrange(2**32)}
        bodies.append(body | how)
    return bodies


async def ask_all(url: str, asks: Sequence[Ask], *, at_a_time: int = AT_A_TIME) -> list[Answer]:
    """Return the answers to *asks* in their order."""
    places = asyncio.Semaphore(at_a_time)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:

        async def one(ask: Ask) -> Answer:
            async with places:
                return await stream(session, url, ask)

        return await asyncio.gather(*map(one, asks))


def quiet_run(url: str, redis_url: str, folder: Path, bodies: Sequence[Mapping[str, Any]]) -> dict[int, Story]:
    """Ask for *bodies* on a server that is left alone; return those that rounding cannot change, by their index."""
    answers = asyncio.run(ask_all(url, [Ask(f"quiet-{number}", body) for number, body in enumerate(bodies)]))
    with contextlib.closing(RedisLog(redis_url, Names())) as log:
        histories = log.histories([answer.uid for answer in answers])
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    stories: dict[int, Story] = {}
    for number, (answer, history) in enumerate(zip(answers, histories, strict=True)):
        story = read_story(history)
        assert answer.text == story.text and answer.ends == ["length"], answer
        if _is_sturdy(model, story):
            stories[number] = story
    return stories


def _is_sturdy(model: Any, story: Story) -> bool:
    """Return whether the model, with some noise, gives the same tokens."""
    ids = [*story.prompt_ids, *story.tokens[:-1]]
    with torch.inference_mode():
        logits_NV = model(torch.tensor([ids])).logits[0, len(story.prompt_ids) - 1 :]
    samples = [Sample(story.sampling, len(story.prompt_ids) + n, ()) for n in range(len(story.tokens))]
    generator = torch.Generator().manual_seed(0)
    for _ in range(NUM_TRIES):
        noise_NV = NOISE * torch.randn(logits_NV.shape, generator=generator)
        if tuple(sample(logits_NV + noise_NV, samples)) != story.tokens:
            return False
    return True
