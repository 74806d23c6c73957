"""Shortens a conversation without changing how the template continues it after its last answer. Pure.

Sampled tokens are kept as they are, and only the text that the chat template writes after them is needed. So it need
not cost more to continue a long conversation than to continue a short one.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import Enum
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

from bombus_gateway.text.forms import TOOL, WORD, call_of, user
from bombus_gateway.text.message import ChatMessage, id_for_model

ANSWERS_KEPT = 3  # how many last answers are kept; the messages between the first question and these are left out
TEXT_MAX = 1000  # characters; longer texts in the history are shortened
ENDS = 200  # characters kept at each end of a longer text
ARGUMENTS = '{"a": "b"}'  # replaces long arguments


class Keep(Enum):
    """Which tools stay in a shorter conversation."""

    CALLED_TOOLS = "those that its messages call"
    TOOLS = "all of them"


class ToolsKept(NamedTuple):
    """Which tools stay in shortened conversations, for one template.

    Some templates repeat the tools before a new question but not before results, so the tools that stay depend on the
    messages after the last answer. None means that leaving out the middle would change how the conversation is
    continued.
    """

    before_results: Keep | None = None
    otherwise: Keep | None = None

    def where(self, following: Sequence[ChatMessage]) -> Keep | None:
        """Return which tools stay if these messages follow the last answer."""
        return self.before_results if _are_results(following) else self.otherwise


class HistoryOutline(NamedTuple):
    """What `short` needs to know about the first `known` messages of a conversation, so that it need not read them
    again.

    `called` contains the ids of the calls in these messages, as the model wrote them, and `others` contains the indices
    of the messages that are neither answers nor results.
    """

    known: int = 0
    called: frozenset[str] = frozenset()
    others: tuple[int, ...] = ()

    def extended(self, messages: Sequence[ChatMessage], count: int) -> "HistoryOutline":
        """Return the outline of the first `count` messages of a conversation whose beginning is outlined here."""
        new = range(self.known, count)
        called = [id for at in new for id in _ids_of_calls(messages[at])]
        others = [at for at in new if _is_other(messages[at])]
        return HistoryOutline(count, self.called.union(called), (*self.others, *others))


NO_OUTLINE = HistoryOutline()


class Dialogue(NamedTuple):
    """A conversation and its tools. The first `known` messages are the history."""

    messages: Sequence[ChatMessage]
    known: int
    tools: Sequence[Mapping[str, Any]]

    @property
    def following(self) -> Sequence[ChatMessage]:
        """The messages after the history."""
        return self.messages[self.known :]


def short(  # noqa: PLR0913 - a conversation, what a template needs of it, and what is known of it
    messages: Sequence[ChatMessage],
    count: int,
    tools: Sequence[Mapping[str, Any]],
    looked_for: Collection[str],
    keep: Keep = Keep.CALLED_TOOLS,
    outline: HistoryOutline = NO_OUTLINE,
) -> Dialogue | None:
    """Return a shorter conversation that ends like this one. The last of its first `count` messages was sampled.

    Messages covered by `outline` need not be read again. Returns None if there is nothing to leave out, or if leaving
    messages out may change the ending. The ending may change in two cases: if a changed system or user message contains
    something that the template looks for (`looked_for`), such as a switch; and if a new result belongs to a call that
    would be left out, since some templates look up the call.
    """
    first = next(index for index, message in enumerate(messages) if message["role"] == "assistant")
    answers = (index for index in range(count - 1, first - 1, -1) if messages[index]["role"] == "assistant")
    last = [*islice(answers, ANSWERS_KEPT)][-1]
    following = messages[count:]
    kept = [*messages[:first], *messages[last:count]]
    shortened = [_shortened(message) for message in kept]
    if (first == last and shortened == kept) or _is_called(_ids_of_results(following), messages, first, last, outline):
        return None
    places = (*outline.others, *range(outline.known, last))
    left_out = [messages[at] for at in places if first <= at < last]
    changed = [*left_out, *(one for one, other in zip(kept, shortened) if one is not other)]
    texts = [each.get("content") or "" for each in changed if _is_other(each)]
    if any(word in text for text in texts for word in looked_for):
        return None
    made = [*shortened, *following]
    return Dialogue(made, len(shortened), tools if keep is Keep.TOOLS else _named(made, tools))


def _is_called(
    ids: Collection[str], messages: Sequence[ChatMessage], first: int, last: int, outline: HistoryOutline
) -> bool:
    """Return whether messages `first` to `last` contain a call to which the model gave one of these ids."""
    unread = max(first, outline.known) if outline.called.isdisjoint(ids) else first
    return any(id in ids for message in messages[unread:last] for id in _ids_of_calls(message))


def _ids_of_calls(message: ChatMessage) -> list[str]:
    return [id_for_model(call.get("id") or "") for call in message.get("tool_calls") or ()]


def _is_other(message: ChatMessage) -> bool:
    """Return whether a message is neither an answer nor a result."""
    return message["role"] not in ("tool", "assistant")


def _ids_of_results(messages: Sequence[ChatMessage]) -> set[str]:
    return {id_for_model(message["tool_call_id"]) for message in messages if message.get("tool_call_id")}


def _are_results(messages: Sequence[ChatMessage]) -> bool:
    return bool(messages) and all(message["role"] == "tool" for message in messages)


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
    """Return the tools that the messages call, or only the first tool if they call none."""
    names = {call["function"]["name"] for message in messages for call in message.get("tool_calls") or ()}
    return [tool for tool in tools if tool["function"]["name"] in names] or tools[:1]


# ---- trial conversations: does a template render the same ending for a shortened conversation? ----

TOOLS = [TOOL, {**TOOL, "function": {**TOOL["function"], "name": "rest"}}]  # the second one is never called


def find_kept(goes_on: Callable[[Dialogue, Keep], bool]) -> ToolsKept:
    """Return which tools stay. `goes_on` says whether a trial that is shortened with these tools has the same
    continuation."""
    tried = [*trials()]
    results = [number for number, trial in enumerate(tried) if _are_results(trial.following)]

    @cache
    def holds(number: int, keep: Keep) -> bool:
        return goes_on(tried[number], keep)

    def least(numbers: Collection[int]) -> Keep | None:
        return next((keep for keep in Keep if all(holds(number, keep) for number in numbers)), None)

    return ToolsKept(least(results), least(range(len(tried))))  # a question may also follow results


def trials() -> Iterator[Dialogue]:
    """Yield long conversations, which must have the same continuation after they are shortened.

    Each call has a different id, since some templates number calls. One tool is never called, to detect templates that
    repeat the tools before the new messages.
    """
    for reasoning in ("", "hm"):
        yield _trial("aaaaaa", reasoning)
        yield _trial("cccccc", reasoning)
        yield _trial("cccccc", reasoning, then=[user("rose")])
        yield _trial("cabcac", reasoning)
        yield _trial("acbaca", reasoning, asked=("first", "second"))
    yield _trial("cpacpc")  # separate, since some templates refuse two calls in one message
    yield _trial("cabcac", first=[{"role": "system", "content": WORD}])


def _trial(
    answers: str,
    reasoning: str = "",
    first: Sequence[ChatMessage] = (),
    then: Sequence[ChatMessage] = (),
    asked: Sequence[str] = (WORD,),
) -> Dialogue:
    """Return a conversation with one answer for each letter in `answers`: `a` is text, `c` is a call, `p` is two calls,
    and `b` is a call and text.

    `asked` are the user's texts, in order. `then` replaces the messages after the last answer.
    """
    messages: list[ChatMessage] = [*first, user(asked[0])]
    for number, kind in enumerate(answers):
        count = len(messages) + 1
        calls = {"a": 0, "p": 2}.get(kind, 1)
        answer: ChatMessage = call_of([WORD] * calls, f"call_{number}") if calls else {"role": "assistant"}
        answer |= {"content": WORD} if kind in "ab" else {}
        messages.append({**answer, "reasoning_content": reasoning} if reasoning else answer)
        results: list[ChatMessage] = [
            {"role": "tool", "tool_call_id": call["id"], "content": "rose"} for call in answer.get("tool_calls", ())
        ]
        messages += results or [user(asked[number % len(asked)])]
    return Dialogue([*messages[:count], *(then or messages[count:])], count, [] if set(answers) == {"a"} else TOOLS)
