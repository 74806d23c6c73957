"""Whatever a model samples is text, reasoning or calls: never an exception, never lost, never looked at twice."""

import json
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bombus_gateway.text.deltas import Delta, ReasoningDelta, TextDelta, ToolCallDelta
from bombus_gateway.text.reading.bodies import BodyEnd
from bombus_gateway.text.reading.finding import Reading
from bombus_gateway.text.reading.syntaxes import SYNTAXES, THINKING
from tests.gateway.reading.templates import CALLS, READINGS, TOOLS, read, renderer, template

NAMES = sorted(READINGS)
PROMPT_ENDS = ("", "<think>\n", "<|start|>assistant", "<|start|>assistant<|channel|>analysis<|message|>")
_COMMON = [
    *"{}[]()\",:;=\\ \n\t'x1é-",
    *("null", "True", '"name": "f"', '"arguments": {', '{"name": "f", "arguments": {}}', "[f(a=1)]", "f", "call:f{"),
    *(
        "```",
        "1e999",
        "NaN",
        "\\ud800",
        "<think>",
        "</think>",
        "functions.f:0",
        "<function=f>",
        "</function>",
        "\ud800",
    ),
    *("<parameter=a>", "</parameter>", '<invoke name="f">', "</invoke>", " to=functions.f", "9" * 5000),
]


def reading_of(name: str) -> Reading:
    reading = READINGS[name]
    return reading if reading.channels else replace(reading, thinking=THINKING[0])


def marks_of(name: str) -> list[str]:
    reading = reading_of(name)
    found = set(reading.markers) | set(reading.frames)
    if reading.syntax:
        found |= {*reading.syntax.opens, *reading.syntax.inner, reading.syntax.form.close} - {""}
    return sorted(found)


def calls_of(name: str) -> list[str]:
    """Return how two calls are written in the syntax."""
    if name == "recipients in lines":
        return ['>>>f\n{"a": 1}', '>>>g\n{"a": 1}<|eot_id|>', ">>>all\nyes"]
    if READINGS[name].channels:
        args = '{"a": 1}' if name == "channels" else '<atem:invoke name="f">\n</atem:invoke>'
        return [
            f"<|start|>assistant to={prefix}f<|message|>{args}{end}"
            for prefix, end in product(("functions.", ""), ENDS)
        ]
    written = []
    for arguments in ({"a": 1, "b": "x ]}</tool"}, {"c": {"k": [True, "\n"]}}):
        call = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": arguments}}
        text = renderer(template(CALLS[name]))([{"role": "assistant", "tool_calls": [call]}], (), False)
        written.append(text.removeprefix("<|turn|>assistant\n").removesuffix("<|close|>\n"))
    return written


ENDS = ("<|call|>", "<|eot|>", "<|end|>")
ATOMS = {name: [*marks_of(name), *calls_of(name)] for name in NAMES}


@st.composite
def sampled(draw: st.DrawFn) -> tuple[str, str, str, list[str]]:
    """A syntax, the end of a prompt, a text of the syntax's own marks and calls and of other things, and cuts."""
    name = draw(st.sampled_from(NAMES))
    parts = draw(st.lists(st.sampled_from(ATOMS[name]) | st.sampled_from(_COMMON), max_size=25))
    text = "".join(parts)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)])]
    return name, draw(st.sampled_from(PROMPT_ENDS)), text, pieces


@settings(max_examples=150)
@given(sampled())
def test_any_text_is_read_and_the_same_however_it_is_cut(case: tuple[str, str, str, list[str]]) -> None:
    name, prompt_end, text, pieces = case
    whole = read(lambda: reading_of(name).reader(prompt_end, TOOLS), [text])
    assert read(lambda: reading_of(name).reader(prompt_end, TOOLS), pieces) == whole
    if len(text) < 500:
        assert read(lambda: reading_of(name).reader(prompt_end, TOOLS), text) == whole
    assert_nothing_is_lost(name, text, whole)


def assert_nothing_is_lost(name: str, text: str, deltas: list[Delta]) -> None:
    """Check that what comes out as text is the text, but for what calls took, marks, headers and white space."""
    given_out = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta | ReasoningDelta))
    letters = iter("".join(text.split()))
    assert all(letter in letters for letter in "".join(given_out.split())), "something came out that is not in the text"
    calls = [delta for delta in deltas if isinstance(delta, ToolCallDelta)]
    assert all(isinstance(json.loads(call.arguments), dict) for call in calls)
    dropped = {"<think>", "</think>", *reading_of(name).frames}
    if form := READINGS[name].channels:  # headers, up to the end of the mark
        dropped |= reading_of(name).markers | {part + form.message for part in text.split(form.message)[:-1]}
    lost = len("".join(text.split())) - len("".join(given_out.split()))
    in_calls = sum(CALL_LETTERS + 2 * len(call.arguments) for call in calls)
    assert lost <= sum(text.count(mark) * len(mark) for mark in dropped) + in_calls


