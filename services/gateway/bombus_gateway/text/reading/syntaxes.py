"""The table of call syntaxes. A model's template, not its name, determines which of them the model uses."""

from bombus_gateway.text.reading.bodies import BodyForm
from bombus_gateway.text.reading.json_calls import read_json, read_json_by_name, read_named, sections
from bombus_gateway.text.reading.literal_calls import gemma, read_pythonic
from bombus_gateway.text.reading.nested_tags import nested_tags
from bombus_gateway.text.reading.syntax import CallSyntax, Thinking
from bombus_gateway.text.reading.tagged_calls import (
    FUNCTION_TAGS,
    KEY_TAGS,
    NAMED_FUNCTION_TAGS,
    OPENED_AND_CLOSED,
    invoke_tags,
    key_tags,
    tagged,
)

_JSON_LIST = BodyForm(strings="json", bracket="[")


def json_between(name: str, opens: str, close: str, announced_by: str = "") -> CallSyntax:
    """Return the syntax of JSON between the marks `opens` and `close`."""
    form = BodyForm(close=close, strings="json")
    return CallSyntax(name, (opens,), form, read_json, announced_by=announced_by)


def _invoke(name: str, opens: str, close: str, prefix: str) -> CallSyntax:
    return CallSyntax(name, (opens,), BodyForm(close=close), tagged(invoke_tags(prefix)))


_DEEPSEEK = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
_DEEPSEEK_OPEN, _DEEPSEEK_CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DEEPSEEK_V3 = (
    r"<｜tool▁call▁begin｜>\w*<｜tool▁sep｜>(?P<name>[^\n<]+)\n```json\n(?P<arguments>.*?)\n?```<｜tool▁call▁end｜>"
)
_DEEPSEEK_V31 = r"<｜tool▁call▁begin｜>(?P<name>[^\n<]+)<｜tool▁sep｜>(?P<arguments>.*?)<｜tool▁call▁end｜>"
_KIMI = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
_KIMI_CALL = (
    r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[^<:\s]+)(?::\d+)?)\s*"
    r"<\|tool_call_argument_begin\|>(?P<arguments>.*?)<\|tool_call_end\|>"
)
_HUNYUAN = ":opensource"
_HUNYUAN_TAGS = ("tool_call", "arg_key", "arg_value")
_MINIMAX = "]<]minimax[>["

