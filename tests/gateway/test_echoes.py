"""Which sampled answers a request echoes, in all the forms in which harnesses write them back.

What is found takes the place of what came back, so a form that is understood is one sequence, and one that is not
begins a branch.
"""

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import pytest

from bombus_gateway.history.answers import Answers
from bombus_gateway.history.echoes import Followed, follow
from bombus_gateway.history.identity import next_digest, reasoning_digest
from bombus_gateway.text.message import ChatMessage


class Answer(msgspec.Struct, frozen=True):
    message: ChatMessage
    digest: bytes
    reasoning: bytes
    number: int

    @property
    def name(self) -> tuple[str, int]:
        return str(self.number), 0


class Log:
    """What was sampled, by what was before it."""

    def __init__(self) -> None:
        self.sampled = Answers[Answer]()
        self._count = 0
        self.continued: set[int] = set()

    def answer(self, messages: Sequence[ChatMessage], message: ChatMessage) -> list[ChatMessage]:
        """Note that `message` was sampled after `messages`, and return the conversation with it."""
        before = self.follow(messages).digests[-1]
        self._count += 1
        count, reasoning = self._count, reasoning_digest(message)
        self.sampled.add(before, message, lambda digest: Answer(message, digest, reasoning, count))
        return [*messages, message]

    def follow(self, messages: Sequence[ChatMessage], *stops: str) -> Followed[Answer]:
        return follow(self, b"", messages, stops)

    def is_continued(self, answer: Answer) -> bool:
        return answer.number in self.continued


def user(text: str) -> ChatMessage:
    return {"role": "user", "content": text}


def said(text: str | None, *calls: dict[str, Any], **more: Any) -> ChatMessage:
    message: ChatMessage = {"role": "assistant", "content": text, **more}
    return {**message, "tool_calls": list(calls)} if calls else message