CALL_LETTERS = 400  # more than the marks, the keys and the name of any one call


DEEP = ["[" * 1500, "[" * 2000 + "]" * 2000, '{"a":' * 1500 + "1" + "}" * 1500]
BODIES = [
    "%s",
    '{"name": "f", "arguments": %s}',
    "[f(a=%s)]",
    "call:f{a:%s}",
    '[{"name": "f", "arguments": {"a": %s}}]',
]


@pytest.mark.parametrize("name", NAMES)
def test_deep_nesting_is_text(name: str) -> None:
    syntax = READINGS[name].syntax
    opens, close = (
        (syntax.opens or ("",), syntax.form.close) if syntax else ((" to=functions.f<|message|>",), "<|call|>")
    )
    for mark, body, deep in product(opens, BODIES, DEEP):
        text = mark + body % deep + close
        (delta,) = read(lambda: READINGS[name].reader("<|start|>assistant", TOOLS), [text])
        assert delta == TextDelta(text)


@pytest.mark.parametrize("name", NAMES)
def test_a_hundred_thousand_braces_are_text(name: str) -> None:
    syntax = READINGS[name].syntax
    text = (syntax.opens[0] if syntax and syntax.opens else "") + "{" * 100_000
    assert read(lambda: READINGS[name].reader("", TOOLS), [text]) == [TextDelta(text)]


@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000, '"\\ud800"', '"\ud800"', '"\\x"']
)
def test_numbers_and_letters_that_json_does_not_have_are_text(value: str) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {{"a": {value}}}}}</tool_call>'
    assert read(lambda: READINGS["hermes"].reader("", TOOLS), [text]) == [TextDelta(text)]


@pytest.mark.parametrize("value", ["nan", "1e999", "9" * 5000, "'\\ud800'", "'\\UFFFFFFFF'", "'", "[1,", "f()", "..."])
def test_literals_that_are_no_values_are_text(value: str) -> None:
    text = f"<|tool_call_start|>[f(a={value})]<|tool_call_end|>"
    assert read(lambda: READINGS["pythonic between marks"].reader("", TOOLS), [text]) == [TextDelta(text)]


def test_two_escapes_may_be_the_halves_of_one_letter() -> None:
    text = r"<|tool_call_start|>[f(b='\ud83d\udc1d')]<|tool_call_end|>"
    deltas = read(lambda: READINGS["pythonic between marks"].reader("", TOOLS), [text])
    assert deltas == [ToolCallDelta("f", '{"b": "🐝"}')]


# ---- cost ----


HELD_MAX = 64  # letters that a reader may look at again when text comes


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("filling", ["x", " ", '"', "\\", "{", "<", "[", "\n"])
def test_a_reader_holds_back_only_a_few_letters_however_long_a_call_is(name: str, filling: str) -> None:
    reading = reading_of(name)
    reader: Any = reading.reader("<|start|>assistant", TOOLS)
    opens = reading.syntax.opens[0] if reading.syntax and reading.syntax.opens else " to=functions.f<|message|>"
    reader.feed(opens)
    for _ in range(2000):
        reader.feed(filling)
        assert len(reader._rest) <= HELD_MAX
    reader.finish()


@pytest.mark.parametrize("syntax", SYNTAXES, ids=lambda syntax: syntax.name)
def test_each_letter_of_a_body_is_looked_at_a_few_times_at_most(syntax: Any) -> None:
    letters = 20_000
    end = BodyEnd(syntax.form)
    body = (syntax.form.bracket or "{") + '"x\\": [1, </tool' * (letters // 16)
    rest, done, looked_at = "", False, 0
    for letter in body:
        rest += letter
        looked_at += len(rest)
        used, done = end.take(rest, 0)
        if done:
            break
        rest = rest[used:]
    assert looked_at <= len(body) * (len(syntax.form.close) + 2)


def test_no_mark_is_part_of_another_of_its_syntax() -> None:
    """Or a text would be read differently when it is cut within the longer one."""
    for syntax, thinking in product(SYNTAXES, THINKING):
        marks = (*syntax.opens, thinking.open)
        assert not [one for one, other in product(marks, marks) if one != other and one in other]
