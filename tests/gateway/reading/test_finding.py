"""How calls and reasoning are written is found from the template, whatever the model is called."""

import json
from typing import Any

import pytest

from bombus.text.chat_template import TemplateRefused
from bombus_gateway.text.deltas import ReasoningDelta, TextDelta, ToolCallDelta
from bombus_gateway.text.reading.finding import Reading, find_reading
from bombus_gateway.text.reading.syntaxes import THINKING
from tests.gateway.reading.templates import CALLS, TOOLS, each, read, renderer, template


@pytest.mark.parametrize("name", CALLS)
def test_the_syntax_of_calls_is_found_in_the_template(name: str) -> None:
    assert find_reading(renderer(template(CALLS[name]))).calls == name


@pytest.mark.parametrize("name", CALLS)
def test_what_the_template_writes_for_calls_is_read_back(name: str) -> None:
    render = renderer(template(CALLS[name]))
    calls = [("f", {"a": -1, "b": "x, y"}), ("g", {"c": {"k": [1.5, True, {"l": "z"}]}})]
    listed = [
        {"id": f"functions.{name}:{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(calls)
    ]
    prompt = render([], TOOLS, True)
    turn = render([{"role": "assistant", "content": "", "tool_calls": listed}], TOOLS, False).removeprefix(prompt)
    deltas = read(lambda: find_reading(render).reader(prompt, TOOLS), [turn.removesuffix("<|close|>\n")])
    assert [(call.name, json.loads(call.arguments)) for call in deltas if isinstance(call, ToolCallDelta)] == calls
    assert not [delta for delta in deltas if isinstance(delta, TextDelta)]


def test_marks_that_no_table_has_are_learned_from_the_template() -> None:
    source = template(each('<|do|>\n{"name": "{{ c.name }}", "parameters": {{ c.arguments|tojson }}}<|done|>'))
    reading = find_reading(renderer(source))
    assert reading.calls == "json between <|do|> and <|done|>"
    assert reading.markers == {"<|do|>", "<|done|>"}
    deltas = read(
        lambda: reading.reader("", TOOLS), ['hm <|do|>{"name": "f", "parameters": {"b": "<|done|>"}}<|done|>']
    )
    assert deltas == [TextDelta("hm"), ToolCallDelta("f", '{"b": "<|done|>"}')]


def test_a_template_that_loses_calls_has_no_syntax_unless_it_announces_one() -> None:
    assert find_reading(renderer(template())) == Reading()
    announcing = "{% if tools %}<|tool_list_start|>{{ tools|tojson }}<|tool_list_end|>{% endif %}" + template()
    assert find_reading(renderer(announcing)).calls == "pythonic between marks"
    explaining = "{% if tools %}Write: {{ '<tool_call>\n{\"name\": ...}\n</tool_call>' }}{% endif %}" + template()
    assert find_reading(renderer(explaining)).calls == "hermes"


def test_calls_are_read_as_the_template_explains_them_and_as_it_writes_them_in_the_history_without_the_mark() -> None:
    source = "{% if tools %}Write: functools[{}, ...]{% endif %}" + template(CALLS["llama json"])
    reading = find_reading(renderer(source))
    assert reading.calls == "functools"
    explained = 'functools[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]'
    written = '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}'
    for text in (explained, written):
        deltas = read(lambda: reading.reader("", TOOLS), list(text))
        assert deltas == [ToolCallDelta("f", '{"a": 1}'), ToolCallDelta("g", "{}")]


def test_where_a_template_writes_all_values_as_strings_the_schema_types_them() -> None:
    value = "<escape>{{ v }}<escape>{% if not loop.last %},{% endif %}"
    pairs = "{% for k, v in c.arguments.items() %}{{ k }}:" + value + "{% endfor %}"
    call = "<start_function_call>call:{{ c.name + '{' }}" + pairs + "}<end_function_call>"
    reading = find_reading(renderer(template(each(call))))
    assert reading.calls == "gemma functions"
    arguments = "a:<escape>1<escape>,b:<escape>2<escape>,d:<escape>3<escape>"
    text = f"<start_function_call>call:f{{{arguments}}}<end_function_call>"
    assert read(lambda: reading.reader("", TOOLS), [text]) == [ToolCallDelta("f", '{"a": 1, "b": "2", "d": "3"}')]


def test_a_template_that_refuses_everything_is_read_as_text() -> None:
    def refuse(*_: Any) -> str:
        raise TemplateRefused("no")

    assert find_reading(refuse) == Reading()


def test_a_template_that_refuses_parallel_calls_and_wants_no_content_is_read_all_the_same() -> None:
    picky = "{% if m.tool_calls|length > 1 or m.content is string %}{{ 1 + 'refused' }}{% endif %}"
    assert find_reading(renderer(template(picky + CALLS["llama json"]))).calls == "llama json"


def test_a_template_that_writes_marks_around_an_empty_text_before_a_call_is_read() -> None:
    source = template("<|python_start|>{{ m.content }}<|python_end|>" + CALLS["llama json"])
    reading = find_reading(renderer(source))
    assert reading.calls == "llama json"
    text = '{"name": "f", "parameters": {}}'
    assert read(lambda: reading.reader("", TOOLS), [text]) == [ToolCallDelta("f", "{}")]


def test_of_two_syntaxes_that_read_the_calls_the_one_that_leaves_less_text_is_chosen() -> None:
    render = renderer(template("<tool_calls>" + CALLS["hermes"] + "</tool_calls>"))
    assert find_reading(render).calls == "hermes"
    assert find_reading(renderer(template(CALLS["phi"]))).calls == "phi"
    assert find_reading(renderer(template(CALLS["granite"]))).calls == "granite"


# ---- reasoning ----


@pytest.mark.parametrize("thinking", THINKING, ids=lambda thinking: thinking.open)
def test_marks_around_reasoning_are_found_where_the_template_writes_it(thinking: Any) -> None:
    reasoning = f"{thinking.open}{{{{ m.reasoning_content }}}}{thinking.close}"
    reading = find_reading(renderer(template(CALLS["hermes"], reasoning)))
    assert (reading.reasoning, reading.calls) == (thinking.open, "hermes")
    text = f"{thinking.open}\nhm\n{thinking.close}\n\nyes"
    assert read(lambda: reading.reader("", TOOLS), [text]) == [ReasoningDelta("hm"), TextDelta("yes")]


def test_a_tag_and_its_end_are_marks_without_a_table() -> None:
    source = template(reasoning="<musing>{{ '\n' + m.reasoning_content + '\n' }}</musing>")
    assert find_reading(renderer(source)).reasoning == "<musing>"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (template(prompt="{{ '<think>\n' }}"), "<think>"),
        (template(prompt="{{ '[THINK]\n\n[/THINK]\n' }}"), "[THINK]"),
        (template().replace("m.content or ''", "(m.content or '').split('</think>')[-1]"), "<think>"),
        (template(prompt="</think>"), "<think>"),
        (template().replace("{{ m.content", "<think></think>{{ m.content"), "<think>"),
        ("Think first: <think> ... </think>" + template(), "<think>"),
        (template(), ""),
        (template(reasoning="{{ m.reasoning_content }}"), ""),
    ],
)
def test_reasoning_that_the_history_drops_is_found_in_the_prompt_or_by_being_dropped(source: str, found: str) -> None:
    assert find_reading(renderer(source)).reasoning == found


