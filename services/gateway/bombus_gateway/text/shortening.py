"""Leaves out of a conversation what does not change how it goes on after its last answer. Pure.

What was sampled stays as it is, as tokens. Only what the chat template writes after it is needed, so an answer of a
long conversation need not cost more to continue than one of a short one.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from bombus_gateway.text.message import ChatMessage

ANSWERS_KEPT = 3  # the last ones; what is left out is between the first question and these
TEXT_MAX = 1000  # characters of a text of the history that is kept as it is
ENDS = 200  # characters of each end of a longer one that are kept
ARGUMENTS = '{"a": "b"}'  # in place of long ones


class Short(NamedTuple):
    """A conversation that goes on like a longer one. Its first `known` messages are those of the history."""

    messages: Sequence[ChatMessage]
    known: int
    tools: Sequence[Mapping[str, Any]]


def short(
    messages: Sequence[ChatMessage], count: int, tools: Sequence[Mapping[str, Any]], looked_for: Collection[str]
) -> Short | None:
    """Return a shorter conversation that ends like this one, whose message `count` was sampled.

    None where there is nothing to leave out, or where it may matter: where a text, other than a tool's, has something
    that the template looks for (`looked_for`), such as a switch in the system's message.
    """
    answers = [index for index in range(count) if messages[index]["role"] == "assistant"]
    first, last = answers[0], answers[-ANSWERS_KEPT:][0]
    left_out = messages[first:last]
    kept = [*messages[:first], *messages[last:count]]
    shortened = [_shortened(message) for message in kept]
    if not left_out and shortened == kept:
        return None
    changed = [*left_out, *(one for one, other in zip(kept, shortened) if one is not other)]
    texts = [each.get("content") or "" for each in changed if each["role"] not in ("tool", "assistant")]
    if any(word in text for text in texts for word in looked_for):
        return None
    return Short([*shortened, *messages[count:]], len(shortened), _named([*shortened, *messages[count:]], tools))


def _shortened(message: ChatMessage) -> ChatMessage:
    content = message.get("content") or ""
    made = message
    if len(content) > TEXT_MAX:
        made = {**made, "content": f"{content[:ENDS]} {content[-ENDS:]}"}
    calls = message.get("tool_calls") or ()
    if any(len(call["function"]["arguments"]) > TEXT_MAX for call in calls):
        made = {**made, "tool_calls": [_shortened_call(call) for call in calls]}
    return made


def _shortened_call(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call["function"]
    return (
        call if len(function["arguments"]) <= TEXT_MAX else {**call, "function": {**function, "arguments": ARGUMENTS}}
    )


def _named(messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the tools that messages call, and the first one where they call none."""
    names = {call["function"]["name"] for message in messages for call in message.get("tool_calls") or ()}
    return [tool for tool in tools if tool["function"]["name"] in names] or tools[:1]
