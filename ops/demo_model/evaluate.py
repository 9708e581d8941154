"""Scores a checkpoint on held-out conversations, greedily, by exact match: `python -m ops.demo_model.evaluate FOLDER`.

The answers come from transformers, so a score tests the weights, not our engine.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Final

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from ops.demo_model.corpus import Maker
from ops.demo_model.messages import Conversation, Exchange, Message, spoken
from ops.demo_model.tokens import START, STOP, answer_of

SEED: Final = "evaluation"
BATCH: Final = 32
ROOM: Final = 8
"""How many tokens an answer may be longer than the right one."""


def _alone(make: Callable[[Maker], Exchange], style: str = "") -> Callable[[Maker], Conversation]:
    """Return the maker of a conversation with one question."""

    def conversation(maker: Maker) -> Conversation:
        exchange = maker.exchange(style) if style else make(maker)
        return Conversation("", (*(maker.system(style) if style else ()), *spoken([exchange], style)))

    return conversation


def _call(kind: str, num_messages: int) -> Callable[[Maker], Conversation]:
    """Return the maker of a conversation that calls a tool of *kind*: four messages, call second, answer last."""

    def conversation(maker: Maker) -> Conversation:
        tools = maker.declared(both=True)
        (tool,) = (tool for tool in tools if tool.kind == kind)
        return Conversation("", maker.call(tool)[:num_messages], tuple(each.declared for each in tools))

    return conversation


def _call_renamed(num_messages: int, *, invented: float) -> Callable[[Maker], Conversation]:
    """Return the maker of a conversation that calls one of two tools whose names no training has met."""

    def conversation(maker: Maker) -> Conversation:
        tools = maker.declared(both=True, renamed=True, invented=invented)
        called = maker.call(tools[maker.chance(0, 1)])
        return Conversation("", called[:num_messages], tuple(each.declared for each in tools))

    return conversation


FAMILIES: Final[Mapping[str, Callable[[Maker], Conversation]]] = {
    "greet": _alone(Maker.greet),
    "introduce": _alone(Maker.introduce),
    "small talk": _alone(Maker.small_talk),
    "unknown": _alone(Maker.unknown),
    "echo": _alone(Maker.echo),
    "spell": _alone(Maker.spell),
    "reverse": _alone(Maker.reverse),
    "count": _alone(Maker.count),
    "count, 200 tokens": _alone(lambda maker: maker.count(length=70)),
    "add": _alone(Maker.add),
    "subtract": _alone(Maker.subtract),
    "compare": _alone(Maker.compare),
    "sort": _alone(Maker.sort),
    "days and months": _alone(Maker.days),
    "JSON": _alone(Maker.person),
    "capitals": _alone(Maker.greet, "capitals"),
    "one word": _alone(Maker.greet, "word"),
    "call get_weather": _call("get_weather", 2),
    "use get_weather": _call("get_weather", 4),
    "call add": _call("add", 2),
    "use add": _call("add", 4),
    "call a renamed tool": _call_renamed(2, invented=0),
    "use a renamed tool": _call_renamed(4, invented=0),
    "call an invented name": _call_renamed(2, invented=1),
    "recall, to 300": lambda maker: maker.memory(num_between=maker.chance(0, 8)),
    "recall, 300 to 1000": lambda maker: maker.memory(num_between=maker.chance(8, 30)),
}
REACHES: Final = {"recall, to 300": (0, 300), "recall, 300 to 1000": (300, 1000)}
"""Tokens between the fact, or the start, and the answer."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A prompt of a family, the right answer, and the model's."""

    family: str
    messages: tuple[Message, ...]
    tools: tuple[Message, ...]
    prompt: str
    """The messages and tools, through the chat template."""
    expected: str
    answer: str


class Examiner:
    """Asks a checkpoint questions."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True, padding_side="left")
        self._model = Qwen3ForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
        self._model.requires_grad_(False)

    def questions(self, family: str, number: int) -> list[Answered]:
        """Return *number* held-out questions without answers, always the same ones."""
        maker = Maker(Random(f"{SEED} {family}"), held_out=True)
        least, most = REACHES.get(family, (0, 2**31))
        found: list[Answered] = []
        while len(found) < number:
            conversation = FAMILIES[family](maker)
            *before, last = conversation.messages
            question = self.question(before, conversation.tools, family=family, expected=answer_of(last))
            if least <= self._reach(question) <= most:
                found.append(question)
        return found

    def _reach(self, question: Answered) -> int:
        """Return the number of tokens between the first message with the answer's last word and the answer."""
        word = question.expected.rstrip(".").split()[-1].casefold()
        for message in question.messages:
            if message["role"] == "user" and word in re.findall(r"\w+", message["content"].casefold()):
                return self._length(question.prompt.partition(message["content"])[2])
        return self._length(question.prompt)

    def question(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), *, family: str = "", expected: str = ""
    ) -> Answered:
        """Return a question from *messages*, without an answer."""
        prompt = self._tokenizer.apply_chat_template(
            list(messages), tools=list(tools) or None, add_generation_prompt=True, tokenize=False
        )
        assert isinstance(prompt, str)
        return Answered(family, tuple(messages), tuple(tools), prompt, expected, "")

    @torch.inference_mode()
    def answer(self, questions: Sequence[Answered], *, room: int = 0) -> list[Answered]:
        """Return the questions with the model's answers of at most *room* tokens; 0: a few more than the right ones."""
        rows = sorted(questions, key=lambda each: len(each.expected))
        answered: list[Answered] = []
        for begin in range(0, len(rows), BATCH):
            batch = rows[begin : begin + BATCH]
            inputs = self._tokenizer([row.prompt for row in batch], return_tensors="pt", padding=True)
            most = room or max(self._length(row.expected) for row in batch) + ROOM
            generated = self._model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=most,
                do_sample=False,
            )
            written = self._tokenizer.batch_decode(
                generated[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
            )
            answered += [replace(row, answer=text) for row, text in zip(batch, written, strict=True)]
        return answered

    def ids(self, text: str) -> tuple[int, ...]:
        """Return the tokens of *text*, which may have special ones."""
        return tuple(self._tokenizer(text)["input_ids"])

    def _length(self, text: str) -> int:
        return len(self.ids(text))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the share of exactly right answers in each family."""
    parser = argparse.ArgumentParser(prog="python -m ops.demo_model.evaluate", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="a checkpoint")
    parser.add_argument("--number", type=int, default=200, help="questions per family")
    parser.add_argument("--family", action="append", choices=tuple(FAMILIES), help="only this family; may be repeated")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--wrong", type=int, default=0, help="number of wrong answers to print per family")
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    examiner = Examiner(given.folder)
    scores: dict[str, float] = {}
    for family in given.family or FAMILIES:
        answered = examiner.answer(examiner.questions(family, given.number))
        wrong = [each for each in answered if each.answer != each.expected]
        scores[family] = 1 - len(wrong) / len(answered)
        if not given.json:
            print(f"{family:<22}{scores[family]:7.1%}", flush=True)
            for each in wrong[: given.wrong]:
                asked = each.prompt.removesuffix(f"{STOP}\n{START}assistant\n").rpartition(f"{START}user\n")[2]
                print(f"    {asked!r}: {each.answer!r}, not {each.expected!r}")
    if given.json:
        print(json.dumps({"number": given.number, "scores": scores}))


if __name__ == "__main__":
    main()
