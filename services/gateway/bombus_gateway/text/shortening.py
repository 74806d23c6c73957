"""Leaves out of a conversation what does not change how it goes on after its last answer. Pure.

What was sampled stays as it is, as tokens. Only what the chat template writes after it is needed, so an answer of a
long conversation need not cost more to continue than one of a short one.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import Enum
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

from bombus_gateway.text.forms import TOOL, WORD, call_of, user
from bombus_gateway.text.message import ChatMessage, id_for_model

ANSWERS_KEPT = 3  # the last ones; what is left out is between the first question and these
TEXT_MAX = 1000  # characters of a text of the history that is kept as it is
ENDS = 200  # characters of each end of a longer one that are kept
ARGUMENTS = '{"a": "b"}'  # in place of long ones


class Keep(Enum):
    """Which tools stay in a shorter conversation."""

    CALLED_TOOLS = "those that its messages call"
    TOOLS = "all of them"


class ToolsKept(NamedTuple):
    """Which tools stay in the shorter conversations of one template.

    Some templates write the tools again before a new question, and not before results: so it is said for what follows
    the last answer. None: without its middle, a conversation would go on otherwise.
    """

    before_results: Keep | None = None
    otherwise: Keep | None = None

    def where(self, following: Sequence[ChatMessage]) -> Keep | None:
        """Return which tools stay where these messages follow the last answer."""
        return self.before_results if _are_results(following) else self.otherwise


class Dialogue(NamedTuple):
    """A conversation, whose first `known` messages are those of the history, and its tools."""

    messages: Sequence[ChatMessage]
    known: int
    tools: Sequence[Mapping[str, Any]]

    @property
    def following(self) -> Sequence[ChatMessage]:
        """The messages after the history."""
        return self.messages[self.known :]


def short(
    messages: Sequence[ChatMessage],
    count: int,
    tools: Sequence[Mapping[str, Any]],
    looked_for: Collection[str],
    keep: Keep = Keep.CALLED_TOOLS,
) -> Dialogue | None:
    """Return a shorter conversation that ends like this one, whose message `count` was sampled.

    None where there is nothing to leave out, or where it may matter: where a text, other than a tool's, has something
    that the template looks for (`looked_for`), such as a switch in the system's message; and where a new result is
    that of a call which would be left out, since some templates look that call up.
    """
    first = next(index for index, message in enumerate(messages) if message["role"] == "assistant")
    answers = (index for index in range(count - 1, first - 1, -1) if messages[index]["role"] == "assistant")
    last = [*islice(answers, ANSWERS_KEPT)][-1]
    left_out, following = messages[first:last], messages[count:]
    kept = [*messages[:first], *messages[last:count]]
    shortened = [_shortened(message) for message in kept]
    if (not left_out and shortened == kept) or _is_called(_ids_of_results(following), left_out):
        return None
    changed = [*left_out, *(one for one, other in zip(kept, shortened) if one is not other)]
    texts = [each.get("content") or "" for each in changed if each["role"] not in ("tool", "assistant")]
    if any(word in text for text in texts for word in looked_for):
        return None
    made = [*shortened, *following]
    return Dialogue(made, len(shortened), tools if keep is Keep.TOOLS else _named(made, tools))


def _is_called(ids: Collection[str], messages: Sequence[ChatMessage]) -> bool:
    """Return whether messages have a call to which the model gave one of these ids."""
    given = [call.get("id") or "" for message in messages for call in message.get("tool_calls") or ()]
    # What the model wrote is behind the first hyphen of an id of ours. To look at that is quicker than `id_for_model`.
    return any(id_for_model(id) in ids for id in given if id in ids or id.partition("-")[2] in ids)


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
    """Return the tools that messages call, and the first one where they call none."""
    names = {call["function"]["name"] for message in messages for call in message.get("tool_calls") or ()}
    return [tool for tool in tools if tool["function"]["name"] in names] or tools[:1]


# ---- the conversations that say whether a template can be given shorter ones ----

TOOLS = [TOOL, {**TOOL, "function": {**TOOL["function"], "name": "rest"}}]  # the second one is never called


def find_kept(goes_on: Callable[[Dialogue, Keep], bool]) -> ToolsKept:
    """Return which tools stay. `goes_on` says whether a trial goes on as it does where only those stay."""
    tried = [*trials()]
    results = [number for number, trial in enumerate(tried) if _are_results(trial.following)]

    @cache
    def holds(number: int, keep: Keep) -> bool:
        return goes_on(tried[number], keep)

    def least(numbers: Collection[int]) -> Keep | None:
        return next((keep for keep in Keep if all(holds(number, keep) for number in numbers)), None)

    return ToolsKept(least(results), least(range(len(tried))))  # a question may follow results


def trials() -> Iterator[Dialogue]:
    """Yield long conversations, which have to go on as they do when they are shorter.

    Their calls have ids of their own, since some templates number calls. One tool is never called: some templates write
    the tools again in front of what is new.
    """
    for reasoning in ("", "hm"):
        yield _trial("aaaaaa", reasoning)
        yield _trial("cccccc", reasoning)
        yield _trial("cccccc", reasoning, then=[user("rose")])
        yield _trial("cabcac", reasoning)
        yield _trial("acbaca", reasoning, asked=("first", "second"))
    yield _trial("cpacpc")  # some templates refuse pairs
    yield _trial("cabcac", first=[{"role": "system", "content": WORD}])


def _trial(
    answers: str,
    reasoning: str = "",
    first: Sequence[ChatMessage] = (),
    then: Sequence[ChatMessage] = (),
    asked: Sequence[str] = (WORD,),
) -> Dialogue:
    """Return a conversation with an answer for each letter: `a` text, `c` a call, `p` two calls, `b` a call and text.

    `asked` are the user's texts in turn; `then` is what follows the last answer, where it is not its results.
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
