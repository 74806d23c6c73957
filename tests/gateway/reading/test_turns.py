"""Text, reasoning and calls are separated as each syntax has them, however the text is cut."""

import json
from typing import Any

import pytest

from bombus_gateway.limits import CALLS_IN_ANSWER
from bombus_gateway.text.deltas import Delta, ReasoningDelta, TextDelta, ToolCallDelta
from bombus_gateway.text.reading.finding import Reading
from bombus_gateway.text.reading.json_calls import read_named
from bombus_gateway.text.reading.syntaxes import SYNTAXES, THINKING
from bombus_gateway.text.reading.turns import TurnReader
from tests.gateway.reading.templates import READINGS, TOOLS, read

THINK = THINKING[0]
PORTIONS = pytest.mark.parametrize("portion", [1, 3, 1000])


def pieces(text: str, portion: int) -> list[str]:
    return [text[at : at + portion] for at in range(0, len(text), portion)]


def read_as(name: str, text: str, portion: int = 1000, prompt_end: str = "") -> list[Delta]:
    return read(lambda: READINGS[name].reader(prompt_end, TOOLS), pieces(text, portion))


MADE = ToolCallDelta("f", '{"a": 1}')
M = "]<]minimax[>["
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'

# (syntax, what was sampled, what is read)
SAMPLED: list[tuple[str, str, list[Delta]]] = [
    ("hermes", "no call", [TextDelta("no call")]),
    ("hermes", f"hm\n{CALL}\n{CALL}\n", [TextDelta("hm"), MADE, MADE]),
    ("hermes", f"{CALL}\nand more \n", [MADE, TextDelta("\nand more \n")]),
    ("hermes", "a <tool_call>{bad}</tool_call> b", [TextDelta("a <tool_call>{bad}</tool_call> b")]),
    ("hermes", '<tool_call>{"name": "f"\n', [TextDelta('<tool_call>{"name": "f"\n')]),
    ("hermes", '<tool_call>{"name": ""}</tool_call>', [TextDelta('<tool_call>{"name": ""}</tool_call>')]),
    ("hermes", "ends with <tool_", [TextDelta("ends with <tool_")]),
    ("hermes", "white space stays \n", [TextDelta("white space stays \n")]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"b": "</tool_call> \\""}}</tool_call>',
        [ToolCallDelta("f", '{"b": "</tool_call> \\""}')],
    ),
    (
        "hermes",
        f'<tool_call>{{"name": "f", "arguments": {{"b": "not closed}}}}\n</tool_call>\n{CALL}',
        [TextDelta('<tool_call>{"name": "f", "arguments": {"b": "not closed}}\n</tool_call>'), MADE],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        [MADE],
    ),
    (
        "function tags",
        "<tool_call>\n<function=f>\n<parameter=b>\n1 </parameter> <\n</parameter>\n<parameter=a>\n1\n</parameter>\n"
        "</function>\n</tool_call>",
        [ToolCallDelta("f", '{"b": "1 </parameter> <", "a": 1}')],
    ),
    ("function tags", "<tool_call>\n<function=f>\n</function>\n</tool_call>", [ToolCallDelta("f", "{}")]),
    (
        "function tags",
        "<tool_call><function=f><parameter=a>1</function></tool_call>",
        [TextDelta("<tool_call><function=f><parameter=a>1</function></tool_call>")],
    ),
    (
        "key tags",
        '<tool_call>f\n<arg_key>b</arg_key>\n<arg_value>true</arg_value>\n<arg_key>c</arg_key><arg_value>{"k": [1]}'
        "</arg_value>\n</tool_call>",
        [ToolCallDelta("f", '{"b": "true", "c": {"k": [1]}}')],
    ),
    ("function tags around json", '<function=f>{"a": 1}</function>\n<function=g>{}</function>',
     [MADE, ToolCallDelta("g", "{}")]),
    (
        "function tags around json",
        '<function=f>{"b": "</function>"}</function>',
        [ToolCallDelta("f", '{"b": "</function>"}')],
    ),
    ("function tags around json", "<function=f>1</function>", [TextDelta("<function=f>1</function>")]),
    (
        "named function tags",
        '<function name="f"><param name="b"><![CDATA[a < b\n&amp;]]></param>\n<param name="c">{\'k\': [True]}</param>'
        "</function>",
        [ToolCallDelta("f", '{"b": "a < b\\n&amp;", "c": {"k": [true]}}')],
    ),
    (
        "named function tags",
        '<function name="f"><param name="b"><![CDATA[open</param></function>',
        [ToolCallDelta("f", '{"b": "<![CDATA[open"}')],
    ),
    (
        "opened and closed",
        "<|open|>response<|sep|>It <|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="f" index="1"<|sep|><|open|>argument key="a &amp; &quot;" type="string"<|sep|>1<|close|>'
        'argument<|sep|><|open|>argument key="a" type="number"<|sep|>1<|close|>argument<|sep|><|close|>call<|sep|>'
        "<|close|>tools<|sep|><|close|>message<|sep|>",
        [TextDelta("It"), ToolCallDelta("f", '{"a & \\"": "1", "a": 1}')],
    ),
    (
        "nested tags",
        f"hm{M}<tool_call>\n{M}<invoke name=\"f\">{M}<a>1{M}</a>{M}<b>1 < 2{M}</b>{M}<c>"
        f"{M}<k>{M}<item>x{M}</item>{M}</k>{M}<l>{M}</l>{M}</c>{M}</invoke>\n{M}</tool_call>",
        [TextDelta("hm"), ToolCallDelta("f", '{"a": 1, "b": "1 < 2", "c": {"k": ["x"], "l": ""}}')],
    ),
    ("nested tags", f'{M}<tool_call>{M}<invoke name="f">{M}<c>{M}</c>{M}</invoke>{M}</tool_call>',
     [ToolCallDelta("f", '{"c": {}}')]),
    ("key tags", "<tool_call>f\n</tool_call>", [ToolCallDelta("f", "{}")]),
    ("key tags", "<tool_call>f</tool_call>", [ToolCallDelta("f", "{}")]),
    ("llama json", '{"name": "f", "parameters": {"a": 1}}', [MADE]),
    ("llama json", '\n<|python_tag|>{"name": "f", "parameters": {"a": 1}}', [MADE]),
    ("llama json", '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
     [MADE, ToolCallDelta("g", "{}")]),
    ("llama json", 'It is {"name": "f", "parameters": {}}', [TextDelta('It is {"name": "f", "parameters": {}}')]),
    ("llama json", '{"answer": 42}', [TextDelta('{"answer": 42}')]),
    ("llama json", '<|python_tag|>search.call(query="x")', [TextDelta('<|python_tag|>search.call(query="x")')]),
    ("llama json", '{"name": "f", "parameters": {"a": 1}}; no', [MADE, TextDelta("; no")]),
    ("llama pythonic", "[f(a=1), g()]", [MADE, ToolCallDelta("g", "{}")]),
    ("llama pythonic", "[1] says so", [TextDelta("[1] says so")]),
    (
        "llama pythonic",
        "[f(b='it\\'s ] \"é\\u00e9\\n', c={'k': [None, True, -1.5e3], \"l\": {}})]",
        [ToolCallDelta("f", '{"b": "it\'s ] \\"éé\\n", "c": {"k": [null, true, -1500.0], "l": {}}}')],
    ),
    (
        "pythonic between marks",
        'ok<|tool_call_start|>[f(a=1), g(c={"k": null})]<|tool_call_end|>',
        [TextDelta("ok"), MADE, ToolCallDelta("g", '{"c": {"k": null}}')],
    ),
    ("pythonic lines", "<function_calls>\nf(a=1)\ng()\n</function_calls>", [MADE, ToolCallDelta("g", "{}")]),
    ("mistral list", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}]',
     [ToolCallDelta("f", '{"a": 1}', "abcdefghi")]),
    ("mistral list", "[TOOL_CALLS] no list", [TextDelta("[TOOL_CALLS] no list")]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{}',
     [MADE, ToolCallDelta("g", "{}", "abcdefghi")]),
    ("mistral", '[TOOL_CALLS]f{"a": 1}', [MADE]),
    (
        "deepseek v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n"
        '```json\n{"a": 1}\n```<｜tool▁call▁end｜>',
        [MADE],
    ),
    (
        "deepseek v3.1",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [MADE],
    ),
    (
        "kimi",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"a\": 1}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        [ToolCallDelta("f", '{"a": 1}', "functions.f:0")],
    ),
    (
        "gemma",
        "<|tool_call>call:f{a:1}<tool_call|>"
        '<|tool_call>call:g{b:<|"|>{"x": 1}, \'<|"|>,c:{k:[true,null,<|"|><|"|>]}}<tool_call|>',
        [MADE, ToolCallDelta("g", '{"b": "{\\"x\\": 1}, \'", "c": {"k": [true, null, ""]}}')],
    ),
    ("gemma", "<|tool_call>call:f{a:one}<tool_call|>", [TextDelta("<|tool_call>call:f{a:one}<tool_call|>")]),
    ("cohere actions",
     '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}}]<|END_ACTION|>',
     [MADE]),
    (
        "nemotron",
        '<TOOLCALL>\n{"name": "f", "arguments": {"a": 1}}\n{"name": "g", "arguments": {}}\n</TOOLCALL>',
        [MADE, ToolCallDelta("g", "{}")],
    ),
    ("functools", 'functools[{"name": "f", "arguments": {"a": 1}}]', [MADE]),
    (
        "invoke tags (deepseek)",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="b" string="true">1'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        [ToolCallDelta("f", '{"b": "1"}')],
    ),
    (
        "invoke tags (minimax)",
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</parameter>\n</invoke>\n<invoke name="g">\n'
        "</invoke>\n</minimax:tool_call>",
        [MADE, ToolCallDelta("g", "{}")],
    ),
]  # fmt: skip