def call(id: str, name: str = "run", **arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def written(id: str, arguments: str, name: str = "run") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(id: str, text: str = "done") -> ChatMessage:
    return {"role": "tool", "tool_call_id": id, "content": text}


ASKED = [user("go")]
TEXT = said("Hello,  world.\n\nIt is\tso.\n")
ONE = said("I look.", call("c1", path="a", line=5.0), reasoning_content="where?")
TWO = said(None, call("c1", path="a"), call("c2", path="b"))
EMPTY = said("", written("c1", "{}"))


@pytest.mark.parametrize(
    ("sampled", "echo"),
    [
        pytest.param(TEXT, said("Hello,  world.\n\nIt is\tso."), id="stripped"),
        pytest.param(TEXT, said("Hello, world. It is so."), id="wrapped anew"),
        pytest.param(TEXT, said("Hello,  world.\r\n\r\nIt is\tso.\r\n"), id="carriage returns"),
        pytest.param(TEXT, said(TEXT["content"] + "</code>"), id="the stop string put back"),
        pytest.param(TEXT, said(TEXT["content"] + "\n</code>\n"), id="the stop string on a line of its own"),
        pytest.param(TEXT, said(TEXT["content"], name="bee"), id="a name"),
        pytest.param(TEXT, said(TEXT["content"], reasoning_content="added"), id="reasoning of somebody else"),
        pytest.param(ONE, said("I look.", call("c1", path="a", line=5)), id="5 for 5.0, and no reasoning"),
        pytest.param(ONE, said(None, call("c1", line=5, path="a")), id="text dropped beside calls"),
        pytest.param(ONE, said("", call("c1", path="a", line="5", all=False)), id="arguments parsed by a schema"),
        pytest.param(ONE, said("I look.", call("c1", "invalid", tool="run", error="no")), id="an invalid call renamed"),
        pytest.param(ONE, said("I look.", call("x", path="a", line=5)), id="another id"),
        pytest.param(EMPTY, said(None, written("x", "")), id="no arguments as empty text"),
        pytest.param(EMPTY, said(None, written("x", "null")), id="no arguments as null"),
        pytest.param(TWO, said("", call("c1", path="a"), call("c2", path="b")), id="null as empty text"),
    ],
)
def test_an_answer_is_found_however_it_is_spelled_and_stays_what_was_sampled(
    sampled: ChatMessage, echo: ChatMessage
) -> None:
    log = Log()
    log.answer(ASKED, sampled)
    results = [result(each["id"]) for each in sampled.get("tool_calls") or ()] or [user("and?")]
    found = log.follow([*ASKED, echo, *results], "</code>")
    assert found.last is not None
    assert found.count == 2
    assert list(found.messages) == [*ASKED, sampled, *results]
    assert list(found.digests) == list(log.follow([*ASKED, sampled, *results]).digests)


@pytest.mark.parametrize(
    ("sampled", "echo"),
    [
        pytest.param(TEXT, said("Hello, wörld. It is so."), id="another word"),
        pytest.param(TEXT, said("Helloworld. It is so."), id="words joined"),
        pytest.param(TEXT, said(TEXT["content"] + "END"), id="words added"),
        pytest.param(ONE, said("I look.", call("x", path="b", line=5)), id="other arguments under another id"),
        pytest.param(ONE, said("I look."), id="calls left out"),
        pytest.param(TEXT, said(TEXT["content"], call("c1")), id="a call added"),
    ],
)
def test_what_says_something_else_is_the_harness_own(sampled: ChatMessage, echo: ChatMessage) -> None:
    log = Log()
    log.answer(ASKED, sampled)
    found = log.follow([*ASKED, echo, user("and?")], "</code>")
    assert (found.last, found.count) == (None, 0)
    assert list(found.messages) == [*ASKED, echo, user("and?")]


RESULTS = (result("c1"), result("c2"))
ONE_OF_TWO, OTHER_OF_TWO = said(None, call("c1", path="a")), said("", call("c2", path="b"))


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([ONE_OF_TWO, OTHER_OF_TWO, *RESULTS], id="a message for each call"),
        pytest.param([ONE_OF_TWO, RESULTS[0], OTHER_OF_TWO, RESULTS[1]], id="each call with its result"),
        pytest.param([said(""), ONE_OF_TWO, OTHER_OF_TWO, *RESULTS], id="an empty text first"),
    ],
)
def test_parallel_calls_that_come_back_in_parts_are_one_answer(parts: list[ChatMessage]) -> None:
    """LangGraph and Responses clients lost them: each part was a message that nobody had sampled."""
    log = Log()
    log.answer(ASKED, TWO)
    found = log.follow([*ASKED, *parts, user("and?")])
    assert list(found.messages) == [*ASKED, TWO, *RESULTS, user("and?")]
    assert found.count == 2


def test_reasoning_text_and_a_call_that_come_back_as_three_messages_are_one_answer() -> None:
    log = Log()
    log.answer(ASKED, ONE)
    parts = [said("<think>where?</think>"), said("I look."), said(None, call("c1", path="a", line=5))]
    found = log.follow([*ASKED, *parts, result("c1"), user("and?")])
    assert list(found.messages) == [*ASKED, ONE, result("c1"), user("and?")]


def test_an_answer_after_the_results_is_not_a_part_of_the_calls() -> None:
    log = Log()
    longer = log.answer([*log.answer(ASKED, TWO), *RESULTS], TEXT)
    found = log.follow([*ASKED, ONE_OF_TWO, RESULTS[0], OTHER_OF_TWO, RESULTS[1], TEXT, user("and?")])
    assert list(found.messages) == [*longer, user("and?")]
    assert found.count == 5


def test_calls_that_are_numbered_alike_in_each_answer_are_not_held_together() -> None:
    """Some models write call_0 and call_1 in every answer."""
    log = Log()
    again = said("Once more.", call("c1", path="c"), call("c2", path="d"))
    longer = [*log.answer([*log.answer(ASKED, TWO), *RESULTS], again), *RESULTS]
    found = log.follow([*longer, user("and?")])
    assert list(found.messages) == [*longer, user("and?")]
    assert found.count == 5


