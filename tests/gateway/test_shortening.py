"""What is left out of a long conversation before it is rendered to be extended."""

from typing import Any

from bombus_gateway.text.message import ChatMessage
from bombus_gateway.text.shortening import ENDS, TEXT_MAX, short

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
