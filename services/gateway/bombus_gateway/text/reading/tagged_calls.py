"""Reads tool calls with a pair of tags around each argument. The tool's schema determines the types of the values."""

import re
from dataclasses import dataclass
from typing import Any

from bombus_gateway.text.deltas import ToolCallDelta
from bombus_gateway.text.reading.syntax import ReadBody
from bombus_gateway.text.reading.values import Schemas, make_call, typed_value


@dataclass(frozen=True)
class TagForm:
    """Patterns for a call's tags. `call` has the group `name`; `parameter` has `name`, `value` and optionally
    `is_string`.

    `is_string` matches if the call itself says that the value is a string. `end` closes a call. `trimmed` says whether
    the line breaks around a value are dropped, and `entities` says whether names contain XML entities.
    """

    call: str
    parameter: str
    end: str
    trimmed: bool = False
    entities: bool = False


FUNCTION_TAGS = TagForm(
    call=r"<function=(?P<name>[\w.:/-]+)>",
    parameter=r"<parameter=(?P<name>[^>\n]+)>(?P<value>.*?)</parameter>\s*(?=<parameter=|</function>)",
    end=r"</function>",
    trimmed=True,
)
KEY_TAGS = TagForm(
    call=r"(?P<name>[\w.:/-]+)",
    parameter=r"<arg_key>(?P<name>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>\s*(?=<arg_key>|\Z)",
    end=r"\Z",
)

# Multi-line values may be in CDATA.
NAMED_FUNCTION_TAGS = TagForm(
    call=r'(?P<name>[^"\n<>]+)">',
    parameter=(
        r'<param name="(?P<name>[^"\n]+)">(?P<quoted><!\[CDATA\[)?(?P<value>.*?)(?(quoted)\]\]>)</param>'
        r"\s*(?=<param |\Z)"
    ),
    end=r"\Z",
)
OPENED_AND_CLOSED = TagForm(
    call=r'<\|open\|>call tool="(?P<name>[^"\n]+)"(?: index="\d+")?<\|sep\|>',
    parameter=(
        r'<\|open\|>argument key="(?P<name>[^"\n]+)" type="(?:(?P<is_string>string)|\w+)"<\|sep\|>(?P<value>.*?)'
        r"<\|close\|>argument<\|sep\|>\s*(?=<\|open\|>argument|<\|close\|>call)"
    ),
    end=r"<\|close\|>call<\|sep\|>",
    entities=True,
)


def key_tags(suffix: str) -> TagForm:
    """Return the form of `<tool_call>f<tool_sep>` with key and value tags. Every tag name ends with `suffix`."""
    tag = re.escape(suffix)
    return TagForm(
        call=rf"<tool_call{tag}>(?P<name>[\w.:/-]+)<tool_sep{tag}>",
        parameter=(
            rf"<arg_key{tag}>(?P<name>[^<]+)</arg_key{tag}>\s*<arg_value{tag}>(?P<value>.*?)</arg_value{tag}>"
            rf"\s*(?=<arg_key{tag}>|</tool_call{tag}>)"
        ),
        end=rf"</tool_call{tag}>",
    )


def invoke_tags(prefix: str, around: str = "") -> TagForm:
    """Return the form of `<invoke name="f">`, in which each tag's name begins with `prefix`.

    `around` is the name of a tag that may enclose calls.
    """
    tag = re.escape(prefix)
    opens, closes = (rf"(?:<{tag}{around}>\s*)?", rf"(?:\s*</{tag}{around}>)?") if around else ("", "")
    return TagForm(
        call=rf'{opens}<{tag}invoke name="(?P<name>[^"\n]+)">',
        parameter=(
            rf'<{tag}parameter name="(?P<name>[^"\n]+)"(?: string="(?:(?P<is_string>true)|false)")?>(?P<value>.*?)'
            rf"</{tag}parameter>\s*(?=<{tag}parameter|</{tag}invoke>)"
        ),
        end=rf"</{tag}invoke>{closes}",
    )


def tagged(form: TagForm) -> ReadBody:
    """Return a reader of bodies that contain one or more calls in this form."""
    call, end = re.compile(rf"\s*{form.call}\s*", re.DOTALL), re.compile(rf"{form.end}\s*")
    parameter = re.compile(form.parameter, re.DOTALL)

    def read(body: str, schemas: Schemas) -> list[ToolCallDelta]:
        calls: list[ToolCallDelta] = []
        at = 0
        while at < len(body) or not calls:
            opened = call.match(body, at)
            if opened is None:
                raise ValueError(f"not a call at {at}")
            name = _name(form, opened)
            arguments: dict[str, Any] = {}
            at = opened.end()
            while found := parameter.match(body, at):
                arguments[_name(form, found)] = _value(form, found, name, schemas)
                at = found.end()
            closed = end.match(body, at)
            if closed is None:
                raise ValueError(f"a call is not closed at {at}")
            calls.append(make_call(name, arguments))
            at = closed.end()
        return calls

    return read


def _name(form: TagForm, found: re.Match[str]) -> str:
    name = found["name"].strip()
    return name.replace("&quot;", '"').replace("&amp;", "&") if form.entities else name


def _value(form: TagForm, found: re.Match[str], tool: str, schemas: Schemas) -> Any:
    text = found["value"]
    if form.trimmed:
        text = text.removeprefix("\n").removesuffix("\n")
    if found.groupdict().get("is_string"):
        return text
    return typed_value(text, schemas(tool).get(_name(form, found)))