def test_an_answer_between_the_results_is_not_a_part_of_the_calls() -> None:
    log = Log()
    longer = log.answer([*log.answer(ASKED, TWO), RESULTS[0]], TEXT)
    found = log.follow([*longer, RESULTS[1], user("and?")])
    assert list(found.messages) == [*longer, RESULTS[1], user("and?")]
    assert found.count == 4


@pytest.mark.parametrize("between", [[], [RESULTS[0]]])
def test_words_of_the_harness_before_results_are_never_dropped(between: list[ChatMessage]) -> None:
    log = Log()
    asked = [*log.answer(ASKED, TWO), *between, said("Wait."), *RESULTS[len(between) :], user("and?")]
    assert list(log.follow(asked).messages) == asked


def test_an_answer_is_only_found_after_the_messages_after_which_it_was_sampled() -> None:
    """A compaction keeps the last turn, with its ids, behind a summary: there it was never sampled."""
    log = Log()
    log.answer(ASKED, TWO)
    compacted = [user("a summary"), TWO, *RESULTS, user("and?")]
    found = log.follow(compacted)
    assert (found.last, list(found.messages)) == (None, compacted)


def test_equal_answers_are_told_apart_by_id_by_reasoning_and_by_order() -> None:
    log = Log()
    for id, reasoning in (("c1", "one"), ("c2", "two"), ("c3", "two")):
        log.answer(ASKED, said(None, call(id), reasoning_content=reasoning))

    def continues(*echo: Any, **more: Any) -> int:
        last = log.follow([*ASKED, said(None, *echo, **more), user("and?")]).last
        assert last is not None
        return last.number

    assert continues(call("c2")) == 2
    assert continues(call("x"), reasoning_content="two") == 2
    assert continues(call("x"), reasoning_content="three") == 1
    log.continued |= {1, 2}
    assert continues(call("x"), reasoning_content="two") == 3
    assert continues(call("x")) == 3
    log.continued |= {3}
    assert continues(call("x")) == 1
    assert continues(call("c2")) == 2


def test_what_follows_an_answer_is_found_after_equal_ones_in_other_spaces() -> None:
    """Two answers were cut before and after a line's end. An echo was taken for the one that was not gone on with."""
    log = Log()
    for text in ("ok\n", "ok"):
        log.answer(ASKED, said(text))
    log.continued |= {1, 2}
    longer = log.answer([*ASKED, said("ok"), user("and?")], said("done"))
    for text in ("ok\n", "ok", " ok "):
        found = log.follow([*ASKED, said(text), *longer[2:], user("and?")])
        assert found.last is not None
        assert (found.count, found.last.number) == (4, 3)


def test_an_answer_that_is_named_is_taken_if_its_words_are_like_it() -> None:
    log = Log()
    for text in ("ok", "ok ", "ok"):
        log.answer(ASKED, said(text))
    for name, text, taken in (("3", "ok", 3), ("2", "ok", 2), ("9", "ok", 1), ("3", "no", None)):
        found = log.follow([*ASKED, said(text, answer_of=(name, 0)), user("and?")])
        assert (found.last.number if found.last else None) == taken
        assert all("answer_of" not in message for message in found.messages)


def test_ids_that_several_answers_share_are_no_proof() -> None:
    """Some models write ids of their own, and number the calls of each answer from 0."""
    log = Log()
    log.answer(ASKED, said(None, call("call_0", path="a")))
    log.answer(ASKED, said(None, call("call_0", path="b")))
    found = log.follow([*ASKED, said(None, written("call_0", '{"path":"b"}')), result("call_0")])
    assert found.last is not None
    assert found.last.number == 2


def test_a_model_that_numbers_the_calls_of_each_answer_from_0_keeps_its_answers_apart() -> None:
    """The later answer has an id of the earlier one: it was taken for a part of that, and left out of the prompt."""
    log = Log()
    first = said(None, call("call_0", path="a"), call("call_1", path="b"))
    results = [result("call_0"), result("call_1")]
    later = said("now", call("call_0", path="c"))
    longer = log.answer([*log.answer(ASKED, first), *results], later)
    one, other = (said(None, each) for each in first["tool_calls"])
    for parts in ([first, *results], [one, other, *results], [one, results[0], other, results[1]]):
        found = log.follow([*ASKED, *parts, later, result("call_0", "again")])
        assert list(found.messages) == [*longer, result("call_0", "again")]
        assert found.count == 5