@PORTIONS
@pytest.mark.parametrize(("name", "text", "expected"), SAMPLED)
def test_calls_are_separated_from_text(name: str, text: str, expected: list[Delta], portion: int) -> None:
    assert read_as(name, text, portion) == expected


def test_text_goes_out_as_soon_as_it_cannot_be_a_mark_any_more() -> None:
    reader = READINGS["hermes"].reader("", TOOLS)
    assert reader.feed("one ") == [TextDelta("one")]
    assert reader.feed("two <tool") == [TextDelta(" two")]
    assert reader.feed("box") == [TextDelta(" <toolbox")]
    assert reader.feed('<tool_call>{"name": "f", "arguments": {"a": 1}}') == []
    assert reader.feed("</tool_call>") == [MADE]


def test_where_no_mark_can_come_nothing_is_held_back() -> None:
    assert Reading().reader("", TOOLS).feed("one \n<") == [TextDelta("one \n<")]


def test_without_tools_calls_are_text_and_reasoning_is_read() -> None:
    reading = Reading(SYNTAXES[0], THINK)
    text = f"<think>hm</think>{CALL}"
    assert read(lambda: reading.reader("", []), [text]) == [ReasoningDelta("hm"), TextDelta(CALL)]


# ---- reasoning ----


@PORTIONS
@pytest.mark.parametrize(
    ("prompt_end", "text", "expected"),
    [
        ("assistant\n", "<think>\nhm hm\n</think>\n\nyes", [ReasoningDelta("hm hm"), TextDelta("yes")]),
        ("assistant\n<think>\n", "hm\n\nhm\n</think>\n\nyes", [ReasoningDelta("hm\n\nhm"), TextDelta("yes")]),
        ("assistant\n<think>\n\n</think>\n\n", "yes", [TextDelta("yes")]),
        ("What is <think>?\nassistant\n", "a mark", [TextDelta("a mark")]),
        ("<think>", "hm </thin", [ReasoningDelta("hm </thin")]),
        ("<think>", "hm\n", [ReasoningDelta("hm")]),
        ("", "\n<think>\n\n</think>\n\n", []),
        ("", f"<think>\n{CALL}\n</think>\n{CALL}", [ReasoningDelta(CALL), MADE]),
        ("", f"<think>1</think>\n{CALL}\n<think>2</think>\nyes",
         [ReasoningDelta("1"), MADE, ReasoningDelta("2"), TextDelta("yes")]),
        ("", "so \n<think>hm</think>\nyes", [TextDelta("so"), ReasoningDelta("hm"), TextDelta(" \nyes")]),
        ("", "no </think> here", [TextDelta("no </think> here")]),
        ("", "\n</think>\n\nyes </think>", [TextDelta("yes </think>")]),
        ("", f"</think>{CALL}</think>", [MADE, TextDelta("</think>")]),
        ("<think>", "hm</think></think>yes", [ReasoningDelta("hm"), TextDelta("</think>yes")]),
    ],
)  # fmt: skip
def test_reasoning_is_separated_from_text(prompt_end: str, text: str, expected: list[Delta], portion: int) -> None:
    reading = Reading(SYNTAXES[0], THINK)
    assert read(lambda: reading.reader(prompt_end, TOOLS), pieces(text, portion)) == expected


