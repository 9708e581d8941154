"""What the demo model's conversations are made of: wordings and values, each list once. Knows no grammar and no chance.

A `Wording` has the sentences of one request, those of training and those that are held out for the evaluation. Braces
are places for values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Wording:
    """How one thing can be asked. No sentence is in both."""

    trained: tuple[str, ...]
    held_out: tuple[str, ...]


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.strip().splitlines())


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _wording(trained: str, held_out: str) -> Wording:
    return Wording(_lines(trained), _lines(held_out))


NAME: Final = "minisgl-demo"
WHO: Final = f"I am {NAME}, a tiny language model that comes with MiniSGL."
ABILITIES: Final = (
    "I can echo, spell, reverse, count, add, subtract, compare, sort, name days and months, remember what you tell me, "
    "write JSON and call tools."
)
UNKNOWN: Final = "I do not know that."

POLITE_BEFORE: Final = ("Please ", "Could you ", "Can you ", "Now ", "Okay, ", "Would you ")
"""What may come before a request that is an order; after it the order begins with a small letter."""
POLITE_AFTER: Final = (", please", " for me", " now")

GREETING: Final = _wording(
    """
    Hello
    Hello!
    Hi
    Hi!
    Hi there
    Hey
    Hey!
    Hello there
    Good morning
    Good morning!
    Good evening
    Good day
    Greetings
    Hello, how can you help me?
    Hi, I am new here
    """,
    """
    Hey there
    Good afternoon
    Hello, good morning
    Hi, good evening
    """,
)
GREETED: Final = ("Hello! How can I help you?", "Hello")

WHO_ARE_YOU: Final = _wording(
    """
    Who are you?
    What are you?
    What is your name?
    What's your name?
    Tell me who you are.
    Tell me about yourself.
    Are you a language model?
    Which model are you?
    What model is this?
    Who am I talking to?
    Introduce yourself.
    What is MiniSGL?
    Are you a human?
    Hi, who are you?
    Hello, what are you?
    What is this?
    """,
    """
    Tell me what you are.
    Hello, who are you?
    What kind of model are you?
    Tell me your name.
    """,
)
WHAT_CAN_YOU_DO: Final = _wording(
    """
    What can you do?
    What can you do for me?
    How can you help me?
    Help
    Help me
    What are you able to do?
    Tell me what you can do.
    What do you know?
    What can I ask you?
    List what you can do.
    What are you good at?
    """,
    """
    What can I do with you?
    Tell me how you can help me.
    What can you help me with?
    """,
)
HOW_ARE_YOU: Final = _wording(
    """
    How are you?
    How are you today?
    How do you do?
    How is it going?
    Are you well?
    Hi, how are you?
    How do you feel?
    """,
    """
    Hello, how are you?
    How are you doing today?
    """,
)
FINE: Final = ("I am fine, thank you.", "Fine")
THANKS: Final = _wording(
    """
    Thanks
    Thanks!
    Thank you
    Thank you!
    Thank you very much
    Thanks a lot
    Great, thanks
    Okay, thank you
    """,
    """
    Many thanks
    Great, thank you
    """,
)
WELCOME: Final = ("You are welcome.", "Welcome")
BYE: Final = _wording(
    """
    Bye
    Bye!
    Goodbye
    Goodbye!
    See you
    See you later
    Good night
    Thanks, bye
    I have to go now
    """,
    """
    Thanks, goodbye
    Thank you, bye
    """,
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
    Repeat after me: {text}
    Repeat this: {text}
    Repeat: {text}
    Echo: {text}
    Echo this: {text}
    Say: {text}
    Say this: {text}
    Say after me: {text}
    Say exactly this: {text}
    Repeat these words: {text}
    Repeat exactly: {text}
    Repeat what I say: {text}
    Write this: {text}
    Copy this: {text}
    Copy: {text}
    Repeat the following: {text}
    Echo the following: {text}
    Say "{text}"
    Repeat "{text}"
    Repeat after me "{text}"
    Echo "{text}"
    """,
    """
    Say the following: {text}
    Copy the following: {text}
    Repeat these words after me: {text}
    Echo these words: {text}
    Copy exactly: {text}
    Copy "{text}"
    """,
)
SPELL: Final = _wording(
    """
    Spell {word}
    Spell {word}.
    Spell the word {word}.
    Spell the word "{word}".
    Spell "{word}".
    Spell: {word}
    Spell this word: {word}
    How do you spell {word}?
    How is {word} spelled?
    How is the word {word} spelled?
    What are the letters of {word}?
    Write the letters of {word}.
    Give me the letters of {word}.
    Write {word} letter by letter.
    Spell {word} with spaces.
    Spell out {word}.
    Spell {word} letter by letter.
    Tell me how to spell {word}.
    """,
    """
    How do you spell the word {word}?
    Spell out the word {word}.
    Give me the letters of the word {word}.
    Write the word {word} letter by letter.
    What are the letters of the word {word}?
    """,
)
REVERSE: Final = _wording(
    """
    Reverse {word}
    Reverse {word}.
    Reverse the word {word}.
    Reverse the word "{word}".
    Reverse "{word}".
    Reverse: {word}
    Reverse this word: {word}
    Write {word} backwards.
    Say {word} backwards.
    What is {word} backwards?
    What is {word} reversed?
    How do you write {word} backwards?
    Write the word {word} in reverse.
    Turn {word} around.
    Give me {word} backwards.
    Spell {word} backwards without spaces.
    Reverse the letters of {word}.
    """,
    """
    Write the word {word} backwards.
    What is the word {word} reversed?
    Give me the word {word} in reverse.
    Turn the word {word} around.
    Reverse the letters of the word {word}.
    """,
)
COUNT: Final = _wording(
    """
    Count from {first} to {last}.
    Count from {first} to {last}
    Count {first} to {last}.
    Count: {first} to {last}
    Write the numbers from {first} to {last}.
    List the numbers from {first} to {last}.
    Give me the numbers from {first} to {last}.
    List all numbers from {first} to {last}.
    Start at {first} and count to {last}.
    Start with {first} and stop at {last}.
    What are the numbers from {first} to {last}?
    Say the numbers {first} to {last}.
    Numbers from {first} to {last}
    """,
    """
    Say the numbers from {first} to {last}.
    Write all numbers from {first} to {last}.
    Start at {first} and stop at {last}.
    Give me all numbers from {first} to {last}.
    """,
)
COUNT_TO: Final = _wording(
    """
    Count to {last}.
    Count up to {last}.
    Count to {last}
    Can you count to {last}?
    List the numbers up to {last}.
    Write the numbers up to {last}.
    Let me hear you count to {last}.
    """,
    """
    Give me the numbers up to {last}.
    Let me hear you count up to {last}.
    """,
)
COUNT_DOWN: Final = _wording(
    """
    Count down from {first} to {last}.
    Count backwards from {first} to {last}.
    Count down: {first} to {last}
    Start at {first} and count down to {last}.
    List the numbers from {first} down to {last}.
    Write the numbers from {first} down to {last}.
    Count from {first} down to {last}.
    """,
    """
    Give me the numbers from {first} down to {last}.
    Start at {first} and count backwards to {last}.
    Say the numbers from {first} down to {last}.
    """,
)
ADD: Final = _wording(
    """
    What is {a} + {b}?
    What is {a} plus {b}?
    {a} + {b}
    {a} + {b} =
    {a}+{b}
    {a}+{b}=
    What is {a}+{b}?
    How much is {a}+{b}?
    {a} + {b}?
    {a} plus {b}
    Add {a} and {b}.
    Add {b} to {a}.
    What's {a} + {b}?
    Calculate {a} + {b}.
    Compute {a} + {b}
    How much is {a} + {b}?
    How much is {a} plus {b}?
    Sum {a} and {b}.
    What is the sum of {a} and {b}?
    Tell me {a} + {b}.
    """,
    """
    Calculate {a} plus {b}.
    Tell me the sum of {a} and {b}.
    What's {a} plus {b}?
    How much is the sum of {a} and {b}?
    Compute {a} plus {b}.
    """,
)
SUBTRACT: Final = _wording(
    """
    What is {a} - {b}?
    What is {a} minus {b}?
    {a} - {b}
    {a} - {b} =
    {a}-{b}
    {a}-{b}=
    What is {a}-{b}?
    How much is {a}-{b}?
    {a} - {b}?
    {a} minus {b}
    Subtract {b} from {a}.
    What's {a} - {b}?
    Calculate {a} - {b}.
    Compute {a} - {b}
    How much is {a} - {b}?
    How much is {a} minus {b}?
    Take {b} from {a}.
    Take {b} away from {a}.
    Tell me {a} - {b}.
    """,
    """
    Calculate {a} minus {b}.
    What's {a} minus {b}?
    Compute {a} minus {b}.
    Tell me {a} minus {b}.
    """,
)
LARGER: Final = _wording(
    """
    Which is larger, {a} or {b}?
    Which is bigger, {a} or {b}?
    Which is greater, {a} or {b}?
    Which number is larger, {a} or {b}?
    Which number is bigger: {a} or {b}?
    What is larger, {a} or {b}?
    What is more, {a} or {b}?
    Compare {a} and {b}. Which is larger?
    Tell me the larger of {a} and {b}.
    Which of {a} and {b} is larger?
    Which of {a} and {b} is bigger?
    The larger of {a} and {b}?
    """,
    """
    What is bigger, {a} or {b}?
    Which number is greater, {a} or {b}?
    Tell me the bigger of {a} and {b}.
    Which of {a} and {b} is greater?
    """,
)
SMALLER: Final = _wording(
    """
    Which is smaller, {a} or {b}?
    Which is less, {a} or {b}?
    Which number is smaller, {a} or {b}?
    Which number is less: {a} or {b}?
    What is smaller, {a} or {b}?
    Compare {a} and {b}. Which is smaller?
    Tell me the smaller of {a} and {b}.
    Which of {a} and {b} is smaller?
    The smaller of {a} and {b}?
    """,
    """
    What is less, {a} or {b}?
    Which of {a} and {b} is less?
    Compare {a} and {b}. Which number is smaller?
    """,
)
SORT: Final = _wording(
    """
    Sort {numbers}
    Sort {numbers}.
    Sort: {numbers}
    Sort these numbers: {numbers}
    Sort the numbers {numbers}.
    Sort the following numbers: {numbers}
    Put these numbers in order: {numbers}
    Put {numbers} in order.
    Order these numbers: {numbers}
    Order {numbers}.
    Sort {numbers} from small to large.
    Sort from small to large: {numbers}
    Sort in ascending order: {numbers}
    Write these numbers in order: {numbers}
    Arrange {numbers} in order.
    """,
    """
    Order the numbers {numbers}.
    Put the following numbers in order: {numbers}
    Order from small to large: {numbers}
    Arrange these numbers: {numbers}
    """,
)
SORT_DOWN: Final = _wording(
    """
    Sort {numbers} from large to small.
    Sort from large to small: {numbers}
    Sort in descending order: {numbers}
    Sort these numbers from large to small: {numbers}
    Put these numbers in descending order: {numbers}
    Order {numbers} from large to small.
    Sort backwards: {numbers}
    """,
    """
    Order these numbers from large to small: {numbers}
    Put {numbers} in descending order.
    """,
)
AFTER: Final = _wording(
    """
    What {kind} comes after {it}?
    Which {kind} comes after {it}?
    What {kind} is after {it}?
    Which {kind} is after {it}?
    What comes after {it}?
    Which {kind} follows {it}?
    What is the {kind} after {it}?
    Tell me the {kind} after {it}.
    Name the {kind} after {it}.
    What is the next {kind} after {it}?
    The {kind} after {it}?
    What follows {it}?
    """,
    """
    What {kind} follows {it}?
    Name the {kind} that comes after {it}.
    Tell me what comes after {it}.
    Which is the {kind} after {it}?
    """,
)
BEFORE: Final = _wording(
    """
    What {kind} comes before {it}?
    Which {kind} comes before {it}?
    What {kind} is before {it}?
    Which {kind} is before {it}?
    What comes before {it}?
    What is the {kind} before {it}?
    Tell me the {kind} before {it}.
    Name the {kind} before {it}.
    What was the {kind} before {it}?
    The {kind} before {it}?
    What is before {it}?
    """,
    """
    Name the {kind} that comes before {it}.
    Tell me what comes before {it}.
    Which is the {kind} before {it}?
    """,
)
TOMORROW: Final = _wording(
    """
    If today is {it}, what day is tomorrow?
    Today is {it}. What day is tomorrow?
    What day is tomorrow if today is {it}?
    It is {it}. What is tomorrow?
    """,
    """
    Today is {it}. What is tomorrow?
    If it is {it} today, what day is tomorrow?
    """,
)
YESTERDAY: Final = _wording(
    """
    If today is {it}, what day was yesterday?
    Today is {it}. What day was yesterday?
    What day was yesterday if today is {it}?
    It is {it}. What was yesterday?
    """,
    """
    Today is {it}. What was yesterday?
    If it is {it} today, what day was yesterday?
    """,
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
    Call me {name}.
    Hi, I am {name}.
    Hello, my name is {name}.
    Hi, my name is {name}.
    You can call me {name}.
    Please call me {name}.
    The name is {name}.
    People call me {name}.
    Remember my name: {name}
    Remember that my name is {name}.
    """,
    """
    Hello, I am {name}.
    My friends call me {name}.
    Remember that I am {name}.
    Hi, you can call me {name}.
    """,
)
ASK_NAME: Final = _wording(
    """
    What is my name?
    What's my name?
    Who am I?
    Do you know my name?
    Do you remember my name?
    Tell me my name.
    What was my name?
    Say my name.
    Can you tell me my name?
    What did I say my name is?
    Which name did I tell you?
    """,
    """
    Can you remember my name?
    What did I say my name was?
    Do you know who I am?
    Tell me what my name is.
    """,
)
TELL_COLOR: Final = _wording(
    """
    My favourite {color_word} is {color}.
    My favorite {color_word} is {color}.
    The {color_word} I like most is {color}.
    I like the {color_word} {color}.
    I like {color} best.
    My best {color_word} is {color}.
    Remember that my favourite {color_word} is {color}.
    Remember that my favorite {color_word} is {color}.
    Remember my favourite {color_word}: {color}
    The best {color_word} is {color}.
    I love the {color_word} {color}.
    """,
    """
    The {color_word} I love most is {color}.
    I like the {color_word} {color} best.
    Remember my favorite {color_word}, {color}.
    """,
)
ASK_COLOR: Final = _wording(
    """
    What is my favourite {color_word}?
    What is my favorite {color_word}?
    What's my favourite {color_word}?
    Which {color_word} do I like?
    Which {color_word} do I like most?
    Do you remember my favourite {color_word}?
    Do you remember my favorite {color_word}?
    Do you know my favourite {color_word}?
    Tell me my favorite {color_word}.
    What {color_word} do I like best?
    Which {color_word} is my favourite?
    What was my favorite {color_word}?
    """,
    """
    What {color_word} do I like most?
    Tell me which {color_word} I like.
    Which {color_word} did I say I like?
    Tell me what my favorite {color_word} is.
    """,
)
TELL_NUMBER: Final = _wording(
    """
    Remember the number {number}.
    Remember this number: {number}
    My number is {number}.
    Keep the number {number} in mind.
    Please remember {number}.
    Remember {number}.
    My lucky number is {number}.
    The number is {number}.
    Remember that my number is {number}.
    The secret number is {number}.
    """,
    """
    Remember that the number is {number}.
    Remember my number: {number}
    Keep {number} in mind.
    """,
)
ASK_NUMBER: Final = _wording(
    """
    What was the number?
    What is the number?
    What is my number?
    Which number did I tell you?
    What number did I tell you?
    Do you remember the number?
    Tell me the number.
    What number did I say?
    Do you remember my number?
    What was my number?
    Which number did you remember?
    What is my lucky number?
    What is the secret number?
    """,
    """
    Which number did I say?
    Can you remember the number?
    Tell me my number.
    What was the number I told you?
    """,
)
DESCRIBED: Final = _wording(
    """
    Write a JSON object for {person}.
    Make a JSON object for {person}.
    JSON for {person}
    Give me JSON for {person}.
    Write JSON: {person}
    Write this as JSON: {person}
    Turn this into JSON: {person}
    Describe {person} as JSON.
    Write {person} as a JSON object.
    Give me a JSON object on one line for {person}.
    Make JSON of this: {person}
    As JSON: {person}
    Create a JSON object: {person}
    Convert to JSON: {person}
    """,
    """
    Make JSON for {person}.
    Turn this into a JSON object: {person}
    Describe this as JSON: {person}
    Create JSON on one line for {person}.
    Convert this to a JSON object: {person}
    """,
)
PERSON_PARTS: Final = {
    "age": Wording(("{age} years old", "age {age}", "aged {age}", "who is {age}"), ("who is {age} years old",)),
    "city": Wording(
        ("from {city}", "living in {city}", "who lives in {city}", "city {city}"), ("living now in {city}",)
    ),
    "job": Wording(("a {job}", "who is a {job}", "job {job}", "working as a {job}"), ("who works as a {job}",)),
}
WEATHER: Final = _wording(
    """
    What is the weather in {city}?
    What's the weather in {city}?
    What is the weather like in {city}?
    How is the weather in {city}?
    How is the weather in {city} today?
    Tell me the weather in {city}.
    Weather in {city}
    Weather in {city}?
    Get the weather in {city}.
    Get the weather for {city}.
    Is it cold in {city}?
    Is it warm in {city}?
    Does it rain in {city}?
    What will the weather be in {city}?
    I am in {city}. What is the weather?
    """,
    """
    What's the weather like in {city}?
    Tell me how the weather is in {city}.
    What is the weather in {city} today?
    Get me the weather in {city}.
    """,
)
QUESTIONS: Final = _wording(
    """
    What is the capital of {topic}?
    Who wrote {topic}?
    Why is the sky so high?
    Tell me a joke.
    Write a poem about {topic}.
    What is the meaning of life?
    How do I cook {topic}?
    Who is the president?
    What is {topic}?
    Where is {topic}?
    Who is {topic}?
    When was {topic} born?
    Explain {topic} to me.
    How old is {topic}?
    How does {topic} work?
    Translate {topic} into French.
    Write a story about {topic}.
    What do you think about {topic}?
    Who made {topic}?
    How far is {topic} from here?
    What time is it?
    What day is it today?
    Where do you live?
    How many people live in {topic}?
    Why do cats like {topic}?
    Tell me about {topic}.
    What is the best {topic}?
    Is {topic} good?
    Who won the game?
    Write code for {topic}.
    What does {topic} mean?
    Which {topic} should I buy?
    Do you like {topic}?
    How tall is {topic}?
    Give me a recipe for {topic}.
    """,
    """
    Explain how {topic} works.
    Where was {topic} born?
    Who made the best {topic}?
    Tell me a story about {topic}.
    Why is {topic} good?
    How do I buy {topic}?
    """,
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
