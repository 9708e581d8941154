"""The conversations that the demo model learns from, made from a seed: every answer is computed, nothing is downloaded.

Training never sees what is held out: a wording is in one of the two lists of its `Wording`, a value (a word, a name, a
pair of numbers) on one side of `is_held_out`. It knows no tokens and no model.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Final

from ops.demo_model import wordings
from ops.demo_model.messages import ADD, GET_WEATHER, SPOKEN, TOOLS, Conversation, Exchange, Message, called, spoken
from ops.demo_model.renamed import INVENTED, Namer, Tool, plain
from ops.demo_model.wordings import POLITE_AFTER, POLITE_BEFORE, is_held_out

VERSION: Final = 7
"""Count this up with every change of the corpus; a checkpoint names its version."""

# What each phase of the training has, by its index.
NUM_PHASES: Final = 5
THIRD_PHASE: Final = 2
"""From here on, answers that are hard to write come more often."""
FOURTH_PHASE: Final = 3
"""From here on, most tools have other names."""
SHARES: Final = ((0.22, 0.07), (0.22, 0.07), (0.22, 0.07), (0.1, 0.55), (0.08, 0.5))
"""Which part of the conversations is there to recall something, and which part has tools."""
STYLES: Final = ((0.8, 0.9), (0.8, 0.9), (0.55, 0.8), (0.55, 0.8), (0.4, 0.6))
"""Which part of the plain conversations has no style, and which part has none or capitals. The others have one word."""
BOTH_TOOLS: Final = (0.5, 0.5, 0.5, 0.5, 0.9)
"""Which part of the conversations with tools has two that are called."""

WORD: Final = re.compile(r"[A-Za-z]+")
BEYOND_SUMS: Final = 2000
"""The largest number in an exchange; only numbers to remember are larger."""
CONSONANTS: Final = "bcdfghjklmnpqrstvwxyz"
VOWELS: Final = "aeiou"


@functools.cache
def frame_words() -> frozenset[str]:
    """Return the words of the corpus in small letters, without values."""
    told = [*wordings.answers(), *POLITE_BEFORE, *POLITE_AFTER, *SPOKEN, json.dumps(TOOLS)]
    told += [value for name in ("skies", "days", "months") for value in wordings.values(name)]
    sentences = [sentence for name in wordings.names() for sentence in wordings.wording(name).trained]
    told += [re.sub(r"\{\w+\}", " ", sentence) for sentence in sentences]
    return frozenset(word.casefold() for text in told for word in WORD.findall(text))


@functools.cache
def listed(name: str, held_out: bool) -> tuple[str, ...]:
    """Return the values of the list *name* that are on the wanted side and are not frame words."""
    values = wordings.values(name)
    return tuple(value for value in values if is_held_out(value) is held_out and value.casefold() not in frame_words())


@functools.cache
def _trained_frame_words() -> tuple[str, ...]:
    return tuple(word for word in sorted(frame_words()) if len(word) > 2 and not is_held_out(word))


class Maker:
    """Makes exchanges and conversations of one side: training, or held out."""

    def __init__(self, random: Random, *, held_out: bool, phase: int = 0) -> None:
        self._random = random
        self._held_out = held_out
        self._phase = phase
        self._is_late = phase >= THIRD_PHASE
        self._namer = Namer(random, self.invented, held_out=held_out)

    # Wordings

    def ask(self, name: str, /, *, order: bool = False, **values: str | int) -> str:
        """Return a sentence of the wording *name* as a person might type it; *order*: it can be asked for politely."""
        random, wording = self._random, wordings.wording(name)
        text = random.choice(wording.held_out if self._held_out else wording.trained)
        if text[-1] in ".?!" and random.random() < 0.2:
            text = text[:-1]
        if order and text[0].isupper() and text.split()[0] not in NO_ORDER and random.random() < 0.2:
            text = random.choice(POLITE_BEFORE) + _small(text)
        elif order and text.endswith(".") and random.random() < 0.1:
            text = text[:-1] + random.choice(POLITE_AFTER) + "."
        if random.random() < 0.25:
            text = _small(text)
        if "'" in text and random.random() < 0.3:
            text = text.replace("'", "")
        return text.format(**values)

    def chance(self, least: int, most: int) -> int:
        """Return a number from *least* to *most*."""
        return self._random.randint(least, most)

    # Values

    def listed(self, name: str) -> str:
        """Return a value of this side from the list *name*."""
        return self._random.choice(listed(name, self._held_out))

    def invented(self, shortest: int = 3, longest: int = 9) -> str:
        """Return an invented word."""
        random = self._random
        while True:
            length = random.randint(shortest, longest)
            letters = ""
            while len(letters) < length:
                letters += random.choice(CONSONANTS) + random.choice(VOWELS)
                if random.random() < 0.12:
                    letters += letters[-1]
                if random.random() < 0.3:
                    letters += random.choice(CONSONANTS)
                if random.random() < 0.15:
                    letters += random.choice(VOWELS)
            word = letters[:length] if random.random() < 0.7 else letters[1 : length + 1]
            if self._is_mine(word) and word not in frame_words():
                return word

    def _is_mine(self, word: str) -> bool:
        """Return whether *word* is on this side. Training writes reversed words, so those are not held out."""
        return is_held_out(word) is self._held_out and (not self._held_out or is_held_out(word[::-1]))

    def word(self) -> str:
        """Return a word to spell, to reverse or to repeat."""
        chance = self._random.random()
        if chance < (0.8 if self._held_out else 0.5):
            return self.invented()
        if self._held_out:
            return self._random.choice([word for word in listed("words", True) if self._is_mine(word)])
        return self._random.choice(listed("words", False) if chance < 0.92 else _trained_frame_words())

    def name(self) -> str:
        name = self.listed("names") if self._random.random() < 0.5 else self.invented(3, 7).capitalize()
        return name.lower() if self._random.random() < 0.08 else name

    def city(self) -> str:
        return self.listed("cities") if self._random.random() < 0.5 else self.invented(4, 8).capitalize()

    def color(self) -> str:
        return self.listed("colors") if self._random.random() < 0.7 else self.invented(3, 7)

    def job(self) -> str:
        return self.listed("jobs") if self._random.random() < 0.6 else self.invented(4, 8)

    def numbers(self, draw: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
        """Return the first draw of *draw* that is on this side; the order does not count."""
        while True:
            drawn = draw()
            if is_held_out(tuple(sorted(drawn))) is self._held_out:
                return drawn

    def _number(self, weights: tuple[int, int, int] = (2, 3, 5)) -> int:
        """Return a number up to 999 with one, two or three digits."""
        digits = self._random.choices((1, 2, 3), weights)[0]
        return self._random.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)

    def _terms(self, *, difference: bool) -> tuple[int, int]:
        """Return two numbers; carries over several digits are more frequent than by chance."""
        a, b = self._number(), self._number()
        if self._random.random() < 0.25:
            place = self._random.choice((10, 10, 100))
            digit = a // place % 10
            b += ((digit if difference else 9 - digit) - b // place % 10) * place
        if difference and a < b and self._random.random() < 0.9:
            a, b = b, a
        return a, b

    # Exchanges

    def greet(self) -> Exchange:
        return self._told(self._random.choice(("greeting", "how_are_you", "thanks", "bye")))

    def _told(self, name: str) -> Exchange:
        """Return a request whose answer is always the same."""
        return Exchange(self.ask(name), *wordings.answer(name))

    def introduce(self) -> Exchange:
        return self._told("who_are_you" if self._random.random() < 0.6 else "what_can_you_do")

    def small_talk(self) -> Exchange:
        return self._told("small_talk")

    def unknown(self) -> Exchange:
        topic = self.word() if self._random.random() < 0.6 else self.city()
        return Exchange(self.ask("questions", topic=topic), *wordings.answer("unknown"))

    def weather(self) -> Exchange:
        """Ask for the weather without a tool for it."""
        return Exchange(self.ask("weather", city=self.city()), *wordings.answer("unknown"))

    def echo(self) -> Exchange:
        random = self._random
        num_words = random.choices((1, 2, 3, 4, 5, 6, 8, 10), (4, 4, 4, 3, 3, 2, 1, 1))[0]
        words = [
            self.word() if random.random() < 0.5 else random.choice(_trained_frame_words()) for _ in range(num_words)
        ]
        words[random.randrange(len(words))] = self.word()  # so that there is something of this side
        if random.random() < 0.15:
            words.insert(random.randrange(len(words) + 1), str(random.randrange(1000)))
        text = " ".join(words)
        style = random.random()
        if style < 0.4:
            text = text[0].upper() + text[1:]
        elif style < 0.5:
            text = text.title()
        elif style < 0.55:
            text = text.upper()
        if len(words) > 2 and random.random() < 0.15:
            text = text.replace(" ", ", ", 1)
        text += random.choices(("", ".", "!", "?"), (5, 3, 2, 1))[0]
        request = self.ask("echo", order=True, text=text)
        return Exchange(request, text)

    def spell(self) -> Exchange:
        word = self._cased(self.word())
        return Exchange(self.ask("spell", order=True, word=word), " ".join(word))

    def reverse(self) -> Exchange:
        word = self._cased(self.word())
        return Exchange(self.ask("reverse", order=True, word=word), word[::-1], word[::-1])

    def _cased(self, word: str) -> str:
        chance = self._random.random()
        return word.capitalize() if chance < 0.08 else word.upper() if chance < 0.12 else word

    def count(self, *, length: int = 0) -> Exchange:
        """*length*: how many numbers; 0 means a random length."""
        random = self._random

        def draw() -> tuple[int, ...]:
            weights = (9, 5, 5) if self._is_late else (14, 5, 1)
            steps = length or random.randint(*random.choices(((1, 12), (12, 40), (40, 110)), weights)[0])
            first = 1 if random.random() < 0.3 else random.randint(0, 100 if random.random() < 0.8 else 900)
            return first, first + steps

        first, last = self.numbers(draw)
        if random.random() < 0.4:
            request = self.ask("count_down", order=True, first=last, last=first)
            return Exchange(request, " ".join(map(str, range(last, first - 1, -1))))
        wording = "count_to" if first == 1 and random.random() < 0.5 else "count"
        return Exchange(
            self.ask(wording, order=True, first=first, last=last), " ".join(map(str, range(first, last + 1)))
        )

    def add(self) -> Exchange:
        a, b = self.numbers(lambda: self._terms(difference=False))
        return Exchange(self.ask("add", a=a, b=b), f"{a} + {b} = {a + b}", f"{a + b}")

    def subtract(self) -> Exchange:
        a, b = self.numbers(lambda: self._terms(difference=True))
        return Exchange(self.ask("subtract", a=a, b=b), f"{a} - {b} = {a - b}", f"{a - b}")

    def compare(self) -> Exchange:
        def draw() -> tuple[int, ...]:
            a = self._number()
            if self._random.random() < 0.03:
                return a, a
            near = self._random.random() < 0.3
            return a, max(0, a + self._random.choice((-10, -2, -1, 1, 2, 10))) if near else self._number()

        a, b = self.numbers(draw)
        larger = self._random.random() < 0.6
        request = self.ask("larger" if larger else "smaller", a=a, b=b)
        if a == b:
            return Exchange(request, "They are equal.", "Equal")
        first, second = (max(a, b), min(a, b)) if larger else (min(a, b), max(a, b))
        return Exchange(request, f"{first} is {'larger' if larger else 'smaller'} than {second}.", str(first))

    def sort(self) -> Exchange:
        random = self._random

        def draw() -> tuple[int, ...]:
            weights = random.choice(((1, 0, 0), (1, 3, 0), (1, 3, 0), (1, 2, 2)))
            drawn = {self._number(weights) for _ in range(random.randint(3, 5))}
            return tuple(random.sample(sorted(drawn), len(drawn)))

        drawn = self.numbers(draw)
        down = random.random() < 0.3
        separator = random.choice((", ", " ", ", "))
        request = self.ask("sort_down" if down else "sort", order=True, numbers=separator.join(map(str, drawn)))
        return Exchange(request, " ".join(map(str, sorted(drawn, reverse=down))))

    def days(self) -> Exchange:
        random = self._random
        kind = random.choice(("day", "month"))
        names = wordings.values(f"{kind}s")
        place = random.randrange(len(names))
        step = random.choice((1, -1))
        it, found = names[place], names[(place + step) % len(names)]
        relation = "after" if step > 0 else "before"
        if kind == "day" and random.random() < 0.25:
            request = self.ask("tomorrow" if step > 0 else "yesterday", it=it)
        else:
            request = self.ask("after" if step > 0 else "before", it=it, kind=kind)
        return Exchange(request, f"{found} comes {relation} {it}.", found)

    def person(self) -> Exchange:
        random = self._random
        side = "held_out" if self._held_out else "trained"
        name, age, city, job = self.name(), random.randint(1, 99), self.city(), self.job()
        facts: dict[str, object] = {"age": age, "city": city, "job": job}
        wanted = random.sample(sorted(facts), random.randint(1, 3))
        parts = [random.choice(getattr(wordings.wording(f"person_{fact}"), side)).format(**facts) for fact in wanted]
        request = self.ask("described", order=True, person=", ".join((name, *parts)))
        described = {"name": name} | {fact: value for fact, value in facts.items() if fact in wanted}
        return Exchange(request, json.dumps(described), can_shout=False)

    def not_told(self) -> Exchange:
        """Ask for something that was never told."""
        return self._random.choice((self._name, self._color, self._number_told))()[2]

    # Memory: (how it is told, how it is asked for, how it is asked for without having been told)

    def _name(self) -> tuple[Exchange, Exchange, Exchange]:
        name = self.name()
        asked = self.ask("ask_name")
        return (
            Exchange(self.ask("tell_name", name=name), f"Nice to meet you, {name}.", "Okay"),
            Exchange(asked, f"Your name is {name}.", name),
            Exchange(asked, "You have not told me your name.", "Unknown"),
        )

    def _color(self) -> tuple[Exchange, Exchange, Exchange]:
        color = self.color()
        asked = self._ask_of_color("ask_color")
        favorite = "favourite colour" if "favourite" in asked or "colour" in asked else "favorite color"
        return (
            Exchange(self._ask_of_color("tell_color", color=color), f"I will remember that you like {color}.", "Okay"),
            Exchange(asked, f"Your {favorite} is {color}.", color),
            Exchange(asked, f"You have not told me your {favorite}.", "Unknown"),
        )

    def _ask_of_color(self, name: str, /, **values: str) -> str:
        """Ask in British or American spelling; a sentence does not mix them."""
        british = self._random.random() < 0.5
        values["color_word"] = "colour" if british else "color"
        text = self.ask(name, order=False, **values)
        return text.replace("favorite", "favourite") if british else text.replace("favourite", "favorite")

    def _number_told(self) -> tuple[Exchange, Exchange, Exchange]:
        least, digits = (BEYOND_SUMS, 4) if self._held_out else (0, 1)
        (number,) = self.numbers(lambda: (self._random.randrange(least, 10 ** self._random.randint(digits, 5)),))
        asked = self.ask("ask_number")
        return (
            Exchange(self.ask("tell_number", number=number), f"I will remember {number}.", "Okay"),
            Exchange(asked, f"You told me {number}.", str(number)),
            Exchange(asked, "You have not told me a number.", "Unknown"),
        )

    # Conversations

    def conversation(self) -> Conversation:
        """Return a random conversation for the training."""
        chance = self._random.random()
        memory, tools = SHARES[self._phase]
        if chance < memory:
            return self.memory()
        if chance < memory + tools:
            return self.tools()
        return self.plain()

    def plain(self) -> Conversation:
        """Return one to four exchanges, most often without a system prompt."""
        random = self._random
        chance = random.random()
        plain, capitals = STYLES[self._phase]
        style = "" if chance < plain else "capitals" if chance < capitals else "word"
        exchanges = [self.exchange(style) for _ in range(random.choice((1, 1, 2, 3, 4)))]
        return Conversation("plain", (*self.system(style), *spoken(exchanges, style)))

    def system(self, style: str) -> tuple[Message, ...]:
        """Return the system prompt for a *style*: "capitals", "word", or "", which seldom has one."""
        if not style and self._random.random() < 0.85:
            return ()
        wording = {"": "plain_system", "capitals": "capitals_system", "word": "one_word_system"}[style]
        return ({"role": "system", "content": self.ask(wording)},)

    def memory(self, *, num_between: int | None = None) -> Conversation:
        """Return a conversation that tells something and asks for it later; *num_between*: exchanges in between."""
        random = self._random
        kinds = random.sample((self._name, self._color, self._number_told), random.choice((1, 1, 2, 3)))
        told = [kind() for kind in kinds]
        if num_between is None:
            num_between = random.choices((0, 1, 2, 4, 7, 10, random.randint(10, 30)), (3, 4, 4, 3, 2, 2, 0.6))[0]
        style = "" if num_between > 10 else random.choices(("", "capitals", "word"), (88, 6, 6))[0]
        between = [self.exchange(style, without=(Maker.not_told,), brief=True) for _ in range(num_between)]
        early = len(between) // 3
        head: list[Exchange] = [tell for tell, _, _ in told]
        if random.random() < 0.5 and early:  # told with something between
            head = [*head[:1], *between[:early], *head[1:]]
            between = between[early:]
        asked = [ask for _, ask, _ in random.sample(told, len(told))]
        if random.random() < 0.15 and len(kinds) < 3:
            missing = next(kind for kind in (self._name, self._color, self._number_told) if kind not in kinds)
            asked.insert(random.randrange(len(asked)), missing()[2])
        exchanges = [*head, *between, *asked]
        return Conversation("memory", (*self.system(style), *spoken(exchanges, style)))

    def tools(self) -> Conversation:
        """Return a conversation with tools; some of its requests need them."""
        random = self._random
        renamed = self._phase >= FOURTH_PHASE and random.random() < 0.85
        declared = self.declared(both=random.random() < BOTH_TOOLS[self._phase], renamed=renamed)
        kinds = [tool.kind for tool in declared]
        messages: list[Message] = [*self.system("")]
        for _ in range(random.choice((1, 2, 3, 4))):
            if random.random() < 0.25:
                messages += spoken([self.exchange("", without=[WITHOUT_TOOL[kind] for kind in kinds])], "")
            else:
                messages += self.call(random.choice(declared))
        shown = [tool.declared for tool in declared]
        if renamed and random.random() < 0.25:
            shown.insert(random.randint(0, len(shown)), self._namer.other())
        return Conversation("tools", tuple(messages), tuple(shown))

    def declared(self, *, both: bool, renamed: bool = False, invented: float = INVENTED) -> tuple[Tool, ...]:
        """Return the tools of a conversation, both or one of them; *renamed*: not under their own names."""
        if renamed:
            weather = self._namer.tool("get_weather", invented=invented)
            tools = [weather, self._namer.tool("add", but=[weather.name], invented=invented)]
        else:
            tools = [plain(self._random.choice(GET_WEATHER)), plain(self._random.choice(ADD))]
        self._random.shuffle(tools)
        return tuple(tools if both else tools[:1])

    def call(self, tool: Tool) -> tuple[Message, ...]:
        """Return a request that needs *tool*, its call, its result and the answer."""
        random = self._random
        if tool.kind == "add":
            a, b = self.numbers(lambda: self._terms(difference=False))
            result = random.choice(("{}", '{{"sum": {}}}', '{{"result": {}}}')).format(a + b)
            arguments = dict(zip(tool.keys, (a, b), strict=True))
            return called(self.ask("add", a=a, b=b), tool.name, arguments, result, f"{a} + {b} = {a + b}")
        city, degrees = self.city(), random.randint(-15, 39)
        sky = random.choice(wordings.values("skies")) if random.random() < 0.8 else self.word()
        results = (
            f"{degrees} degrees, {sky}",
            f"{sky}, {degrees} degrees",
            json.dumps({"city": city, "temperature": degrees, "sky": sky}),
            json.dumps({"temperature_c": degrees, "condition": sky}),
            json.dumps({"temp": degrees, "weather": sky}),
            json.dumps({"condition": sky, "temperature": degrees}),
        )
        answer = f"It is {sky} and {degrees} degrees in {city}."
        request = self.ask("weather", city=city)
        return called(request, tool.name, {tool.keys[0]: city}, random.choice(results), answer)

    def exchange(
        self, style: str, *, without: Sequence[Callable[[Maker], Exchange]] = (), brief: bool = False
    ) -> Exchange:
        """Return an exchange that allows the *style*; *brief*: mostly a short one, to put between fact and question."""
        while True:
            (make,) = self._random.choices(tuple(WEIGHTS), [weights[self._phase] for weights in WEIGHTS.values()])
            if make in without:
                continue
            exchange = make(self)
            if (style == "word" and not exchange.word) or (style == "capitals" and not exchange.can_shout):
                continue
            if brief and len(exchange.answer) > 60 and self._random.random() < 0.8:
                continue
            return exchange


NO_ORDER: Final = frozenset(
    ("What", "How", "Which", "Can", "Will", "Let", "I", "A", "The", "All", "JSON", "Numbers", "As", "Please")
)
"""First words that cannot follow `please`."""

WEIGHTS: Final[Mapping[Callable[[Maker], Exchange], tuple[float, ...]]] = {
    Maker.greet: (2, 1, 1, 1, 1),
    Maker.introduce: (1.5, 1, 1, 1, 1),
    Maker.small_talk: (1, 0.5, 0.5, 0.5, 0.5),
    Maker.unknown: (3, 1.5, 2, 2, 2),
    Maker.weather: (0.6, 0.4, 0.4, 0.4, 0.4),
    Maker.echo: (9, 8, 28, 20, 20),
    Maker.spell: (4, 1.5, 1.5, 1.5, 1.5),
    Maker.reverse: (6, 7, 8, 8, 8),
    Maker.count: (7, 6, 8, 8, 8),
    Maker.add: (17, 20, 20, 20, 20),
    Maker.subtract: (17, 22, 22, 22, 22),
    Maker.compare: (7, 6, 5, 5, 5),
    Maker.sort: (10, 30, 16, 16, 16),
    Maker.days: (4, 2, 2, 2, 2),
    Maker.person: (6, 2, 14, 14, 14),
    Maker.not_told: (0.5, 0.5, 0.5, 0.5, 0.5),
}
"""The weight of each kind of exchange in each phase of the training: first hard kinds more than easy ones, then mainly
the kinds that are learnt last, then those with errors left. The phases of tools keep all of that up."""
WITHOUT_TOOL: Final[Mapping[str, Callable[[Maker], Exchange]]] = {"get_weather": Maker.weather, "add": Maker.add}
"""Tool -> the exchange that it replaces."""


def conversations(seed: str, *, held_out: bool = False, phase: int = 0) -> Iterator[Conversation]:
    """Yield endless conversations of a training *phase*; the same *seed* gives the same ones."""
    maker = Maker(Random(seed), held_out=held_out, phase=phase)
    while True:
        yield maker.conversation()


def _small(text: str) -> str:
    """Return *text* with a small first letter, unless its first word keeps its capital."""
    first = text.split()[0]
    return text if first in ("I", "I'm", "JSON", "JSON:") or first.isupper() else text[0].lower() + text[1:]