def test_a_call_without_a_mark_may_follow_reasoning() -> None:
    reader = TurnReader(next(s for s in SYNTAXES if s.name == "llama json"), THINK, TOOLS)
    text = '<think>{hm}</think>\n\n{"name": "f", "parameters": {"a": 1}}'
    assert read(lambda: reader, [text]) == [ReasoningDelta("{hm}"), MADE]


@pytest.mark.parametrize(
    ("name", "call", "prompt_end"),
    [
        ("hermes", CALL, ""),
        ("channels", " to=functions.f<|message|>{}<|call|><|start|>assistant", "<|start|>assistant"),
    ],
)
def test_more_calls_than_one_answer_may_have_are_text(name: str, call: str, prompt_end: str) -> None:
    found = read_as(name, call * (CALLS_IN_ANSWER + 44), prompt_end=prompt_end)
    calls = [delta for delta in found if isinstance(delta, ToolCallDelta)]
    text = "".join(delta.text for delta in found if isinstance(delta, TextDelta))
    assert len(calls) == CALLS_IN_ANSWER
    assert text.count("{") == call.count("{") * 44


@pytest.mark.parametrize(("characters", "is_read"), [(256, True), (257, False)])
def test_a_call_whose_name_no_request_may_have_is_text(characters: int, is_read: bool) -> None:
    text = CALL.replace('"f"', f'"{"n" * characters}"')
    (found,) = read_as("hermes", text)
    assert isinstance(found, ToolCallDelta) is is_read
    assert is_read or found == TextDelta(text)