def test_calls_are_found_after_reasoning_that_the_prompt_opened() -> None:
    source = template("</think>" + CALLS["deepseek v3.1"], "", "<think>")
    reading = find_reading(renderer(source.replace("{%- if m.tool", "<think>{%- if m.tool")))
    assert (reading.calls, reading.reasoning) == ("deepseek v3.1", "<think>")


def test_a_word_with_a_colon_that_the_model_writes_before_its_text_is_no_part_of_it() -> None:
    source = template(CALLS["hermes"], prompt="").replace(
        "{{ m.content", "{% if m.role == 'assistant' and m.content %}助手：{% endif %}{{ m.content"
    )
    reading = find_reading(renderer(source))
    assert (reading.lead, reading.calls) == ("助手：", "hermes")
    for text, said in (("助手：It is 助手：so.", "It is 助手：so."), ("助手", "助手"), ("It is so.", "It is so.")):
        assert read(lambda: reading.reader("", TOOLS), list(text)) == [TextDelta(said)]
    assert find_reading(renderer(template(CALLS["hermes"]))).lead == ""


def test_marks_around_the_text_of_an_answer_are_no_part_of_it() -> None:
    framed = "<|open|>response<|sep|>{{ m.content or '' }}<|close|>response<|sep|>"
    source = template(
        CALLS["opened and closed"] + "<|close|>message<|sep|>",
        "<|open|>think<|sep|>{{ m.reasoning_content }}<|close|>think<|sep|>",
    ).replace("{{ m.content or '' }}", framed)
    reading = find_reading(renderer(source))
    assert (reading.calls, reading.reasoning) == ("opened and closed", "<|open|>think<|sep|>")
    assert {"<|open|>", "<|close|>", "<|sep|>"} <= reading.markers
    text = "hm<|close|>think<|sep|><|open|>response<|sep|>yes \n<|close|>response<|sep|><|close|>message<|sep|>"
    for tools in (TOOLS, []):
        deltas = read(lambda tools=tools: reading.reader("<|open|>think<|sep|>", tools), list(text))  # type: ignore[misc]
        assert deltas == [ReasoningDelta("hm"), TextDelta("yes \n")]