def test_the_messages_of_the_harness_itself_stay_as_they_are() -> None:
    log = Log()
    example = [user("1 + 1"), said("2"), user("2 + 2")]
    longer = log.answer(example, said("4"))
    found = log.follow([*longer, said("Ok."), user("and?")])
    assert found.count == 4
    assert list(found.messages) == [*longer, said("Ok."), user("and?")]


class Read:
    """An answer that counts how often it is read."""

    def __init__(self, message: ChatMessage, reads: list[int], digest: bytes) -> None:
        self._message, self._reads = message, reads
        self.name = ("call", id(self))
        self.digest, self.reasoning = digest, b""

    @property
    def message(self) -> ChatMessage:
        self._reads[0] += 1
        return self._message


class Reads:
    """Many answers to one question."""

    def __init__(self, answers: Sequence[ChatMessage]) -> None:
        self.reads = [0]
        self.sampled = Answers[Read]()
        before = next_digest(b"", *ASKED)
        for answer in answers:
            self.sampled.add(before, answer, partial(Read, answer, self.reads))
        self.reads[0] = 0

    def is_continued(self, answer: Read) -> bool:
        return False


def test_answers_that_say_something_else_are_not_read_however_many_there_are() -> None:
    texts = Reads([said(f"answer {number}") for number in range(500)])
    found = follow(texts, b"", [*ASKED, *[said("no")] * 32, user("and?")], ["</code>"] * 16)
    assert (found.last, texts.reads) == (None, [0])
    found = follow(texts, b"", [*ASKED, said("answer  499"), user("and?")])
    assert (found.count, texts.reads) == (2, [1])
    calls = Reads([said(None, call(f"a{number}"), call(f"b{number}")) for number in range(500)])
    found = follow(calls, b"", [*ASKED, *[said("no")] * 200, user("and?")])
    assert (found.last, calls.reads) == (None, [0])
    found = follow(calls, b"", [*ASKED, said(None, call("a7")), said(None, call("b7")), result("a7")])
    assert found.count == 2
    assert calls.reads[0] < 10


OURS, OURS_TOO = "call_0123456789abcdef012300_0", "call_ffffffffffffffffffff0_0-run:0"


def test_the_results_of_an_answer_have_the_ids_of_its_calls_as_the_answer_has() -> None:
    log = Log()
    sampled = said(None, call(OURS, path="a"), call(OURS_TOO, path="b"))
    log.answer(ASKED, sampled)
    echo = said(None, call("x", path="a"), call("y", path="b"))
    found = log.follow([*ASKED, echo, result("y"), result("x"), user("and?"), result("y", "again")])
    assert found.messages[1] == sampled
    assert [message.get("tool_call_id") for message in found.messages[2:]] == [OURS_TOO, OURS, None, OURS_TOO]


@pytest.mark.parametrize(
    ("echo", "doubt"),
    [
        (said("I look.", call(OURS, path="a")), False),
        (said("I look.", call("x", path="a")), False),
        (said("I look.", call(OURS, path="a"), reasoning_content="where?", answer_of=("1", 0)), False),
        (said("I look.", call(OURS_TOO, path="a")), True),
        (said("I look.", call(OURS, path="a"), reasoning_content="there!"), True),
        (said("I look.", call("x", path="a"), answer_of=("2", 0)), True),
    ],
)
def test_an_echo_that_names_an_answer_that_is_not_known_is_doubtful(echo: ChatMessage, doubt: bool) -> None:
    log = Log()
    log.answer(ASKED, said("I look.", call(OURS, path="a"), reasoning_content="where?"))
    found = log.follow([*ASKED, echo, result("x")])
    assert found.last is not None
    assert found.doubt == doubt
