"""What the scripted model says: texts, reasoning and calls, whole, broken and cut, each from a seed. Pure."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WORDS = [
    "fox",
    "weather",
    "Paris",
    "table",
    "river",
    "seven",
    "blue",
    "stone",
    "“quoted”",
    "naïve",
    "雪",
    "🐝",
    "line/two",
    "a\\b",
    "it's",
    "x=1",
    "<b>",
    "{brace}",
    "100%",
    "end.",
    "garden",
    "under",
    "quickly",
    "mountain",
    "over",
    "lazy",
    "dog",
    "hello",
    "there",
    "fine",
    "today",
]
SPACES = (" ", " ", " ", " ", "  ", "\n", "\n\n", "\t")
STOP = "</code>"


@dataclass(frozen=True)
class PlannedCall:
    """A call: the name and arguments that it means, and the JSON that the model writes for it."""

    name: str
    arguments: dict[str, Any]
    written: str


@dataclass(frozen=True)
class Plan:
    """An answer as it is meant. `text` is what is written; a broken call is a part of it. `cut` ends it after so many
    of a thousand of its tokens."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[PlannedCall, ...] = ()
    broken: str = ""
    cut: int = 0
    after_stop: str = ""

    def written(self) -> str:
        """Return the text that the model writes."""
        thought = f"<think>\n{self.reasoning}\n</think>\n\n" if self.reasoning else ""
        calls = "".join(f"\n<tool_call>\n{call.written}\n</tool_call>" for call in self.calls)
        return f"{thought}{self.text}{calls}{self.broken}{self.after_stop}"


def words(chance: random.Random, least: int = 2, most: int = 7) -> str:
    """Return some words with white space of every kind between them, and a number that makes them unique."""
    count = chance.randint(least, most)
    text = "".join(chance.choice(WORDS) + chance.choice(SPACES) for _ in range(count))
    return f"{text}{chance.randrange(1 << 40):x}"


def plan(chance: random.Random, tools: Sequence[str], stops: bool) -> Plan:
    """Return an answer of a model that has these tools, or that writes code until a stop string."""
    if stops:
        return Plan(text=f"<code>\n{words(chance)}\n{chance.choice(('', ' '))}", after_stop=f"{STOP} and more")
    reasoning = words(chance) if chance.random() < 0.25 else ""
    kind = chance.random()
    if tools and kind < 0.65:
        count = chance.choice((1, 1, 1, 2, 2, 3))
        text = words(chance) if chance.random() < 0.5 else ""
        return Plan(text, reasoning, tuple(_call(chance, tools, number) for number in range(count)))
    if tools and kind < 0.7:
        return Plan(words(chance), reasoning, broken='\n<tool_call>\n{"name": "run", "arguments": {"a": \n</tool_call>')
    if kind < 0.74:
        return Plan(reasoning=reasoning)  # nothing at all, or only reasoning
    if kind < 0.78 and not reasoning:
        return Plan(words(chance, 6, 12), cut=chance.randint(200, 900))
    around = chance.choice(("", "", "\n", "  "))
    return Plan(f"{around if not reasoning else ''}{words(chance)}{chance.choice(('', '', chr(10), ' '))}", reasoning)


def _call(chance: random.Random, tools: Sequence[str], number: int) -> PlannedCall:
    name = chance.choice((*tools, *tools, *tools, "unknown"))
    arguments: dict[str, Any] = {}
    for key in chance.sample(("path", "line", "all", "text", "more"), chance.choice((0, 1, 1, 2, 3))):
        arguments[key] = _value(chance)
    form = chance.random()
    body = json.dumps(
        arguments, ensure_ascii=chance.random() < 0.3, separators=chance.choice(((", ", ": "), (",", ":")))
    )
    if form < 0.1:
        body = json.dumps(body)  # as a text that holds JSON
    elif form < 0.2:
        body = json.dumps(arguments, indent=1)
    own_id = f', "id": "call_{number}"' if form > 0.9 else ""
    return PlannedCall(name, arguments, f'{{"name": "{name}", "arguments": {body}{own_id}}}')


def _value(chance: random.Random) -> Any:
    return chance.choice(
        (
            5.0, 5, 1.5, -0.0, 10**15, True, None, "", "5000", words(chance), "two\nlines  \nwith blanks ",
            [1, 2.0, "x"], {"b": 1, "a": {"deep": [None]}},
        )
    )  # fmt: skip