# ---- channels ----

_CHANNELS = """
{%- for m in messages -%}
{{ '<|start|>' + m.role }}
{%- if m.tool_calls %}{% set c = m.tool_calls[0].function -%}
{{ ' to=functions.' + c.name }}<|channel|>commentary json<|message|>{{ c.arguments|tojson }}<|call|>
{%- else %}<|channel|>final<|message|>{{ m.content }}<|end|>{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|start|>assistant{% endif -%}
"""


def test_channels_are_found_in_the_template() -> None:
    reading = find_reading(renderer(_CHANNELS))
    assert (reading.calls, reading.reasoning) == ("channels", "channels")
    assert {"<|channel|>", "<|message|>", "<|call|>", "<|return|>", "<|constrain|>"} <= reading.markers


_RECIPIENTS = """
{%- for m in messages -%}
{{ '<|start|>' + m.role }}
{%- if m.tool_calls %}{% for t in m.tool_calls %}{% set c = t.function -%}
{{ ' to=' + c.name }}<|message|><atem:function_calls>
<atem:invoke name="{{ c.name }}">
{% for k, v in c.arguments.items() -%}
<atem:parameter name="{{ k }}">{{ v if v is string else v|tojson }}</atem:parameter>
{% endfor -%}
</atem:invoke>
</atem:function_calls>{% if loop.last %}<|eot|>{% else %}<|eom|><|start|>assistant{% endif %}{% endfor %}
{%- else %} to=user<|message|>{{ m.content }}<|eot|>{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|start|>assistant{% endif -%}
"""


_RECIPIENTS_IN_LINES = """
{%- for m in messages -%}
{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}
{%- if m.role == 'assistant' %}
{%- if m.content %}{{ '>>>all\n' + m.content }}{% endif %}
{%- for t in m.tool_calls %}{{ '>>>' + t.function.name + '\n' }}{{ t.function.arguments|tojson }}{% endfor %}
{%- else %}{{ m.content }}{% endif %}<|eot_id|>
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n>>>' }}{% endif -%}
"""


@pytest.mark.parametrize("portion", [1, 7, 1000])
def test_recipients_in_lines_are_found_in_the_template_and_read(portion: int) -> None:
    reading = find_reading(renderer(_RECIPIENTS_IN_LINES))
    assert (reading.calls, reading.reasoning) == ("recipients in lines", "")
    doctest = "Try:\n>>> f(1)\n2\n>>> f\n3"
    for text, deltas in (
        (f"all\n{doctest}", [TextDelta(doctest)]),
        ('f\n{"a": 1}>>>g\n{}', [ToolCallDelta("f", '{"a": 1}'), ToolCallDelta("g", "{}")]),
        ('all\nLet me look.>>>f\n{"a": 1}', [TextDelta("Let me look."), ToolCallDelta("f", '{"a": 1}')]),
    ):
        pieces = [text[start : start + portion] for start in range(0, len(text), portion)]
        assert read(lambda: reading.reader("user\n\n>>>", TOOLS), pieces) == deltas


def test_recipients_are_found_in_the_template() -> None:
    assert find_reading(renderer(_RECIPIENTS)).calls == "recipients"
