"""Builds the packaged sets in src/eyas/data/packaged from the texts in packaged_content.py; the same files come out every time.

    python tools/make_packaged_data.py

- conversations.jsonl: varied chat, one to four answers each, some with a system turn.
- word_problems.jsonl and word_problems_heldout.jsonl: grade-school word problems with worked answers. A problem is a kind, its
  numbers and its wording; no problem's numbers occur in both files with the same kind.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from packaged_content import (
    ADVICE,
    CONCEPTS,
    LETTERS,
    NAMES,
    PARAGRAPHS,
    PHRASES,
    PLACES,
    RECIPES,
    SNIPPETS,
    SYSTEMS,
    WORDS,
)

DATA = Path(__file__).parents[1] / "src" / "eyas" / "data" / "packaged"
Turns = list[tuple[str, str]]


def chat(turns: Turns, system: str | None = None) -> dict[str, object]:
    """Pairs of (question, answer) as messages."""
    messages = [{"role": "system", "content": system}] if system else []
    for question, answer in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages}


def bullets(items: list[str]) -> str:
    return "\n".join(f"- {item}" for item in items)


def numbered(items: list[str]) -> str:
    return "\n".join(f"{number}. {item}" for number, item in enumerate(items, 1))


def upper_first(text: str) -> str:
    return text[0].upper() + text[1:]


# ---------------------------------------------------------------- conversations


def concept_chats(rng: random.Random) -> Iterator[dict[str, object]]:
    for name, what, how, example, question, answer in CONCEPTS:
        ask = rng.choice(["What is {}?", "Can you explain {} to me?", "I keep hearing about {}. What does it mean?"])
        if name in ("tides", "the moon's phases"):
            ask = rng.choice(["What are {}?", "Can you explain {} to me?"])
        yield chat([(ask.format(name), f"{what} {how}"), ("Can you give me an example?", example), (question, answer)])
        yield chat([(f"Explain {name} in one sentence.", what)], rng.choice(SYSTEMS[2:4]))
        yield chat(
            [
                (
                    f"I have to explain {name} to my class tomorrow. What should I say?",
                    f"You could put it like this:\n\n{what} {how}\n\nThen give an example: {example[0].lower() if example.startswith(('A ', 'If ', 'When ', 'The ', 'To ', 'After ')) else example[0]}{example[1:]}",
                )
            ],
            SYSTEMS[1] if rng.random() < 0.4 else None,
        )
        yield chat(
            [
                (question, answer),
                (f"And what was {name} again?" if name != "tides" else "And what were tides again?", what),
            ]
        )


def recipe_chats(rng: random.Random) -> Iterator[dict[str, object]]:
    for dish, ingredients, steps, question, answer in RECIPES:
        yield chat([(f"How do I make {dish}?", f"Here is a simple way:\n\n{numbered(steps)}"), (question, answer)])
        yield chat(
            [
                (f"What do I need for {dish}?", f"For {dish} you need:\n\n{bullets(ingredients)}"),
                ("And how does it go from there?", numbered(steps)),
            ]
        )
        yield chat(
            [
                (
                    f"Give me a recipe for {dish} with ingredients and steps.",
                    f"**{upper_first(dish)}**\n\nIngredients:\n{bullets(ingredients)}\n\nSteps:\n{numbered(steps)}",
                )
            ],
            "You are a cook who writes short recipes." if rng.random() < 0.5 else None,
        )


def code_chats(rng: random.Random) -> Iterator[dict[str, object]]:
    for task, code, why, question, answer in SNIPPETS:
        block = f"```python\n{code}\n```"
        yield chat([(f"Write a Python function that {task}.", f"{block}\n\n{why}"), (question, answer)])
        yield chat([(f"What does this code do?\n\n{block}", f"It is a function that {task}. {why}")])
        yield chat(
            [
                (
                    f"Python: {imperative(task)}. Only code, please.",
                    block,
                )
            ],
            SYSTEMS[2],
        )


def imperative(task: str) -> str:
    """`retries a call` -> `retry a call`."""
    verb, rest = task.split(" ", 1)
    verb = verb[:-3] + "y" if verb.endswith("ies") else verb.removesuffix("s")
    return f"{verb} {rest}".replace("but keeps", "but keep")


def letter_chats(rng: random.Random) -> Iterator[dict[str, object]]:
    for kind, situation, text in LETTERS:
        for _ in range(2):
            name, boss, colleague = rng.sample(NAMES, 3)
            written = text.format(name=name, boss=boss, colleague=colleague)
            extra = f" My name is {name}."
            if "{boss}" in text:
                extra += f" It goes to {boss}."
            if "{colleague}" in text and "Hi {colleague}" not in text:
                extra += f" Mention {colleague}."
            if "Hi {colleague}" in text:
                extra += f" It goes to {colleague}."
            yield chat(
                [(f"Please write {kind}. The situation: {situation}.{extra}", written)],
                rng.choice([None, None, SYSTEMS[0]]),
            )


def advice_chats(rng: random.Random) -> Iterator[dict[str, object]]:
    for theme, tips in ADVICE:
        yield chat(
            [
                (f"How can I {theme}?", f"Here are a few things that help:\n\n{bullets(tips)}"),
                (
                    "Which one should I start with?",
                    f"Start with the first: {tips[0][0].lower()}{tips[0][1:]} It is the easiest to do today.",
                ),
            ]
        )
        yield chat(
            [(f"Give me two tips to {theme}.", numbered(tips[:2])), ("Two more, please.", numbered(tips[2:]))],
            rng.choice([None, SYSTEMS[3]]),
        )
        yield chat([(f"One tip to {theme}?", tips[rng.randrange(4)])], SYSTEMS[2])


def paragraph_chats(rng: random.Random) -> Iterator[dict[str, object]]:
    for text, summary, title in PARAGRAPHS:
        yield chat([(f"Summarise this in one sentence:\n\n{text}", summary), ("Now give it a title.", title)])
        sentences = [part if part.endswith(".") else part + "." for part in text.split(". ")]
        yield chat([(f"Turn this text into bullet points:\n\n{text}", bullets(sentences))])
        yield chat(
            [
                (
                    f"How many sentences does this text have, and what is it about?\n\n{text}",
                    f"It has {len(sentences)} sentences. {summary}",
                )
            ],
            rng.choice([None, SYSTEMS[4]]),
        )


def phrase_chats(rng: random.Random) -> Iterator[dict[str, object]]:
    languages = ("Spanish", "French", "German")
    for number, phrase in enumerate(PHRASES):
        english = phrase[0]
        yield chat(
            [
                (f'How do you say "{english}" in {language}?', f'"{english}" in {language} is "{phrase[1 + index]}".')
                for index, language in enumerate(languages)
            ]
        )
        language = number % 3
        yield chat(
            [(f"Translate to {languages[language]}: {english}", phrase[1 + language])],
            "You are a translator. Answer with the translation only.",
        )
    for index, language in enumerate(languages):
        chosen = rng.sample(PHRASES, 5)
        yield chat(
            [
                (
                    f"Make a small phrase list for a trip, English and {language}.",
                    bullets([f"{p[0]}: {p[1 + index]}" for p in chosen]),
                )
            ]
        )


def place_chats(rng: random.Random) -> Iterator[dict[str, object]]:
    for country, capital, water, known in PLACES:
        river = f"{capital} lies on {water}."
        yield chat(
            [
                (f"What is the capital of {country}?", f"The capital of {country} is {capital}."),
                ("Which river flows through it?", river),
                ("What is it known for?", f"{capital} is known for {known}."),
            ]
        )
        yield chat(
            [
                (
                    f"Tell me about {capital} in two sentences.",
                    f"{capital} is the capital of {country} and lies on {water}. It is known for {known}.",
                )
            ],
            rng.choice([None, SYSTEMS[1]]),
        )


def task_chats(rng: random.Random) -> Iterator[dict[str, object]]:
    """Small tasks with answers that are computed."""
    for _ in range(22):
        words = rng.sample(WORDS, rng.randint(4, 7))
        yield chat(
            [
                (f"Sort these words alphabetically: {', '.join(words)}", ", ".join(sorted(words))),
                ("Now the other way round.", ", ".join(sorted(words, reverse=True))),
            ]
        )
    for _ in range(14):
        word = rng.choice(WORDS)
        vowels = [letter for letter in word if letter in "aeiou"]
        yield chat(
            [
                (
                    f'How many vowels are in "{word}"?',
                    f'The word "{word}" has {len(vowels)} vowels: {", ".join(vowels)}.'
                    if len(vowels) != 1
                    else f'The word "{word}" has one vowel: {vowels[0]}.',
                ),
                ("And how many letters?", f"It has {len(word)} letters."),
            ]
        )
    for _ in range(14):
        celsius = rng.randrange(-20, 45)
        yield chat(
            [
                (
                    f"Convert {celsius} degrees Celsius to Fahrenheit.",
                    f"Multiply by 9/5 and add 32: {celsius} x 9/5 + 32 = {celsius * 9 / 5 + 32:g}. So {celsius} °C is {celsius * 9 / 5 + 32:g} °F.",
                )
            ],
            rng.choice([None, SYSTEMS[4]]),
        )
    for _ in range(14):
        kilometres = rng.randrange(2, 300)
        yield chat(
            [
                (
                    f"How many metres are {kilometres} kilometres?",
                    f"One kilometre is 1,000 metres, so {kilometres} kilometres are {kilometres * 1000:,} metres.",
                ),
                (
                    "And in centimetres?",
                    f"One metre is 100 centimetres, so that is {kilometres * 100_000:,} centimetres.",
                ),
            ]
        )
    for _ in range(16):
        people = rng.sample(NAMES, 3)
        ages = [rng.randrange(18, 80) for _ in people]
        rows = [{"name": n, "age": a} for n, a in zip(people, ages, strict=True)]
        text = "; ".join(f"{n} is {a}" for n, a in zip(people, ages, strict=True))
        oldest = max(rows, key=lambda r: r["age"])
        yield chat(
            [
                (f"Turn this into JSON: {text}.", f"```json\n{json.dumps(rows, indent=2)}\n```"),
                ("Who is the oldest?", f"{oldest['name']}, at {oldest['age']}."),
            ]
        )
    for _ in range(14):
        a, b, c = rng.randrange(2, 30), rng.randrange(2, 30), rng.randrange(2, 12)
        yield chat(
            [
                (f"What is {a} + {b}?", f"{a} + {b} = {a + b}."),
                (f"Multiply that by {c}.", f"{a + b} x {c} = {(a + b) * c}."),
                (
                    "Is the result even?",
                    f"Yes, {(a + b) * c} is even." if (a + b) * c % 2 == 0 else f"No, {(a + b) * c} is odd.",
                ),
            ]
        )
    for _ in range(12):
        first, second = rng.sample(NAMES, 2)
        word = rng.choice(WORDS)
        yield chat(
            [
                (f"Hi, my name is {first}.", f"Hello {first}! What can I do for you?"),
                (
                    f"Think of a word for a game, please. {second} will guess it.",
                    f'All right: the word has {len(word)} letters and begins with "{word[0]}".',
                ),
                (f'{second} says it is "{word}".', f'That is right, it is "{word}". Well done, {second}!'),
                ("What was my name again?", f"Your name is {first}."),
            ]
        )


def conversations() -> list[dict[str, object]]:
    rng = random.Random(20240501)
    makers = [
        concept_chats,
        recipe_chats,
        code_chats,
        letter_chats,
        advice_chats,
        paragraph_chats,
        phrase_chats,
        place_chats,
        task_chats,
    ]
    rows = [row for maker in makers for row in maker(rng)]
    unique = list({json.dumps(row): row for row in rows}.values())
    rng.shuffle(unique)
    return unique


# ---------------------------------------------------------------- word problems

THINGS = [
    "apples",
    "stickers",
    "marbles",
    "pencils",
    "books",
    "shells",
    "cookies",
    "stamps",
    "cards",
    "buttons",
    "coins",
    "flowers",
    "balloons",
    "beads",
]
SHOPS = [
    ("notebooks", "notebook"),
    ("tickets", "ticket"),
    ("sandwiches", "sandwich"),
    ("pens", "pen"),
    ("plants", "plant"),
    ("posters", "poster"),
    ("cups", "cup"),
    ("toy cars", "toy car"),
]
Problem = tuple[tuple[object, ...], str, list[str], str]  # numbers, question, steps, answer


def pick(rng: random.Random, *variants: str) -> str:
    return rng.choice(variants)


def give_away(r: random.Random) -> Problem:
    n, m, t = *r.sample(NAMES, 2), r.choice(THINGS)
    a, b, c = r.randrange(20, 60), r.randrange(3, 15), r.randrange(3, 20)
    q = pick(
        r,
        f"{n} has {a} {t}. {n} gives {b} to {m} and then finds {c} more. How many {t} does {n} have now?",
        f"{n} had {a} {t}, gave {b} of them to {m} and later found {c} more. How many {t} does {n} have?",
        f"How many {t} does {n} have if {n} starts with {a}, gives {m} {b} and then finds {c}?",
    )
    return (
        (a, b, c),
        q,
        [
            f"{n} starts with {a} {t}.",
            f"After giving away {b}: {a} - {b} = {a - b}.",
            f"After finding {c} more: {a - b} + {c} = {a - b + c}.",
        ],
        f"{a - b + c}",
    )


def boxes(r: random.Random) -> Problem:
    t, a, b, c = r.choice(THINGS), r.randrange(3, 12), r.randrange(4, 13), r.randrange(2, 20)
    q = pick(
        r,
        f"There are {a} boxes with {b} {t} in each, and {c} {t} lie on the table. How many {t} are there in all?",
        f"A shop packs {t} into {a} boxes of {b}. {c} {t} are left over. How many {t} does the shop have?",
        f"{a} boxes hold {b} {t} each. Together with {c} loose {t}, how many {t} are there?",
    )
    return (
        (a, b, c),
        q,
        [f"The boxes hold {a} x {b} = {a * b} {t}.", f"With the others: {a * b} + {c} = {a * b + c}."],
        f"{a * b + c}",
    )


def share(r: random.Random) -> Problem:
    t, n, b, each = r.choice(THINGS), r.choice(NAMES), r.randrange(3, 9), r.randrange(4, 15)
    keep = r.randrange(2, 10)
    a = b * each + keep
    q = pick(
        r,
        f"{n} has {a} {t}, keeps {keep} and shares the rest equally among {b} friends. How many {t} does each friend get?",
        f"{n} keeps {keep} of {a} {t}. The others are divided equally among {b} friends. How many does each friend get?",
        f"{b} friends share {n}'s {a} {t} equally, after {n} has put {keep} aside. How many {t} does each of them get?",
    )
    return (
        (a, b, keep),
        q,
        [f"{n} shares {a} - {keep} = {a - keep} {t}.", f"Each friend gets {a - keep} / {b} = {each}."],
        f"{each}",
    )


def shopping(r: random.Random) -> Problem:
    n, (many, one) = r.choice(NAMES), r.choice(SHOPS)
    price, count = r.randrange(2, 10), r.randrange(3, 9)
    paid = (price * count // 10 + r.randrange(1, 4)) * 10
    q = pick(
        r,
        f"A {one} costs {price} dollars. {n} buys {count} {many} and pays with {paid} dollars. How much change does {n} get?",
        f"{n} buys {count} {many} at {price} dollars each and gives the cashier {paid} dollars. How much money comes back?",
        f"How much change does {n} get from {paid} dollars after buying {count} {many} for {price} dollars each?",
    )
    total = price * count
    return (
        (price, count, paid),
        q,
        [
            f"The {many} cost {count} x {price} = {total} dollars.",
            f"The change is {paid} - {total} = {paid - total} dollars.",
        ],
        f"{paid - total} dollars",
    )


def travel(r: random.Random) -> Problem:
    speed, hours, more = r.randrange(4, 19) * 5, r.randrange(2, 7), r.randrange(5, 60)
    vehicle = r.choice(["train", "bus", "car", "truck"])
    q = pick(
        r,
        f"A {vehicle} drives {hours} hours at {speed} kilometres per hour and then {more} kilometres more. How far does it go in all?",
        f"For {hours} hours a {vehicle} travels {speed} kilometres each hour. After that it travels another {more} kilometres. How long is the whole way?",
    )
    way = speed * hours
    return (
        (speed, hours, more),
        q,
        [
            f"In {hours} hours it goes {hours} x {speed} = {way} kilometres.",
            f"In all: {way} + {more} = {way + more} kilometres.",
        ],
        f"{way + more} kilometres",
    )


def saving(r: random.Random) -> Problem:
    n, week, weeks, have = r.choice(NAMES), r.randrange(3, 15), r.randrange(3, 11), r.randrange(5, 40)
    goal = have + week * weeks
    q = pick(
        r,
        f"{n} has {have} dollars and saves {week} dollars every week. After how many weeks does {n} have {goal} dollars?",
        f"{n} wants to buy a game for {goal} dollars, has {have} dollars and saves {week} dollars a week. How many weeks does it take?",
    )
    return (
        (have, week, goal),
        q,
        [
            f"{n} still needs {goal} - {have} = {goal - have} dollars.",
            f"That takes {goal - have} / {week} = {weeks} weeks.",
        ],
        f"{weeks} weeks",
    )


def ages(r: random.Random) -> Problem:
    n, m = r.sample(NAMES, 2)
    a, d, y = r.randrange(5, 15), r.randrange(2, 9), r.randrange(3, 12)
    q = pick(
        r,
        f"{n} is {a} years old. {m} is {d} years older. How old will {m} be in {y} years?",
        f"{m} is {d} years older than {n}, who is {a}. How old is {m} in {y} years?",
    )
    return (
        (a, d, y),
        q,
        [f"{m} is {a} + {d} = {a + d} years old now.", f"In {y} years: {a + d} + {y} = {a + d + y}."],
        f"{a + d + y} years",
    )


def garden(r: random.Random) -> Problem:
    length, width = r.randrange(5, 25), r.randrange(3, 15)
    n = r.choice(NAMES)
    if r.random() < 0.5:
        q = pick(
            r,
            f"{n}'s garden is {length} metres long and {width} metres wide. How long is the fence around it?",
            f"How many metres of fence does {n} need for a garden that is {length} metres by {width} metres?",
        )
        return (
            ("fence", length, width),
            q,
            [
                f"One long and one short side: {length} + {width} = {length + width} metres.",
                f"Twice that: 2 x {length + width} = {2 * (length + width)} metres.",
            ],
            f"{2 * (length + width)} metres",
        )
    cost = r.randrange(2, 9)
    q = pick(
        r,
        f"{n}'s floor is {length} metres long and {width} metres wide. A square metre of carpet costs {cost} dollars. What does the carpet cost?",
        f"Carpet costs {cost} dollars per square metre. What does {n} pay for a room of {length} by {width} metres?",
    )
    return (
        ("carpet", length, width, cost),
        q,
        [
            f"The area is {length} x {width} = {length * width} square metres.",
            f"The cost is {length * width} x {cost} = {length * width * cost} dollars.",
        ],
        f"{length * width * cost} dollars",
    )


def reading(r: random.Random) -> Problem:
    n, day, days, left = r.choice(NAMES), r.randrange(8, 30), r.randrange(3, 9), r.randrange(10, 90)
    pages = day * days + left
    q = pick(
        r,
        f"A book has {pages} pages. {n} reads {day} pages a day for {days} days. How many pages are left?",
        f"{n} reads {day} pages of a {pages}-page book every day. How many pages are left after {days} days?",
    )
    return (
        (pages, day, days),
        q,
        [f"{n} reads {days} x {day} = {day * days} pages.", f"Left are {pages} - {day * days} = {left} pages."],
        f"{left} pages",
    )


def teams(r: random.Random) -> Problem:
    girls, boys, size = r.randrange(8, 30), r.randrange(8, 30), r.choice([2, 3, 4, 5, 6])
    boys += -(girls + boys) % size
    q = pick(
        r,
        f"{girls} girls and {boys} boys form teams of {size}. How many teams are there?",
        f"A class trip has {girls} girls and {boys} boys. They split into teams of {size}. How many teams do they make?",
    )
    total = girls + boys
    return (
        (girls, boys, size),
        q,
        [f"There are {girls} + {boys} = {total} children.", f"They make {total} / {size} = {total // size} teams."],
        f"{total // size} teams",
    )


def twice(r: random.Random) -> Problem:
    n, m = r.sample(NAMES, 2)
    t, a, k = r.choice(THINGS), r.randrange(4, 25), r.choice([2, 3, 4])
    word = {2: "twice", 3: "three times", 4: "four times"}[k]
    q = pick(
        r,
        f"{n} has {a} {t}. {m} has {word} as many. How many {t} do they have together?",
        f"{m} collected {word} as many {t} as {n}, who collected {a}. How many {t} did they collect together?",
    )
    return (a, k), q, [f"{m} has {k} x {a} = {k * a} {t}.", f"Together: {a} + {k * a} = {a + k * a}."], f"{a + k * a}"


def fraction(r: random.Random) -> Problem:
    n, t, d, part = r.choice(NAMES), r.choice(THINGS), r.choice([2, 3, 4, 5]), r.randrange(4, 16)
    a = d * part
    word = {2: "half", 3: "a third", 4: "a quarter", 5: "a fifth"}[d]
    q = pick(
        r,
        f"{n} has {a} {t} and gives {word} of them away. How many {t} are left?",
        f"{word[0].upper()}{word[1:]} of {n}'s {a} {t} are lost. How many {t} does {n} still have?",
    )
    return (
        (a, d),
        q,
        [f"{word[0].upper()}{word[1:]} of {a} is {a} / {d} = {part}.", f"Left are {a} - {part} = {a - part}."],
        f"{a - part}",
    )


def work(r: random.Random) -> Problem:
    n, hour, hours, spent = r.choice(NAMES), r.randrange(8, 20), r.randrange(3, 9), r.randrange(5, 24)
    q = pick(
        r,
        f"{n} earns {hour} dollars an hour and works {hours} hours. Then {n} spends {spent} dollars. How much is left?",
        f"After working {hours} hours for {hour} dollars an hour, {n} spends {spent} dollars. How many dollars are left?",
    )
    return (
        (hour, hours, spent),
        q,
        [
            f"{n} earns {hours} x {hour} = {hour * hours} dollars.",
            f"Left are {hour * hours} - {spent} = {hour * hours - spent} dollars.",
        ],
        f"{hour * hours - spent} dollars",
    )


KINDS: list[Callable[[random.Random], Problem]] = [
    give_away,
    boxes,
    share,
    shopping,
    travel,
    saving,
    ages,
    garden,
    reading,
    teams,
    twice,
    fraction,
    work,
]
ASKS = ["{}", "{}", "{}", "Solve this step by step. {}", "Here is a word problem: {}", "{} Show your work."]


def word_problems(train: int, heldout: int) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    rng = random.Random(7)
    seen: set[tuple[object, ...]] = set()
    rows: list[dict[str, object]] = []
    while len(rows) < train + heldout:
        kind = KINDS[len(rows) % len(KINDS)]
        numbers, question, steps, answer = kind(rng)
        if (kind.__name__, *numbers) in seen:
            continue
        seen.add((kind.__name__, *numbers))
        rows.append(chat([(rng.choice(ASKS).format(question), "\n".join(steps) + f"\nThe answer is {answer}.")]))
    rng.shuffle(rows)
    return rows[heldout:], rows[:heldout]


def write(name: str, rows: list[dict[str, object]]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (DATA / name).write_text(text, encoding="utf-8")


def main() -> None:
    DATA.mkdir(parents=True, exist_ok=True)
    write("conversations.jsonl", conversations())
    train, heldout = word_problems(420, 52)
    write("word_problems.jsonl", train)
    write("word_problems_heldout.jsonl", heldout)


if __name__ == "__main__":
    main()
