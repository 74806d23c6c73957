"""The conversations that each chat template renders, as data: every kind of message that a client may send.

Contents are text, and a call's arguments are JSON text, as in the OpenAI API.
`forms.py` has them as templates want them.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from bombus_gateway.text.message import ChatMessage

NAMES = "@names@"  # stands for names of the model's special tokens


class Conversation(NamedTuple):
    """What a client sends. A text that holds `NAMES` is used with the names of special tokens in its place."""

    name: str
    messages: list[ChatMessage]
    tools: list[dict[str, Any]] = []  # noqa: RUF012 - nobody changes it

    @property
    def has_names(self) -> bool:
        return NAMES in json.dumps([self.messages, self.tools])

    def with_names(self, names: str) -> "Conversation":
        """Return the conversation with `names` in the place of `NAMES`; a call's arguments stay JSON."""

        def text(found: str) -> str:
            return found.replace(NAMES, names)

        messages = [_in_texts(message, text) for message in self.messages]
        return Conversation(self.name, messages, [_in_texts(tool, text) for tool in self.tools])


def _in_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Change all texts in a message or tool. Arguments are JSON text: they are changed inside it."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_in_texts(each, change) for each in value]
    if isinstance(value, dict):
        changed = {key: _in_texts(each, change) for key, each in value.items() if key != "arguments"}
        if "arguments" in value:
            changed["arguments"] = json.dumps(_in_texts(json.loads(value["arguments"]), change), ensure_ascii=False)
        return changed
    return value


# ---- messages -----------------------------------------------------------------------------------------------------


def system(text: str) -> ChatMessage:
    return {"role": "system", "content": text}


def developer(text: str) -> ChatMessage:
    return {"role": "developer", "content": text}


def user(text: str) -> ChatMessage:
    return {"role": "user", "content": text}


def assistant(text: str | None, *calls: dict[str, Any], reasoning: str = "") -> ChatMessage:
    message: ChatMessage = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = list(calls)
    if reasoning:
        message["reasoning_content"] = reasoning
    return message


def call(number: int, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(arguments, ensure_ascii=False)
    return {"id": call_id(number), "type": "function", "function": {"name": name, "arguments": text}}


def result(number: int, text: str) -> ChatMessage:
    return {"role": "tool", "tool_call_id": call_id(number), "content": text}


def call_id(number: int) -> str:
    """Return an id of nine letters and digits, which some templates insist on."""
    return f"call{number:05}"


def tool(name: str, description: str, properties: dict[str, Any], required: list[str] | None = None) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required or []}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


CITY = {"city": {"type": "string", "description": "The city's name"}}
WEATHER = tool("weather", "Say what the weather is", CITY, ["city"])
TIME = tool("local_time", "Tell the time", {"zone": {"type": "string", "enum": ["UTC", "CET"]}})
TOOLS = [WEATHER, TIME]
NESTED_TOOL = tool(
    "book",
    'Book a "table"\nfor people <b>&</b> their dogs',
    {
        "guests": {
            "type": "array",
            "items": {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}},
        },
        "when": {"type": "object", "properties": {"day": {"type": "string"}}, "required": ["day"]},
        "smoking": {"type": "boolean", "default": False},
        "note": {"type": ["string", "null"], "description": "Größe, 席"},
    },
    ["guests", "when"],
)
PARIS, OSLO = {"city": "Paris"}, {"city": "Oslo"}
CODE = 'def f(x):\n\tif x:\n\t    return {"a": [x ** 2]}\n\n\n\treturn None  # {{ braces }} {% block %} {# note #}\n'
STRANGE = "a\x00b\x01\x02\x1b[0m \ue000\ue001\uf8ff \ufdd0 \ufffe\ufeff \U000f0000\U0010fffd \u2028 \u200b\u200d end"

