"""The table of syntaxes. Which one a model uses is found out from its template; no model's name is known here."""

from bombus_gateway.text.reading.bodies import BodyForm
from bombus_gateway.text.reading.json_calls import read_json, read_named, sections
from bombus_gateway.text.reading.literal_calls import gemma, read_pythonic
from bombus_gateway.text.reading.syntax import CallSyntax, Thinking
from bombus_gateway.text.reading.tagged_calls import FUNCTION_TAGS, KEY_TAGS, invoke_tags, tagged

_JSON_LIST = BodyForm(strings="json", bracket="[")


def json_between(name: str, opens: str, close: str) -> CallSyntax:
    """Return the syntax of JSON between two marks."""
    return CallSyntax(name, (opens,), BodyForm(close=close, strings="json"), read_json)


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

SYNTAXES: tuple[CallSyntax, ...] = (
    json_between("hermes", "<tool_call>", "</tool_call>"),
    CallSyntax("function tags", ("<tool_call>",), BodyForm(close="</tool_call>"), tagged(FUNCTION_TAGS)),
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
        gemma("<escape>"),
        inner=("<escape>",),
    ),
    CallSyntax(
        "pythonic between marks",
        ("<|tool_call_start|>",),
        BodyForm(close="<|tool_call_end|>"),
        read_pythonic,
        announced_by="<|tool_list_start|>",
    ),
    CallSyntax("pythonic lines", ("<function_calls>",), BodyForm(close="</function_calls>"), read_pythonic),
    json_between("cohere actions", "<|START_ACTION|>", "<|END_ACTION|>"),
    json_between("cohere markdown", "Action: ```json", "```"),
    json_between("nemotron", "<TOOLCALL>", "</TOOLCALL>"),
    json_between("phi", "<|tool_call|>", "<|/tool_call|>"),
    CallSyntax("functools", ("functools",), _JSON_LIST, read_json),
    CallSyntax("granite", ("<|tool_call|>",), _JSON_LIST, read_json),
    CallSyntax("json list after a mark", ("<tool_call>",), _JSON_LIST, read_json),
    _invoke("invoke tags (minimax)", "<minimax:tool_call>", "</minimax:tool_call>", ""),
    _invoke("invoke tags (deepseek)", "<｜DSML｜function_calls>", "</｜DSML｜function_calls>", "｜DSML｜"),
    _invoke("invoke tags", "<function_calls>", "</function_calls>", ""),
    CallSyntax("llama json", ("<|python_tag|>",), BodyForm(strings="json", bracket="{"), read_json, bare="{"),
    CallSyntax("json list", (), _JSON_LIST, read_json, bare="["),
    CallSyntax(
        "llama pythonic",
        ("<|python_start|>",),
        BodyForm(strings="python", bracket="["),
        read_pythonic,
        bare="[",
        inner=("<|python_end|>",),
    ),
)

# Marks around reasoning that are not simply a tag and its end tag.
THINKING: tuple[Thinking, ...] = (
    Thinking("<think>", "</think>"),
    Thinking("[THINK]", "[/THINK]"),
    Thinking("<seed:think>", "</seed:think>"),
    Thinking("<|START_THINKING|>", "<|END_THINKING|>"),
    Thinking("<|channel>thought", "<channel|>"),
    Thinking("<|inner_prefix|>", "<|inner_suffix|>"),
    Thinking("◁think▷", "◁/think▷"),
    Thinking("<unused94>thought", "<unused95>"),
)
