"""Small chat templates, one for each syntax of calls, and what a reader makes of a text."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from bombus.text.chat_template import TemplateRefused
from bombus_gateway.text.deltas import Delta, ReasoningDelta, TextDelta
from bombus_gateway.text.reading.channels import CHANNELS, ChannelReader
from bombus_gateway.text.reading.finding import Reading, RenderText
from bombus_gateway.text.reading.syntaxes import FRAMES, SYNTAXES
from bombus_gateway.text.reading.turns import TurnReader

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "object"}},
            },
        },
    }
    for name in ("f", "g")
]

_ENVIRONMENT = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
_ENVIRONMENT.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
_ENVIRONMENT.filters["python"] = lambda value: value if isinstance(value, dict | list) else repr(value)

_TURNS = """
{%- for m in messages -%}
{{ '<|turn|>' + m.role + '\n' }}
{%- if m.reasoning_content %}@REASONING@{% endif -%}
{{ m.content or '' }}
{%- if m.tool_calls %}@CALLS@{% endif -%}
{{ '<|close|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|turn|>assistant\n' }}@PROMPT@{% endif -%}
"""


def template(calls: str = "", reasoning: str = "", prompt: str = "") -> str:
    """Return a template that writes calls and reasoning by these pieces of template."""
    return _TURNS.replace("@CALLS@", calls).replace("@REASONING@", reasoning).replace("@PROMPT@", prompt)


def renderer(source: str) -> RenderText:
    compiled = _ENVIRONMENT.from_string(source)

    def render(
        messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], add_generation_prompt: bool
    ) -> str:
        try:
            return compiled.render(messages=messages, tools=tools, add_generation_prompt=add_generation_prompt)
        except (jinja2.TemplateError, TypeError) as error:
            raise TemplateRefused(str(error)) from error

    return render


def each(call: str, before: str = "", after: str = "", between: str = "") -> str:
    """Return a piece of template that writes `call` for each call `c`, with the id `i`."""
    gap = "{% if not loop.last %}" + between + "{% endif %}" if between else ""
    loop = "{% for t in m.tool_calls %}{% set c = t.function %}{% set i = t.id %}" + call + gap + "{% endfor %}"
    return before + loop + after


_NAMED_JSON = '{"name": "{{ c.name }}", "arguments": {{ c.arguments|tojson }}}'
_LINE = "{{ '\n' }}"
_FUNCTION_TAGS = (
    "<function={{ c.name }}>" + _LINE + "{% for k, v in c.arguments.items() %}"
    "<parameter={{ k }}>"
    + _LINE
    + "{{ v if v is string else v|tojson }}"
    + _LINE
    + "</parameter>"
    + _LINE
    + "{% endfor %}"
    "</function>" + _LINE
)
_INVOKE = (
    '<@invoke name="{{ c.name }}">' + _LINE + "{% for k, v in c.arguments.items() %}"
    '<@parameter name="{{ k }}">{{ v if v is string else v|tojson }}</@parameter>'
    + _LINE
    + "{% endfor %}</@invoke>"
    + _LINE
)
_PYTHONIC = (
    "{{ c.name }}({% for k, v in c.arguments.items() %}{{ k }}={{ v|python }}"
    "{% if not loop.last %}, {% endif %}{% endfor %})"
)
_GEMMA = (
    "{% macro g(v) %}{% if v is string %}@{{ v }}@{% elif v is mapping %}"
    "{ {%- for k, x in v.items() %}{{ k }}:{{ g(x) }}{% if not loop.last %},{% endif %}{% endfor -%} }"
    "{% elif v is iterable %}[{% for x in v %}{{ g(x) }}{% if not loop.last %},{% endif %}{% endfor %}]"
    "{% else %}{{ v|tojson }}{% endif %}{% endmacro %}"
)

_NESTED = (
    "{% macro n(v) %}{% if v is mapping %}{% for k, x in v.items() %}@<{{ k }}>{{ n(x) }}@</{{ k }}>{% endfor %}"
    "{% elif v is iterable and v is not string %}{% for x in v %}@<item>{{ n(x) }}@</item>{% endfor %}"
    "{% else %}{{ v if v is string else v|tojson }}{% endif %}{% endmacro %}"
)
_OPENED = (
    '<|open|>call tool="{{ c.name }}" index="{{ loop.index }}"<|sep|>{% for k, v in c.arguments.items() %}'
    '<|open|>argument key="{{ k }}" type="{{ "string" if v is string else "number" }}"<|sep|>'
    "{{ v if v is string else v|tojson }}<|close|>argument<|sep|>{% endfor %}<|close|>call<|sep|>"
)


def _gemma(quote: str, opens: str, close: str) -> str:
    return _GEMMA.replace("@", quote) + each(opens + "call:{{ c.name }}{{ g(c.arguments) }}" + close)


# By the names of syntaxes: how a template writes calls.
CALLS: dict[str, str] = {
    "hermes": each(_LINE + "<tool_call>" + _LINE + _NAMED_JSON + _LINE + "</tool_call>"),
    "function tags": each("<tool_call>" + _LINE + _FUNCTION_TAGS + "</tool_call>"),
    "function tags (seed)": each("<seed:tool_call>" + _LINE + _FUNCTION_TAGS + "</seed:tool_call>"),
    "key tags": each(
        "<tool_call>{{ c.name }}"
        + _LINE
        + "{% for k, v in c.arguments.items() %}<arg_key>{{ k }}</arg_key>"
        + _LINE
        + "<arg_value>{{ v if v is string else v|tojson }}</arg_value>"
        + _LINE
        + "{% endfor %}</tool_call>"
    ),
    "key tags (hunyuan)": each(
        "<tool_call@>{{ c.name }}<tool_sep@>"
        + _LINE
        + "{% for k, v in c.arguments.items() %}<arg_key@>{{ k }}</arg_key@>"
        + _LINE
        + "<arg_value@>{{ v if v is string else v|tojson }}</arg_value@>"
        + _LINE
        + "{% endfor %}</tool_call@>"
        + _LINE,
        "<tool_calls@>" + _LINE,
        "</tool_calls@>",
    ).replace("@", ":opensource"),
    "function tags around json": each("<function={{ c.name }}>{{ c.arguments|tojson }}</function>"),
    "named function tags": each(
        '<function name="{{ c.name }}">{% for k, v in c.arguments.items() %}<param name="{{ k }}">'
        "{% if v is string and '\n' in v %}<![CDATA[{{ v }}]]>{% else %}{{ v }}{% endif %}</param>{% endfor %}"
        "</function>"
    ),
    "opened and closed": each(_OPENED, "<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
    "nested tags": (
        _NESTED
        + each(
            '@<invoke name="{{ c.name }}">{{ n(c.arguments) }}@</invoke>' + _LINE,
            "@<tool_call>" + _LINE,
            "@</tool_call>",
        )
    ).replace("@", "]<]minimax[>["),
    "mistral list": each(
        '{"name": "{{ c.name }}", "arguments": {{ c.arguments|tojson }}, "id": "{{ i }}"}', "[TOOL_CALLS] [", "]", ", "
    ),
    "mistral": each("[TOOL_CALLS]{{ c.name }}[CALL_ID]{{ i }}[ARGS]{{ c.arguments|tojson }}"),
    "deepseek v3": each(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.name }}"
        + _LINE
        + "```json"
        + _LINE
        + "{{ c.arguments|tojson }}"
        + _LINE
        + "```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        _LINE,
    ),
    "deepseek v3.1": each(
        "<｜tool▁call▁begin｜>{{ c.name }}<｜tool▁sep｜>{{ c.arguments|tojson }}<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "kimi": each(
        "<|tool_call_begin|>{{ i }}<|tool_call_argument_begin|>{{ c.arguments|tojson }}<|tool_call_end|>",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
    ),
    "gemma": _gemma('<|"|>', "<|tool_call>", "<tool_call|>"),
    "gemma functions": _gemma("<escape>", "<start_function_call>", "<end_function_call>"),
    "pythonic between marks": each(_PYTHONIC, "<|tool_call_start|>[", "]<|tool_call_end|>", ", "),
    "pythonic in a block of code": each(
        _PYTHONIC + _LINE,
        "<|tool_call_start|>" + _LINE + "```python" + _LINE,
        "```" + _LINE + "<|tool_call_end|>",
    ),
    "pythonic lines": each(_PYTHONIC + _LINE, "<function_calls>" + _LINE, "</function_calls>"),
    "cohere actions": each(
        '{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ c.name }}", "parameters": {{ c.arguments|tojson }}}',
        "<|START_ACTION|>[" + _LINE,
        _LINE + "]<|END_ACTION|>",
        "," + _LINE,
    ),
    "cohere markdown": each(
        '{"tool_name": "{{ c.name }}", "parameters": {{ c.arguments|tojson }}}',
        "Action: ```json" + _LINE + "[",
        "]" + _LINE + "```",
        ", ",
    ),
    "nemotron": each(_NAMED_JSON, "<TOOLCALL>[", "]</TOOLCALL>", ", "),
    "phi": each(_NAMED_JSON, "<|tool_call|>[", "]<|/tool_call|>", ", "),
    "functools": each(_NAMED_JSON, "functools[", "]", ", "),
    "granite": each(_NAMED_JSON, "<|tool_call|>[", "]", ", "),
    "json list after a mark": each(_NAMED_JSON, "<tool_call>[", "]", ", "),
    "json by name (apertus)": each(
        '{"{{ c.name }}": {{ c.arguments|tojson }}}', "<|tools_prefix|>[", "]<|tools_suffix|>", ", "
    ),
    "invoke tags (minimax)": each(_INVOKE.replace("@", ""), "<minimax:tool_call>" + _LINE, "</minimax:tool_call>"),
    "invoke tags (deepseek)": each(
        _INVOKE.replace("@", "｜DSML｜"), "<｜DSML｜function_calls>" + _LINE, "</｜DSML｜function_calls>"
    ),
    "invoke tags (deepseek v4)": each(
        _INVOKE.replace("@", "｜DSML｜"), "<｜DSML｜tool_calls>" + _LINE, "</｜DSML｜tool_calls>"
    ),
    "invoke tags": each(_INVOKE.replace("@", ""), "<function_calls>" + _LINE, "</function_calls>"),
    "llama json": each('{"name": "{{ c.name }}", "parameters": {{ c.arguments|tojson }}}', between="; "),
    "json list": each(_NAMED_JSON, "[", "]", ", "),
    "llama pythonic": each(_PYTHONIC, "[", "]", ", "),
}
assert set(CALLS) == {syntax.name for syntax in SYNTAXES}

READINGS: dict[str, Reading] = {
    **{syntax.name: Reading(syntax) for syntax in SYNTAXES},
    **{form.name: Reading(channels=form) for form in CHANNELS},
}
READINGS["opened and closed"] = replace(READINGS["opened and closed"], frames=FRAMES[0])


def read(make: Callable[[], TurnReader | ChannelReader], pieces: Iterable[str]) -> list[Delta]:
    """Return the deltas of a text that arrives in pieces, with neighbours of a kind joined."""
    reader = make()
    deltas = [delta for piece in pieces for delta in reader.feed(piece)] + reader.finish()
    joined: list[Delta] = []
    for delta in deltas:
        last = joined[-1] if joined else None
        if isinstance(delta, TextDelta) and isinstance(last, TextDelta):
            joined[-1] = TextDelta(last.text + delta.text)
        elif isinstance(delta, ReasoningDelta) and isinstance(last, ReasoningDelta):
            joined[-1] = ReasoningDelta(last.text + delta.text)
        else:
            joined.append(delta)
    return joined
