"""How calls with arguments in JSON are written is found in the template, so that a call can be forced."""

import json

import pytest

from bombus_gateway.text.deltas import ToolCallDelta
from bombus_gateway.text.reading.call_text import CallText, calls_come_singly, find_call_text
from bombus_gateway.text.reading.finding import find_reading
from tests.gateway.reading.templates import CALLS, TOOLS, each, read, renderer, template

ENDS = ("<|close|>",)
FOUND: dict[str, CallText] = {
    "hermes": CallText(
        '\n<tool_call>\n{"name": "', '", "arguments": ', '}\n</tool_call>\n<tool_call>\n{"name": "', "}\n</tool_call>"
    ),
    "function tags around json": CallText("<function=", ">", "</function><function=", "</function>"),
    "deepseek v3.1": CallText(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜><｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "llama json": CallText('{"name": "', '", "parameters": ', '}; {"name": "', "}"),
    "json by name (apertus)": CallText('<|tools_prefix|>[{"', '": ', '}, {"', "}]<|tools_suffix|>"),
    # Further calls have numbers of their own.
    "cohere actions": CallText(
        '<|START_ACTION|>[\n{"tool_call_id": "0", "tool_name": "', '", "parameters": ', "", "}\n]<|END_ACTION|>"
    ),
}
JSON = {
    *FOUND, "deepseek v3", "cohere markdown", "nemotron", "phi", "functools", "granite", "json list after a mark",
    "json list",
}  # fmt: skip
SINGLY = {
    "hermes", "function tags", "function tags (seed)", "key tags", "function tags around json", "named function tags",
    "mistral", "gemma", "gemma functions", "llama json",
}  # fmt: skip


def found_in(source: str) -> CallText | None:
    render = renderer(source)
    return find_call_text(render, find_reading(render), ENDS)


@pytest.mark.parametrize("name", FOUND)
def test_what_is_around_calls_is_found(name: str) -> None:
    assert found_in(template(CALLS[name])) == FOUND[name]


@pytest.mark.parametrize("name", CALLS)
def test_what_is_written_is_read_back_and_other_syntaxes_than_json_have_none(name: str) -> None:
    render = renderer(template(CALLS[name]))
    reading = find_reading(render)
    text = find_call_text(render, reading, ENDS)
    assert (text is not None) is (name in JSON)
    if text is not None:
        calls = [("f", '{"a": 1, "b": "x"}'), ("g", "{}")][: 2 if text.between else 1]
        deltas = read(lambda: reading.reader("<|turn|>assistant\n", TOOLS), [text.write(calls)])
        assert all(isinstance(delta, ToolCallDelta) for delta in deltas)
        made = [(d.name, json.loads(d.arguments)) for d in deltas if isinstance(d, ToolCallDelta)]
        assert made == [(name, json.loads(arguments)) for name, arguments in calls]


def test_reasoning_that_a_template_writes_before_a_call_is_no_part_of_it() -> None:
    empty = "{% if not m.reasoning_content %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    source = template(empty + CALLS["hermes"], reasoning="<think>{{ m.reasoning_content }}</think>")
    text = found_in(source)
    assert text is not None
    assert text.opens.lstrip() == FOUND["hermes"].opens.lstrip()


def test_a_turn_whose_end_is_not_known_has_none() -> None:
    render = renderer(template(CALLS["hermes"]))
    assert find_call_text(render, find_reading(render), ()) is None


def test_a_template_that_loses_or_refuses_calls_has_none() -> None:
    assert found_in(template()) is None
    assert found_in("{{ raise_exception('no') if messages[-1].tool_calls else messages[-1].content }}") is None


def test_calls_that_only_come_alone_can_be_written_alone() -> None:
    one = "{% if m.tool_calls|length > 1 %}{{ refuse() }}{% endif %}" + CALLS["hermes"]
    text = found_in(template(one))
    assert text is None or text.between == ""


@pytest.mark.parametrize("name", CALLS)
def test_calls_can_be_read_one_by_one_unless_they_are_a_list(name: str) -> None:
    render = renderer(template(CALLS[name]))
    assert calls_come_singly(render, find_reading(render)) is (name in SINGLY)


def test_calls_do_not_come_singly_where_the_template_explains_a_list_and_writes_them_one_by_one() -> None:
    render = renderer("{% if tools %}Write: functools[{}, ...]{% endif %}" + template(CALLS["llama json"]))
    assert not calls_come_singly(render, find_reading(render))


def test_a_template_without_calls_has_none_that_come_singly() -> None:
    render = renderer(template(each("")))
    assert not calls_come_singly(render, find_reading(render))