SYNTAXES: tuple[CallSyntax, ...] = (
    json_between("hermes", "<tool_call>", "</tool_call>", announced_by='<tool_call>\n{"name"'),
    CallSyntax(
        "function tags",
        ("<tool_call>",),
        BodyForm(close="</tool_call>"),
        tagged(FUNCTION_TAGS),
        announced_by="<tool_call>\n<function=",
    ),
    CallSyntax(
        "function tags (seed)", ("<seed:tool_call>",), BodyForm(close="</seed:tool_call>"), tagged(FUNCTION_TAGS)
    ),
    CallSyntax(
        "key tags",
        ("<tool_call>",),
        BodyForm(close="</tool_call>"),
        tagged(KEY_TAGS),
        inner=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    CallSyntax(
        "key tags (hunyuan)",
        (f"<tool_calls{_HUNYUAN}>",),
        BodyForm(close=f"</tool_calls{_HUNYUAN}>"),
        tagged(key_tags(_HUNYUAN)),
        inner=(
            f"<tool_sep{_HUNYUAN}>",
            *(f"<{slash}{tag}{_HUNYUAN}>" for tag in _HUNYUAN_TAGS for slash in ("", "/")),
        ),
    ),
    CallSyntax(
        "function tags around json",
        ("<function=",),
        BodyForm(close="</function>", strings="json"),
        sections(r"(?P<name>[^<>\s]+)>(?P<arguments>.*)"),
    ),
    CallSyntax(
        "named function tags", ('<function name="',), BodyForm(close="</function>"), tagged(NAMED_FUNCTION_TAGS)
    ),
    CallSyntax(
        "opened and closed",
        ("<|open|>tools<|sep|>",),
        BodyForm(close="<|close|>tools<|sep|>"),
        tagged(OPENED_AND_CLOSED),
    ),
    CallSyntax(
        "nested tags",
        (f"{_MINIMAX}<tool_call>",),
        BodyForm(close=f"{_MINIMAX}</tool_call>"),
        nested_tags(_MINIMAX),
    ),
    CallSyntax("mistral list", ("[TOOL_CALLS]",), _JSON_LIST, read_json),
    CallSyntax(
        "mistral",
        ("[TOOL_CALLS]",),
        BodyForm(strings="json", bracket="{", head=True),
        read_named,
        inner=("[ARGS]", "[CALL_ID]"),
    ),
    CallSyntax(
        "deepseek v3", (_DEEPSEEK_OPEN,), BodyForm(close=_DEEPSEEK_CLOSE), sections(_DEEPSEEK_V3), "", True, _DEEPSEEK
    ),
    CallSyntax(
        "deepseek v3.1",
        (_DEEPSEEK_OPEN,),
        BodyForm(close=_DEEPSEEK_CLOSE),
        sections(_DEEPSEEK_V31),
        ends_with_turn=True,
        inner=_DEEPSEEK,
    ),
    CallSyntax(
        "kimi",
        ("<|tool_calls_section_begin|>",),
        BodyForm(close="<|tool_calls_section_end|>"),
        sections(_KIMI_CALL),
        ends_with_turn=True,
        inner=_KIMI,
    ),
    CallSyntax("gemma", ("<|tool_call>",), BodyForm(close="<tool_call|>"), gemma('<|"|>'), inner=('<|"|>',)),
    CallSyntax(
        "gemma functions",
        ("<start_function_call>",),
        BodyForm(close="<end_function_call>"),
        gemma("<escape>", typed=True),
        inner=("<escape>",),
    ),
    CallSyntax(
        "pythonic between marks",
        ("<|tool_call_start|>",),
        BodyForm(close="<|tool_call_end|>"),
        read_pythonic,
        announced_by="<|tool_list_start|>",
    ),
    CallSyntax(
        "pythonic in a block of code",
        ("<|tool_call_start|>\n```python",),
        BodyForm(close="```\n<|tool_call_end|>"),
        read_pythonic,
    ),
    CallSyntax("pythonic lines", ("<function_calls>",), BodyForm(close="</function_calls>"), read_pythonic),
    json_between("cohere actions", "<|START_ACTION|>", "<|END_ACTION|>"),
    json_between("cohere markdown", "Action: ```json", "```"),
    json_between("nemotron", "<TOOLCALL>", "</TOOLCALL>"),
    json_between("phi", "<|tool_call|>", "<|/tool_call|>"),
    CallSyntax("functools", ("functools",), _JSON_LIST, read_json, announced_by="functools["),
    CallSyntax(
        "json by name (apertus)",
        ("<|tools_prefix|>",),
        BodyForm(close="<|tools_suffix|>", strings="json"),
        read_json_by_name,
        ends_with_turn=True,
    ),
    CallSyntax(
        "granite",
        ("<|tool_call|>",),
        _JSON_LIST,
        read_json,
        announced_by="<|tool_call|> followed by a JSON list",
    ),
    CallSyntax("json list after a mark", ("<tool_call>",), _JSON_LIST, read_json),
    _invoke("invoke tags (minimax)", "<minimax:tool_call>", "</minimax:tool_call>", ""),
    _invoke("invoke tags (deepseek)", "<｜DSML｜function_calls>", "</｜DSML｜function_calls>", "｜DSML｜"),
    _invoke("invoke tags (deepseek v4)", "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", "｜DSML｜"),
    _invoke("invoke tags", "<function_calls>", "</function_calls>", ""),
    CallSyntax(  # Llama 4's template writes the end of an empty code block before a call
        "llama json",
        ("<|python_tag|>", "<|python_end|>"),
        BodyForm(strings="json", bracket="{"),
        read_json,
        bare="{",
    ),
    CallSyntax("json list", (), _JSON_LIST, read_json, bare="["),
    CallSyntax(
        "llama pythonic",
        ("<|python_start|>",),
        BodyForm(strings="python", bracket="["),
        read_pythonic,
        bare="[",
    ),
)

# Marks around reasoning other than a tag and its end tag.
THINKING: tuple[Thinking, ...] = (
    Thinking("<think>", "</think>"),
    Thinking("[THINK]", "[/THINK]"),
    Thinking("<seed:think>", "</seed:think>"),
    Thinking("<|START_THINKING|>", "<|END_THINKING|>"),
    Thinking("<|channel>thought", "<channel|>"),
    Thinking("<|inner_prefix|>", "<|inner_suffix|>"),
    Thinking("◁think▷", "◁/think▷"),
    Thinking("<unused94>thought", "<unused95>"),
    Thinking("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
)

# Marks around the text of an answer that are not part of the answer: an opening mark, a closing mark, and an optional
# last mark.
FRAMES: tuple[tuple[str, ...], ...] = (
    ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
)