# ---- channels ----

_ANALYSIS = "<|channel|>analysis<|message|>hm <|end|>"


@PORTIONS
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{_ANALYSIS}<|start|>assistant<|channel|>final<|message|>yes<|return|>",
         [ReasoningDelta("hm "), TextDelta("yes")]),
        (
            f"{_ANALYSIS}<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json"
            '<|message|>{"a": 1}<|call|>',
            [ReasoningDelta("hm "), MADE],
        ),
        (' to=functions.f<|channel|>commentary json<|message|>{"a": 1}', [MADE]),
        ('<|channel|>commentary to=functions.f code<|message|>{"a": 1}<|call|>', [MADE]),
        ("<|channel|>commentary<|message|>First,<|end|>", [TextDelta("First,")]),
        (
            " to=functions.f<|channel|>commentary<|message|>{bad<|call|>",
            [TextDelta(" to=functions.f<|channel|>commentary<|message|>{bad<|call|>")],
        ),
        (" to=python<|message|>1 + 1<|call|>", [TextDelta(" to=python<|message|>1 + 1<|call|>")]),
        ("Hello, world<|return|>", [TextDelta("Hello, world")]),
        ("Hello", [TextDelta("Hello")]),
        ("<|channel|>final<|message|>", []),
        ("<|channel|>final<|message|>a<|end|>b", [TextDelta("ab")]),
        ("<|channel|>final <|constrain|>json<|message|>{}", [TextDelta("{}")]),
        ("<|message|>ok", [TextDelta("ok")]),
        (" The answer is 42 <|message|>ok", [TextDelta(" The answer is 42 <|message|>ok")]),
        ("42 <|channel|>analysis<|message|>hm", [TextDelta("42 <|channel|>analysis<|message|>hm")]),
        ("42 to=functions.f<|message|>{}", [TextDelta("42 to=functions.f<|message|>{}")]),
        ("<|channel|>secret<|message|>ok", [TextDelta("<|channel|>secret<|message|>ok")]),
    ],
)  # fmt: skip
def test_messages_are_separated_by_their_headers(text: str, expected: list[Delta], portion: int) -> None:
    assert read_as("channels", text, portion, "<|end|><|start|>assistant") == expected


def test_a_prompt_may_end_within_a_message() -> None:
    prompt_end = "<|end|><|start|>assistant<|channel|>analysis<|message|>"
    expected = [ReasoningDelta("hm"), TextDelta("yes")]
    text = "hm<|end|><|start|>assistant<|channel|>final<|message|>yes<|return|>"
    assert read_as("channels", text, 5, prompt_end) == expected


@pytest.mark.parametrize(
    ("form", "header", "text", "expected"),
    [
        ("recipients", "<|channel|>analysis", "", []),
        ("recipients", "<|channel|>analysis", "hm", [TextDelta("hm")]),
        ("channels", " to=functions.f", "{bad", [TextDelta("{bad")]),
        ("channels", " to=functions.f", '{"a": 1}<|call|>', [MADE]),
    ],
)
def test_a_header_in_the_prompt_is_no_text_of_the_completion(
    form: str, header: str, text: str, expected: list[Delta]
) -> None:
    assert read_as(form, text, 5, f"<|start|>assistant{header}<|message|>") == expected