CONVERSATIONS = [
    Conversation("a user alone", [user("What is a bumblebee?")]),
    Conversation("a system message", [system("You are brief."), user("What is a bumblebee?")]),
    Conversation("a developer message", [developer("Answer in French."), user("What is a bumblebee?")]),
    Conversation(
        "several turns",
        [
            system("You are brief."),
            user("Hi."),
            assistant("Hello! What can I do for you?"),
            user("Count to three."),
            assistant("1, 2, 3"),
            user("And on?"),
        ],
    ),
    Conversation("tools", [user("What is the weather in Paris?")], TOOLS),
    Conversation("tools beside a system message", [system("You are brief."), user("Is it raining?")], TOOLS),
    Conversation(
        "a call and its result",
        [user("Weather in Paris?"), assistant("", call(1, "weather", PARIS)), result(1, "sunny, 21 degrees")],
        TOOLS,
    ),
    Conversation(
        "a call without any content",
        [
            user("Weather in Paris?"),
            assistant(None, call(1, "weather", PARIS)),
            result(1, "sunny"),
            assistant(None, call(2, "weather", OSLO), reasoning="Oslo too."),
            result(2, "snow"),
        ],
        TOOLS,
    ),
    Conversation(
        "a call beside text",
        [
            user("Weather in Paris?"),
            assistant("Let me look.", call(1, "weather", PARIS)),
            result(1, "sunny"),
            assistant("It is sunny."),
            user("Thanks."),
        ],
        TOOLS,
    ),
    Conversation(
        "parallel calls",
        [
            system("You are brief."),
            user("Weather in Paris and Oslo?"),
            assistant("", call(1, "weather", PARIS), call(2, "weather", OSLO)),
            result(1, "sunny"),
            result(2, "snow"),
        ],
        TOOLS,
    ),
    Conversation(
        "calls in two rounds",
        [
            user("Weather in Paris, then the time?"),
            assistant("", call(1, "weather", PARIS)),
            result(1, "sunny"),
            assistant("", call(2, "local_time", {"zone": "CET"})),
            result(2, "12:00"),
            assistant("Sunny at noon."),
            user("And in Oslo?"),
            assistant("", call(3, "weather", OSLO)),
            result(3, "snow"),
        ],
        TOOLS,
    ),
    Conversation(
        "a call and its result, without tools",
        [user("Weather in Paris?"), assistant("", call(1, "weather", PARIS)), result(1, "sunny, 21 degrees")],
    ),
    Conversation(
        "parallel calls beside text, without tools",
        [
            user("Weather in Paris and Oslo?"),
            assistant("Let me look.", call(1, "weather", PARIS), call(2, "weather", OSLO)),
            result(1, "sunny"),
            result(2, "snow"),
            assistant("Sunny, and snow."),
            user("Thanks."),
        ],
    ),
    Conversation(
        "reasoning in earlier turns",
        [
            user("2 + 2?"),
            assistant("4", reasoning="Two and two\nmake four."),
            user("And 3 + 3?"),
            assistant("6", reasoning="Easy."),
            user("Sure?"),
        ],
    ),
    Conversation(
        "reasoning before a call",
        [
            user("Weather in Paris?"),
            assistant("", call(1, "weather", PARIS), reasoning="I must look it up."),
            result(1, "sunny"),
        ],
        TOOLS,
    ),
    Conversation(
        "not ASCII",
        [
            system("Grüße, 你好, नमस्ते"),
            user("🐝🏽‍🔬 e\u0301 שלום مرحبا 日本語 ﬁ Ⅷ ｜＜＞"),
            assistant("Прывітанне 👩‍👩‍👧‍👦"),
            user("ĞİŞ ß ǅ 𝔘𝔫𝔦"),
        ],
    ),
    Conversation("an empty system message", [system(""), user("Hi.")]),
    Conversation("empty contents", [user(""), assistant(""), user("")]),
    Conversation("an empty result", [user("Do it."), assistant("", call(1, "weather", PARIS)), result(1, "")], TOOLS),
    Conversation(
        "white space around contents",
        [
            system("  \n be brief\n\n"),
            user("\n\n  hello \t"),
            assistant("  ok\n \n"),
            user("   "),
            assistant("\n"),
            user("\tend  \n\n\n"),
        ],
    ),
    Conversation(
        "odd arguments",
        [
            user("Go."),
            assistant(
                "",
                call(
                    1,
                    "book",
                    {
                        "guests": [{"name": 'Ana "A" O\'Neil', "age": 7}, {}, []],
                        "when": {"day": None, "deep": {"er": [1, [2.5, -3e-7]]}},
                        "smoking": False,
                        "big": 12345678901234567890,
                        "ratio": 1.0,
                        "note": "Größe\n<b>&</b> \\ 席",
                        "empty": "",
                        "none": None,
                        "true": True,
                        "text of a number": "12",
                    },
                ),
            ),
            result(1, "booked"),
        ],
        [NESTED_TOOL],
    ),
    Conversation("no arguments", [user("Now?"), assistant("", call(1, "local_time", {})), result(1, "12:00")], TOOLS),
    Conversation(
        "JSON as a result",
        [
            user("Weather?"),
            assistant("", call(1, "weather", PARIS)),
            result(1, '{"sky": "clear", "t": [21, 22.5], "wind": null, "note": "a \\"b\\""}'),
        ],
        TOOLS,
    ),
    Conversation("consecutive users", [user("First."), user("Second."), assistant("Both."), user("A."), user("B.")]),
    Conversation("consecutive assistants", [user("Say two."), assistant("One."), assistant("Two."), user("Good.")]),
    Conversation("lines of code", [user(f"Explain:\n```python\n{CODE}```"), assistant(CODE), user(CODE)]),
    Conversation("two system messages", [system("Be brief."), system("Be kind."), user("Hi."), assistant("Hi.")]),
    Conversation("a late system message", [user("Hi."), assistant("Hi."), system("Be kind."), user("Go on.")]),
    Conversation("an assistant at the end", [user("Hi."), assistant("Hello there.")]),
    Conversation("characters that nobody types", [system(STRANGE), user(STRANGE), assistant(STRANGE), user(STRANGE)]),
    Conversation(
        "the words of templates",
        [
            system("system"),
            user("user\nassistant"),
            assistant("assistant"),
            user("user\nassistant"),
            assistant("None"),
            user("\nuser"),
        ],
    ),
    Conversation("a long text", [user("The quick brown fox jumps over the lazy dog.\n" * 250)]),
    Conversation("names in a user's text", [user(f"What is {NAMES}?"), assistant("Hm."), user(NAMES)]),
    Conversation("names in a system message", [system(f"Beware of {NAMES}."), user("Hi.")]),
    Conversation(
        "names in a result",
        [user("Read it."), assistant("", call(1, "weather", PARIS)), result(1, f"It says {NAMES}\n{NAMES}")],
        TOOLS,
    ),
    Conversation("names in an assistant's text", [user("Hi."), assistant(f"I say {NAMES} twice."), user("Why?")]),
    Conversation(
        "names in reasoning",
        [
            user("Hi."),
            assistant("", call(1, "weather", PARIS), reasoning=f"They write {NAMES} here."),
            result(1, "sunny"),
        ],
        TOOLS,
    ),
    Conversation(
        "names in arguments",
        [
            user("Hi."),
            assistant("", call(1, "weather", {"city": NAMES, "more": [f"a {NAMES}"]})),
            result(1, "sunny"),
        ],
        TOOLS,
    ),
    Conversation("names in tools", [user("Hi.")], [tool("weather", f"Say {NAMES}", CITY, ["city"])]),
]
