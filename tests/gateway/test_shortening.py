"""What is left out of a long conversation before it is rendered to be extended."""

from typing import Any

import hypothesis.strategies as st
from hypothesis import given, settings

from bombus_gateway.text.message import ChatMessage
from bombus_gateway.text.shortening import ANSWERS_KEPT, ENDS, NO_OUTLINE, TEXT_MAX, HistoryOutline, short

SWITCH = "/no_think"


def user(text: str) -> ChatMessage:
    return {"role": "user", "content": text}


def answer(number: int) -> ChatMessage:
    return {"role": "assistant", "content": f"answer {number}"}


def call(name: str, arguments: str = "{}") -> ChatMessage:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def turns(count: int) -> list[ChatMessage]:
    return [message for number in range(count) for message in (user(f"question {number}"), answer(number))]


def test_the_first_question_the_last_answers_and_all_that_is_new_stay() -> None:
    history = [{"role": "system", "content": "Be brief."}, *turns(100)]
    new = [user("new"), answer(1), user("newer")]
    found = short([*history, *new], len(history), [], [SWITCH])
    assert found is not None
    assert found.messages == [*history[:2], answer(97), *history[-4:], *new]
    assert found.messages[found.known - 1] == history[-1]


def test_a_short_conversation_stays_as_it_is() -> None:
    assert short([*turns(3), user("new")], 6, [], []) is None


def test_long_texts_keep_their_ends_and_long_arguments_are_others() -> None:
    long = "a" * ENDS + "b" * TEXT_MAX + "c" * ENDS
    history = [user(long), call("f", '{"x": "' + long + '"}')]
    found = short([*history, user(long)], 2, [tool("f")], [])
    assert found is not None
    assert found.messages[0]["content"] == "a" * ENDS + " " + "c" * ENDS
    assert found.messages[1] == call("f", '{"a": "b"}')
    assert found.messages[2] == user(long), "what is new is rendered as it is"


def test_what_the_template_looks_for_is_not_left_out() -> None:
    """SmolLM3's template switches its reasoning off where the system's message says so."""
    for place in (0, 4):
        history = turns(10)
        history[place] = user("x" * TEXT_MAX + SWITCH + "x" * TEXT_MAX)
        assert short([*history, user("new")], 20, [], [SWITCH]) is None
        assert short([*history, user("new")], 20, [], ["/think"]) is not None
    kept = [user(SWITCH), *turns(10)[1:]]
    assert short([*kept, user("new")], 20, [], [SWITCH]) is not None, "the first question stays as it is"


def test_a_result_of_a_call_that_would_be_left_out_keeps_it() -> None:
    """Some templates look the call of a result up, to write the name of its function."""
    history = [user("?"), {**call("g"), "content": ""}, *turns(9)]
    result = {"role": "tool", "tool_call_id": "c", "content": "late"}
    assert short([*history, result], len(history), [], []) is None
    assert short([*history, {**result, "tool_call_id": "d"}], len(history), [], []) is not None


def test_of_the_tools_those_that_are_called_stay_or_the_first() -> None:
    tools = [tool(name) for name in "fgh"]
    for history, names in (([*turns(9), user("?"), call("g")], "g"), (turns(9), "f")):
        found = short([*history, user("new")], len(history), tools, [])
        assert found is not None
        assert [each["function"]["name"] for each in found.tools] == [*names]


def result(id: str) -> ChatMessage:
    return {"role": "tool", "tool_call_id": id, "content": "found"}


def with_id(id: str) -> ChatMessage:
    made = call("f")
    return {**made, "tool_calls": [{**made["tool_calls"][0], "id": id}]}


IDS = ("c", "d", f"call_{'0' * 20}0_1-c", f"call_{'0' * 20}0_1", "")
MESSAGES = st.one_of(
    st.sampled_from([user("?"), user(SWITCH), user("x" * TEXT_MAX + SWITCH + "x" * TEXT_MAX), answer(1)]),
    st.sampled_from(IDS).map(with_id),
    st.sampled_from(IDS).map(result),
)
RESULTS = st.lists(st.sampled_from(IDS).map(result), max_size=2)


@given(st.sampled_from(["first", SWITCH]), st.lists(MESSAGES, min_size=6, max_size=12), RESULTS, st.data())
@settings(max_examples=400)
def test_an_outline_of_any_beginning_changes_nothing(first: str, middle: Any, new: Any, data: Any) -> None:
    messages = [user(first), answer(0), *middle, answer(1)]
    places = sorted(data.draw(st.lists(st.integers(0, len(messages)), max_size=3)))
    outline = NO_OUTLINE
    for place in places:
        outline = outline.extended(messages, place)
    assert outline == HistoryOutline().extended(messages, outline.known)
    whole = short([*messages, *new], len(messages), [], [SWITCH])
    assert short([*messages, *new], len(messages), [], [SWITCH], outline=outline) == whole


def test_what_is_outlined_and_left_out_is_not_read() -> None:
    history = [user("?"), *(message for at in range(50) for message in (with_id(f"{at}"), result(f"{at}")))]
    outline = NO_OUTLINE.extended(history, len(history))
    unreadable = [*history[:2], *({} for _ in history[2:-8]), *history[-8:], with_id("new"), result("new")]
    found = short(unreadable, len(unreadable) - 1, [], [SWITCH], outline=outline)
    assert found is not None
    assert len(found.messages) == 2 * ANSWERS_KEPT + 1