def test_without_tools_messages_to_tools_are_text() -> None:
    text = ' to=functions.f<|channel|>commentary<|message|>{"a": 1}<|call|>'
    assert read(lambda: READINGS["channels"].reader("<|start|>assistant", []), [text]) == [TextDelta(text)]


@pytest.mark.parametrize(
    "body",
    [
        "",
        "f",
        f'{M}<invoke name="f">',
        f'{M}<invoke name="f">{M}a>1{M}</a>{M}</invoke>',
        f'{M}<invoke name="f">{M}<a>1{M}</b>{M}</invoke>',
        f'{M}<invoke name="f">{M}<a>1{M}<b>2{M}</b>{M}</a>{M}</invoke>',
        f'{M}<invoke name="f">{M}<a>1{M}</a>over{M}</invoke>',
        f'{M}<invoke name="f">{f"{M}<c>" * 100}{f"{M}</c>" * 100}{M}</invoke>',
    ],
)
def test_elements_that_are_no_call_are_text(body: str) -> None:
    text = f"{M}<tool_call>{body}{M}</tool_call>"
    assert read_as("nested tags", text) == [TextDelta(text)]


def test_much_white_space_in_a_named_call_is_read_at_once() -> None:
    with pytest.raises(ValueError, match="no name"):
        read_named(" " * 100_000 + "f" + " " * 100_000 + "[ARGS]" + " " * 100_000, lambda _: {})
    (read_call,) = read_named(' f  [CALL_ID] 123456789 [ARGS] {"a": 1}', lambda _: {})
    assert read_call == ToolCallDelta("f", '{"a": 1}', "123456789")


def test_a_header_of_the_prompt_is_no_part_of_the_turn() -> None:
    unknown = "<|start|>assistant<|channel|>analysis<|message|>"
    assert read_as("recipients", "", 1, unknown) == []
    assert read_as("recipients", "hm<|eot|>", 1, unknown) == [TextDelta("hm<|eot|>")]
    called = "<|start|>assistant to=functions.f<|channel|>commentary<|message|>"
    assert read_as("channels", '{"a": 1}<|call|>', 1, called) == [MADE]
    assert read_as("channels", "hm<|call|>", 1, called) == [TextDelta("hm<|call|>")]


def test_recipients_are_read() -> None:
    text = (
        ' to=self<|message|>hm<|eom|><|start|>assistant to=f<|message|><atem:function_calls>\n<atem:invoke name="f">\n'
        '<atem:parameter name="a">1</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eom|><|start|>assistant'
        " to=user<|message|>yes<|eot|>"
    )
    assert read_as("recipients", text, 7, "<|start|>assistant") == [ReasoningDelta("hm"), MADE, TextDelta("yes")]


# ---- values that formats without quotes leave open ----


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "1", "1"),
        ({"type": "integer"}, "1", 1),
        ({"type": "number"}, "-1.5", -1.5),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "integer"}, "many", "many"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "1", "1"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "1", 1),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "x", "x"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"type": "array"}, '["x"]', ["x"]),
        ({"type": "object"}, "{'k': [1, True, None]}", {"k": [1, True, None]}),
        ({"type": "object"}, "{'k': 1} or so", "{'k': 1} or so"),
        ({}, "{'k': 1}", "{'k': 1}"),
        ({}, '{"k": 1}', {"k": 1}),
        ({}, '"quoted"', '"quoted"'),
        ({}, "plain", "plain"),
        ({"type": 7, "anyOf": 8, "enum": 9}, "1", 1),
    ],
)
def test_the_schema_of_a_parameter_types_its_value(schema: dict[str, Any], text: str, value: object) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": schema}}}}]
    turn = f"<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    (call,) = read(lambda: READINGS["key tags"].reader("", tools), [turn])
    assert isinstance(call, ToolCallDelta)
    assert json.loads(call.arguments) == {"x": value}


@pytest.mark.parametrize("tool", [{}, {"function": None}, {"function": {"name": 1, "parameters": []}}, {"name": "f"}])
def test_a_tool_without_a_usable_schema_is_no_obstacle(tool: dict[str, Any]) -> None:
    turn = "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
    assert read(lambda: READINGS["key tags"].reader("", [tool]), [turn]) == [ToolCallDelta("f", '{"x": 1}')]
