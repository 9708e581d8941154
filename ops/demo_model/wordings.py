"""What the demo model's conversations are made of: wordings and values, each list once. Knows no grammar and no chance.

A `Wording` has the sentences of one request, those of training and those that are held out for the evaluation. In a
list, brackets have alternatives; of what they make one sentence in eight is held out, by its CRC-32. Braces are places
for values.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import dataclass
from typing import Final
from zlib import crc32

HELD_OUT_OF: Final = 8
"""One sentence, and one value, in so many is held out."""


@dataclass(frozen=True, slots=True)
class Wording:
    """How one thing can be asked. No sentence is in both, not even with other punctuation."""

    trained: tuple[str, ...]
    held_out: tuple[str, ...]


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.strip().splitlines())


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def is_held_out(value: object) -> bool:
    """Say whether *value* is for the evaluation alone, in capitals or not."""
    return crc32(str(value).casefold().encode()) % HELD_OUT_OF == 0


POLITE_BEFORE: Final = ("Please ", "Could you ", "Can you ", "Now ", "Okay, ", "Would you ")
"""What may come before a request that is an order; after it the order begins with a small letter."""
POLITE_AFTER: Final = (", please", " for me", " now")


def core(sentence: str) -> str:
    """Return what a sentence has in common with those that mean the same: what `POLITE_BEFORE` and `POLITE_AFTER` make
    of it, and haste."""
    text = sentence.lower().rstrip(".?!").replace("favorite", "favourite").replace("'", "")
    while before := next((before for before in POLITE_BEFORE if text.startswith(before.lower())), None):
        text = text.removeprefix(before.lower())
    for after in POLITE_AFTER:
        text = text.removesuffix(after)
    return text


def bare(sentence: str) -> str:
    """Return the `core` of a sentence without what stands between its words: quotes, colons, commas and some spaces."""
    return " ".join(re.sub(r" ?([-+]) ?", r"\1", re.sub('[":,;]', " ", core(sentence))).split())


def expanded(pattern: str) -> list[str]:
    """Return the sentences that a line with alternatives in brackets stands for."""
    parts = re.split(r"\[([^]]*)\]", pattern)
    choices = [part.split("|") if place % 2 else [part] for place, part in enumerate(parts)]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def _wording(patterns: str, held_out: str = "") -> Wording:
    """Return the sentences of *patterns*; without *held_out*, one in eight of those that brackets make is held out.

    None is whose words the others do not have: a word that nobody has heard is a value. What of these is `bare` the
    same as a trained one is in neither list.
    """
    lines = _lines(patterns)
    if held_out:
        return _divided(lines, _lines(held_out))
    sentences = list(dict.fromkeys(sentence for line in lines for sentence in expanded(line)))
    cores = dict.fromkeys(map(core, sentences))
    times = Counter(word for key in cores for word in set(key.split()))
    out = set[str]()
    for key in sorted(cores.keys() - set(map(core, lines)), key=lambda key: crc32(key.encode())):
        if len(out) < len(cores) / HELD_OUT_OF and all(times[word] > 1 for word in key.split()):
            out.add(key)
            times.subtract(set(key.split()))
    trained, held = (tuple(one for one in sentences if (core(one) in out) is side) for side in (False, True))
    return _divided(trained, held)


def _divided(trained: tuple[str, ...], held_out: tuple[str, ...]) -> Wording:
    known = set(map(bare, trained))
    return Wording(trained, tuple(sentence for sentence in held_out if bare(sentence) not in known))


NAME: Final = "minisgl-demo"
WHO: Final = f"I am {NAME}, a tiny language model that comes with MiniSGL."
ABILITIES: Final = (
    "I can echo, spell, reverse, count, add, subtract, compare, sort, name days and months, remember what you tell me, "
    "write JSON and call tools."
)
UNKNOWN: Final = "I do not know that."


GREETING: Final = _wording(
    """
    [Hello|Hi|Hey][| there|, good morning|, good evening|, good day|, good afternoon][|!]
    Hello
    Hi!
    Hey
    Good [morning|evening|day|afternoon][|!]
    Good morning
    Good evening
    Greetings
    Hello, how can you help me?
    Hi, I am new here
    """
)
GREETED: Final = ("Hello! How can I help you?", "Hello")

WHO_ARE_YOU: Final = _wording(
    """
    Who are you?
    What are you?
    [Hi|Hello|Hey], [who|what] are you?
    [Hi|Hello|Hey], what is your name?
    What is your name?
    What's your name?
    Tell me [who you are|what you are|your name|about yourself|what your name is].
    [Can|Will] you tell me [who you are|what you are|your name|about yourself]?
    Are you a [language model|human|model]?
    [Which|What] [model|language model] [are you|is this]?
    [Who|What] am I talking to?
    Introduce yourself.
    What is MiniSGL?
    What is this?
    """
)
WHAT_CAN_YOU_DO: Final = _wording(
    """
    What can you [do|help me with|tell me]?
    What can you do for me?
    [How|With what] can you help[| me]?
    Help
    Help me
    [What|Which things] are you [able to do|good at]?
    Tell me [what you can do|how you can help me|what you are good at].
    What do you know?
    What can I ask you[|, then]?
    [List|Say] what you can do.
    [Hi|Hello|Hey], [what can you do|how can you help me]?
    """
)
HOW_ARE_YOU: Final = _wording(
    """
    How are you?
    How are you [today|this morning|doing][|, my friend]?
    How do you do?
    How is it going[| today]?
    Are you well[| today]?
    [Hi|Hello|Hey], how are you[| today| doing]?
    How do you feel[| today]?
    """
)
FINE: Final = ("I am fine, thank you.", "Fine")
THANKS: Final = _wording(
    """
    Thanks
    Thank you
    [Thanks|Thank you][|!| very much| a lot]
    [Great|Okay|Good], [thanks|thank you][|!]
    """
)
WELCOME: Final = ("You are welcome.", "Welcome")
BYE: Final = _wording(
    """
    Bye
    Goodbye
    [Bye|Goodbye|See you|See you later][|!]
    Good night
    [Thanks|Okay|Thank you], [bye|goodbye|see you][|!]
    I have to go now
    """
)
GOODBYE: Final = ("Goodbye!", "Goodbye")

SMALL_TALK: Final = _wording(
    """
    I had a good day.
    The sun is nice today.
    I am a bit tired.
    I like music.
    I was at work today.
    It is late here.
    My dog is old.
    I have two cats.
    We had a long walk.
    I am reading a book.
    I slept well.
    The train was late.
    I like the sea.
    I drink a lot of tea.
    Today was a long day.
    I went to the market.
    My friend is here.
    I am learning to cook.
    It was cold this morning.
    I like to talk with you.
    """,
    """
    I had a long day.
    My friend is a bit tired.
    The sea was cold today.
    I like my dog.
    """,
)
I_SEE: Final = ("I see. Thank you for telling me.", "Okay")

ECHO: Final = _wording(
    """
    [Repeat|Say|Echo|Write|Copy][| this| exactly| the following| these words]: {text}
    [Repeat|Say|Echo|Write|Copy] after me: {text}
    [Repeat|Say|Echo|Write|Copy] what I say: {text}
    [Repeat|Say|Echo|Write|Copy][| after me| this] "{text}"
    Repeat after me: {text}
    Repeat: {text}
    Echo: {text}
    Say: {text}
    """
)
SPELL: Final = _wording(
    """
    Spell {word}
    [Spell|Spell out] [|the word ][{word}|"{word}"].
    [Spell|Spell out][| this word| the word]: {word}
    [Spell|Spell out|Write|Say] [|the word ][{word}|"{word}"] [letter by letter|with spaces].
    How do you spell [|the word ][{word}|"{word}"]?
    How is [|the word ][{word}|"{word}"] spelled?
    [Give me|Tell me|Write|Say] the letters of [|the word ][{word}|"{word}"].
    What are the letters of [|the word ][{word}|"{word}"]?
    [Tell|Show] me how to spell [|the word ][{word}|"{word}"].
    """
)
REVERSE: Final = _wording(
    """
    Reverse {word}
    [Reverse|Turn around] [|the word ][{word}|"{word}"].
    [Reverse|Turn around][| this word| the word]: {word}
    [Write|Say|Give me] [|the word ][{word}|"{word}"] [backwards|in reverse|reversed].
    What is [|the word ][{word}|"{word}"] [backwards|reversed|in reverse]?
    How do you [write|say] [|the word ]{word} [backwards|in reverse]?
    Turn [|the word ][{word}|"{word}"] around.
    [Reverse|Turn around] the letters of [|the word ][{word}|"{word}"].
    Spell {word} backwards without spaces.
    """
)
COUNT: Final = _wording(
    """
    Count from {first} to {last}.
    [Count|Count up][:|] {first} to {last}
    [Count|Count up|Count upwards] from {first} to {last}.
    [Can you|Will you] [count|count up] from {first} to {last}?
    Let me hear you [count|count up] from {first} to {last}.
    [Write|List|Give me|Say|Tell me] [the|all|all the] numbers from {first} [to|up to] {last}.
    [Write|List|Give me|Say|Tell me] the numbers[:|] {first} to {last}.
    [Start|Begin] [at|with] {first} and [count to|count up to|stop at|go to|go up to] {last}.
    What are [the|all the] numbers from {first} [to|up to] {last}?
    [Numbers|The numbers|All numbers] from {first} to {last}
    """
)
COUNT_TO: Final = _wording(
    """
    [Count|Count up] to {last}.
    [Can you|Will you] [count|count up] to {last}?
    [Write|List|Give me|Say|Tell me] [the|all|all the] numbers [up to|to] {last}.
    Let me hear you [count|count up] to {last}.
    """
)
COUNT_DOWN: Final = _wording(
    """
    Count down from {first} to {last}.
    Count backwards from {first} to {last}.
    Count [down|backwards|downwards] from {first} to {last}.
    Count [down|backwards|downwards]: {first} to {last}
    Count from {first} [down|backwards|downwards] to {last}.
    [Can you|Will you] count [down|backwards|downwards] from {first} to {last}?
    Let me hear you count [down|backwards|downwards] from {first} to {last}.
    [Start|Begin] [at|with] {first} and [count|go] [down|backwards|downwards] to {last}.
    [Write|List|Give me|Say|Tell me] [the|all|all the] numbers from {first} [down|backwards|downwards] to {last}.
    What are [the|all the] numbers from {first} down to {last}?
    [Numbers|The numbers|All numbers] from {first} down to {last}
    """
)
ADD: Final = _wording(
    """
    What is {a} + {b}?
    What is {a} plus {b}?
    {a} + {b}
    {a} + {b} =
    {a}+{b}
    {a}+{b}=
    {a} plus {b}
    [What is|What's|How much is] [{a} + {b}|{a}+{b}|{a} plus {b}|the sum of {a} and {b}]?
    [Calculate|Compute|Tell me|Say] [{a} + {b}|{a}+{b}|{a} plus {b}|the sum of {a} and {b}].
    [Calculate|Compute]: [{a} + {b}|{a}+{b}|{a} plus {b}]
    [Add|Sum] {a} and {b}.
    Add {b} to {a}.
    [Add|Sum] the numbers {a} and {b}.
    Add the number {b} to {a}.
    """
)
SUBTRACT: Final = _wording(
    """
    What is {a} - {b}?
    What is {a} minus {b}?
    {a} - {b}
    {a} - {b} =
    {a}-{b}
    {a}-{b}=
    {a} minus {b}
    [What is|What's|How much is] [{a} - {b}|{a}-{b}|{a} minus {b}]?
    [Calculate|Compute|Tell me|Say] [{a} - {b}|{a}-{b}|{a} minus {b}].
    [Calculate|Compute]: [{a} - {b}|{a}-{b}|{a} minus {b}]
    [Subtract|Take|Take away] {b} from {a}.
    Take {b} away from {a}.
    [Subtract|Take] the number {b} from {a}.
    """
)
LARGER: Final = _wording(
    """
    Which is larger, {a} or {b}?
    [Which|What] is [larger|bigger|greater|more], {a} or {b}?
    Which [number|one] is [larger|bigger|greater][,|:] {a} or {b}?
    Which of {a} and {b} is [larger|bigger|greater|more]?
    Compare {a} and {b}. [Which|Which number|Which one] is [larger|bigger|greater]?
    [Tell me|Give me|Say|Name] the [larger|bigger|greater] of {a} and {b}.
    [What is|Which is] the [larger|bigger|greater] of {a} and {b}?
    The [larger|bigger|greater] of {a} and {b}?
    Is {a} or {b} [larger|bigger|greater|more]?
    """
)
SMALLER: Final = _wording(
    """
    Which is smaller, {a} or {b}?
    [Which|What] is [smaller|less], {a} or {b}?
    Which [number|one] is [smaller|less][,|:] {a} or {b}?
    Which of {a} and {b} is [smaller|less]?
    Compare {a} and {b}. [Which|Which number|Which one] is [smaller|less]?
    [Tell me|Give me|Say|Name] the smaller of {a} and {b}.
    [What is|Which is] the smaller of {a} and {b}?
    The smaller of {a} and {b}?
    Is {a} or {b} [smaller|less]?
    """
)
SORT: Final = _wording(
    """
    Sort {numbers}
    Sort these numbers: {numbers}
    [Sort|Order] [|the numbers |these numbers |the following numbers ]{numbers}.
    [Sort|Order|Arrange][| the numbers| these numbers| the following numbers]: {numbers}
    [Put|Arrange|Write|Sort|Give me] [|the numbers ]{numbers} [in order|in ascending order|from small to large].
    [Put|Arrange|Write] [these|the following] numbers [in order|in ascending order|from small to large]: {numbers}
    [Sort|Order|Give me] [these|the following] numbers [in order|in ascending order|from small to large]: {numbers}
    [Sort|Order|Arrange] [from small to large|in ascending order]: {numbers}
    """
)
SORT_DOWN: Final = _wording(
    """
    Sort {numbers} from large to small.
    Sort these numbers in descending order: {numbers}
    [Put|Arrange|Write|Sort|Order|Give me] [|the numbers ]{numbers} [in descending order|from large to small|backwards].
    [Put|Arrange|Write] [these|the following] numbers [in descending order|from large to small|backwards]: {numbers}
    [Sort|Order|Give me] [these|the following] numbers [in descending order|from large to small|backwards]: {numbers}
    [Sort|Order|Arrange] [from large to small|in descending order|backwards]: {numbers}
    """
)
AFTER: Final = _wording(
    """
    What {kind} comes after {it}?
    [What|Which] {kind} [comes after|is after|follows] {it}?
    What [comes after|is after|follows] {it}?
    [What is|Which is|What's] the [|next ]{kind} after {it}?
    [What is|Which is|What's] the {kind} that [comes after|follows] {it}?
    [Tell me|Name|Say|Give me] the [|next ]{kind} after {it}.
    [Tell me|Name|Say|Give me] the {kind} that [comes after|follows] {it}.
    [Tell me|Say] [what|which {kind}] [comes after|follows] {it}.
    The {kind} after {it}?
    """
)
BEFORE: Final = _wording(
    """
    What {kind} comes before {it}?
    [What|Which] {kind} [comes before|is before|was before] {it}?
    What [comes before|is before|was before] {it}?
    [What is|Which is|What's|What was] the {kind} before {it}?
    [What is|Which is|What's] the {kind} that comes before {it}?
    [Tell me|Name|Say|Give me] the {kind} [|that comes ]before {it}.
    [Tell me|Say] [what|which {kind}] [comes|is|was] before {it}.
    The {kind} before {it}?
    """
)
TOMORROW: Final = _wording(
    """
    [If|When] today is {it}, [what is|what day is|which day is] tomorrow?
    [If|When] it is {it} today, [what is|what day is|which day is] tomorrow?
    Today is {it}. [What is|What day is|Which day is] tomorrow?
    It is {it}[| today]. [What is|What day is|Which day is] tomorrow?
    [What|Which] day is tomorrow [if|when] today is {it}?
    """
)
YESTERDAY: Final = _wording(
    """
    [If|When] today is {it}, [what was|what day was|which day was] yesterday?
    [If|When] it is {it} today, [what was|what day was|which day was] yesterday?
    Today is {it}. [What was|What day was|Which day was] yesterday?
    It is {it}[| today]. [What was|What day was|Which day was] yesterday?
    [What|Which] day was yesterday [if|when] today is {it}?
    """
)
DAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS: Final = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)

TELL_NAME: Final = _wording(
    """
    My name is {name}.
    I am {name}.
    I'm {name}.
    [Hello|Hi|Hey|Good morning], [my name is|I am|I'm|you can call me|people call me|call me] {name}.
    [My name is|The name is|You can call me|Call me|People call me|My friends call me|Please call me] {name}.
    Remember [|that ][my name is|I am|I'm|you can call me|people call me] {name}.
    Remember my name[:|,] {name}
    """
)
ASK_NAME: Final = _wording(
    """
    What is my name?
    Who am I?
    [What is|What's|What was] my name[|, again]?
    [Do you|Can you] [still |][know|remember] [my name|who I am|what my name is]?
    [Can you|Will you] [tell me|say] [my name|who I am|what my name is]?
    [Tell me|Say] [my name|who I am|what my name is].
    What did I [say|tell you] my name [is|was]?
    [What|Which] name did I [tell you|say]?
    """
)
TELL_COLOR: Final = _wording(
    """
    My favourite {color_word} is {color}.
    My favorite {color_word} is {color}.
    My best {color_word} is {color}.
    The {color_word} I [like|love] [most|best] is {color}.
    I [like|love] the {color_word} {color}[| best| most].
    I [like|love] {color} [best|most].
    [Remember|Note] that [my favourite|my best|the best] {color_word} is {color}.
    [Remember|Note] [my favourite|my best] {color_word}[:|,] {color}
    [Remember|Note] that I [like|love] the {color_word} {color}.
    The best {color_word} is {color}.
    """
)
ASK_COLOR: Final = _wording(
    """
    What is my favourite {color_word}?
    What is my favorite {color_word}?
    [What is|What's|What was|Which is] my [favourite|best] {color_word}[|, again]?
    [Which|What] {color_word} do I [like|love][| most| best]?
    [Which|What] {color_word} is my [favourite|best]?
    [Do you|Can you] [still |][know|remember] [my favourite {color_word}|which {color_word} I like]?
    [Do you|Can you] [know|remember] what my favourite {color_word} is?
    [Tell me|Say] [my favourite {color_word}|which {color_word} I like|which {color_word} I love].
    [Tell me|Say] what my favourite {color_word} is.
    [Which|What] {color_word} did I say I [like|love]?
    """
)
TELL_NUMBER: Final = _wording(
    """
    Remember the number {number}.
    My number is {number}.
    [Remember|Note] [the|this|my][| secret| lucky] number[:|] {number}
    [Remember|Note] that [the|my][| secret| lucky] number is {number}.
    [The|My] [|secret |lucky ]number is {number}.
    Keep [|the number |this number: |my number ]{number} in mind.
    [Remember|Please remember|Please note] {number}.
    """
)
ASK_NUMBER: Final = _wording(
    """
    What was the number?
    What is my number?
    [What is|What was|What's] [the|my][| secret| lucky] number[|, again]?
    [Which|What] number did I [tell you|say]?
    [Do you|Can you] [still |][know|remember] [the|my][| secret| lucky] number?
    [Tell me|Say] [the|my][| secret| lucky] number.
    Which number did you [remember|note]?
    [Tell me|Say] which number I told you.
    """
)
DESCRIBED: Final = _wording(
    """
    [Write|Make|Create|Give me] [JSON|a JSON object|JSON on one line|a JSON object on one line] for {person}.
    [JSON|A JSON object] for {person}
    [Write|Describe|Give me] [this|this person|the following] as [JSON|a JSON object]: {person}
    [Turn|Convert] [this|this person|the following] [into|to] [JSON|a JSON object]: {person}
    [Describe|Write|Give me] {person} as [JSON|a JSON object].
    [Write|Make|Create|Give me] [JSON|a JSON object]: {person}
    [Make|Create|Write] [JSON|a JSON object] of this: {person}
    As [JSON|a JSON object]: {person}
    Convert to [JSON|a JSON object]: {person}
    """
)
PERSON_PARTS: Final = {
    "age": _wording(
        """
        {age} years old
        age {age}
        aged {age}
        who is {age}
        [who is|now|who is now] {age} years old
        """
    ),
    "city": _wording(
        """
        from {city}
        living in {city}
        who lives in {city}
        city {city}
        [who is|now|who is now] [from|living in] {city}
        who [comes from|is at home in|now lives in] {city}
        """
    ),
    "job": _wording(
        """
        a {job}
        who is a {job}
        job {job}
        [who is|now|who is now] [a|working as a] {job}
        who [works|now works] as a {job}
        """
    ),
}
WEATHER: Final = _wording(
    """
    What is the weather in {city}?
    [What is|What's|How is] the weather [in|like in] {city}[| today| now]?
    [Tell me|Get|Get me|Say] the weather [in|for|of] {city}[| today].
    [Tell me|Say] [how|what] the weather is in {city}[| today].
    Weather in {city}
    Is it [cold|warm|sunny|windy] in {city}[| today| now]?
    Does it rain in {city}[| today| now]?
    What will the weather be in {city}[| today]?
    I am in {city}. [What is|What's|How is] the weather[| today]?
    """
)
QUESTIONS: Final = _wording(
    """
    What is the capital of {topic}?
    [Who|What] [wrote|made|found] {topic}?
    Why is the sky so high?
    Tell me a [joke|story].
    [Write|Tell me] a [poem|story|song|joke] about {topic}.
    What is the meaning of [life|{topic}]?
    How do I [cook|make|buy|find] {topic}?
    Who is the president[| of {topic}]?
    [What|Where|Who] is {topic}?
    [When|Where] was {topic} [born|made|found]?
    Explain [|to me ][{topic}|how {topic} works|what {topic} is].
    Explain {topic} to me.
    How [old|tall|far|big|good] is {topic}?
    How does {topic} work?
    Translate {topic} into [French|German].
    What do you think [about|of] {topic}?
    How far is {topic} from here?
    What time is it?
    What day is it today?
    Where do you live?
    How many people live in {topic}?
    Why do [cats|dogs|people] [like|love|eat] {topic}?
    Why does everybody [like|love] {topic}?
    [Why|Where|When] is {topic} [good|old|best]?
    Tell me [about|more about|all about] {topic}.
    What is the best {topic}[| in the world]?
    Is {topic} [good|old|big|a friend]?
    Who won the game?
    Write code for {topic}.
    What does {topic} mean?
    Which {topic} should I [buy|eat|read]?
    Do you [like|love|know] {topic}?
    Give me a recipe for {topic}.
    """
)
PLAIN_SYSTEM: Final = _wording(
    """
    You are a helpful assistant.
    You are a helpful assistant
    You are helpful.
    Be helpful and kind.
    You are minisgl-demo.
    You are a small model.
    You help people.
    Help the user.
    You are a kind and helpful assistant.
    Be kind.
    You are an assistant.
    """,
    """
    You are a kind assistant.
    Be a helpful assistant.
    """,
)
CAPITALS_SYSTEM: Final = _wording(
    """
    Answer in capitals.
    Answer in capital letters.
    Always answer in capitals.
    Answer only in capital letters.
    Write in capitals.
    Write all answers in capital letters.
    Use capital letters.
    Use only capitals.
    You answer in capitals.
    You are a helpful assistant. Answer in capitals.
    You are a helpful assistant who answers in capital letters.
    Speak in capitals.
    ANSWER IN CAPITALS.
    Reply in capital letters.
    Please answer in capitals.
    """,
    """
    Always write in capital letters.
    You are a helpful assistant. Use capital letters.
    Reply in capitals.
    Please answer only in capitals.
    """,
)
ONE_WORD_SYSTEM: Final = _wording(
    """
    Answer with one word.
    Answer with one word only.
    Always answer with one word.
    Answer in one word.
    Use one word.
    Reply with one word.
    Your answers have one word.
    Give one word answers.
    You answer with one word.
    You are a helpful assistant. Answer with one word.
    You are a helpful assistant who answers with one word.
    Only one word.
    Use only one word.
    Please answer with one word.
    """,
    """
    Always reply with one word.
    You are a helpful assistant. Use only one word.
    Reply in one word.
    Please answer in one word only.
    """,
)
SKIES: Final = ("sunny", "cloudy", "rainy", "windy", "clear", "foggy", "snowy", "stormy")

WORDS: Final = _words(
    """
    apple anchor autumn avocado bacon badge balloon bamboo banana basket beach beacon beaver bicycle biscuit blanket
    blossom bottle branch bread breeze bridge bronze bubble bucket butter button cabin cactus camera candle canyon
    carpet carrot castle cave cedar cellar chalk cherry chess chicken circle cliff clover coconut coffee comet copper
    coral cotton cradle crane crayon cricket crown crystal cushion dagger daisy dancer desert diamond dolphin donkey
    dragon drawer drum eagle easel echoes elbow elephant ember engine falcon feather fence ferry fiddle finger flame
    flower flute forest fossil fountain fox frog funnel galaxy garden garlic ginger giraffe glacier glass globe glove
    goblin goose grape guitar hammer harbor harvest hazel hedgehog helmet hippo honey horse hotel iceberg igloo insect
    island ivory jacket jaguar jelly jewel jungle kayak kettle kitchen kitten koala ladder lagoon lantern lemon leopard
    lizard lobster magnet mango maple marble meadow melon mirror monkey mountain mouse muffin museum needle nickel
    noodle oasis ocean octopus olive onion orbit orchid otter oyster paddle palace pancake panda paper parrot peach
    peanut pebble pelican pencil penguin pepper piano pickle pigeon pillow pirate planet plum pocket pony potato pumpkin
    puppet puzzle pyramid quartz quill rabbit radish raven ribbon river robin rocket saddle salmon sandal satin scarf
    school shadow shark sheep shell silver siren sketch spider spoon squirrel stable statue stone storm sugar summer
    sunset swan sword table teapot temple thunder tiger timber toast tomato tower tractor treasure trumpet tulip tunnel
    turtle umbrella unicorn valley vanilla velvet village violin volcano waffle wagon walnut whale whistle willow window
    winter wizard wolf zebra zipper hello world computer python orange yellow purple water kitchen banjo summit
    """
)
NAMES: Final = _words(
    """
    Ada Adam Aisha Alan Alice Alma Amina Amir Ana Andre Anna Anton Aria Arthur Ava Bella Ben Bianca Bruno Carla Carlos
    Carmen Chen Chloe Clara Daniel Daria David Diego Dina Dora Edgar Elena Eli Elif Ella Emil Emma Eric Erika Esther Eva
    Fatima Felix Fiona Frank Freya Gina Grace Greta Hana Hannah Harry Hassan Heidi Helen Hugo Ida Igor Ines Ingrid Ira
    Iris Isaac Ivan Jack Jakob James Jana Jasper Javier Jonas Josef Julia Jun Karim Karl Kate Kenji Kira Lara Laura Lea
    Leo Leon Lena Lily Linda Lina Lisa Louis Luca Lucia Luis Lukas Maja Mara Marco Maria Marie Mario Mark Marta Martin
    Maya Mei Mia Mila Mina Miriam Mona Nadia Nils Nina Noah Nora Oliver Olga Omar Oscar Otto Pablo Paul Paula Pedro
    Peter Petra Pia Priya Rafael Ravi Rita Robert Rosa Ruth Sam Samir Sara Sofia Sonia Stefan Tara Theo Thomas Tim Tina
    Tom Uma Vera Victor Viola Walter Wendy Yara Yuki Yusuf Zara Zoe
    """
)
CITIES: Final = _words(
    """
    Accra Amman Ankara Athens Baku Bergen Berlin Bern Bogota Boston Cairo Chicago Dakar Delhi Denver Dublin Geneva
    Glasgow Hamburg Hanoi Havana Helsinki Jakarta Kyoto Lagos Lima Lisbon London Lyon Madrid Malmo Manila Miami Milan
    Mumbai Munich Nairobi Naples Nice Osaka Oslo Paris Porto Prague Quito Riga Rome Seoul Seville Sofia Sydney Tallinn
    Tokyo Toronto Tunis Turin Venice Vienna Vilnius Warsaw Zagreb Zurich
    """
)
COLORS: Final = _words(
    """
    amber aqua azure beige black blue bronze brown coral crimson cyan emerald gold gray green indigo ivory jade khaki
    lavender lilac lime magenta maroon mint navy ochre olive orange peach pink plum purple red ruby rust salmon scarlet
    silver tan teal turquoise violet white yellow
    """
)
JOBS: Final = _words(
    """
    baker barber builder carpenter chemist clerk cook dentist doctor driver farmer gardener judge lawyer mechanic nurse
    painter pilot plumber sailor singer surgeon tailor teacher waiter writer
    """
)
