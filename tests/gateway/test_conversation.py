"""Which stored conversation a request extends, and whether a chain of records always gives back the exact prompt."""

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
from hypothesis import given, settings

from bombus.hive.records import CallRecord, CallRef, CallStatus, Choice, SamplingParams, pack_tokens, unpack_tokens
from bombus_gateway.history.conversation import WALKS, Conversation, Node
from bombus_gateway.history.identity import next_digest, root_digest
from bombus_gateway.text.message import ChatMessage
from bombus_gateway.text.shortening import NO_OUTLINE
from tests.gateway.openai_hive import IM_END, TEXT

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}


def turn(role: str, content: str, **more: Any) -> ChatMessage:
    return {"role": role, "content": content, **more}


def called(arguments: str, id: str = "c1") -> ChatMessage:
    call = {"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


class Episode:
    """Makes calls as the gateway does, without a gateway. `log` has what the stream would hold."""

    def __init__(self) -> None:
        self.conversation = Conversation()
        self.log: list[tuple[CallRef, CallRecord]] = []
        self.prompts: dict[int, list[int]] = {}

    def call(
        self, messages: list[ChatMessage], sampled: list[int], message: ChatMessage, tools: Any = ()
    ) -> CallRecord:
        followed = self.conversation.follow(root_digest(tools, {}), messages)
        count, node, messages = followed.count, followed.last, [*followed.messages]
        if node is None:
            prompt = tail = TEXT.renderer.render(messages, tools)
        else:
            extension = TEXT.renderer.extend(node.tokens, node.completion_at, messages, count, tools)
            assert extension is not None
            tail, prompt = extension, unpack_tokens(node.tokens) + extension
        ref = CallRef(len(self.log) + 1, f"call-{len(self.log)}", b"")
        record = CallRecord(
            id=ref.id,
            engine="main",
            run=1,
            episode="main-1-1",
            parent=node.ref if node else None,
            parent_choice=node.choice if node else 0,
            prompt_tail=pack_tokens(tail),
            prompt_tokens=len(prompt),
            choices=(Choice(tokens=pack_tokens(sampled), logprobs=b"", message=message),),
            sampling=SamplingParams(),
            messages=tuple(messages[count:]),
            tools=() if node else tuple(tools),
        )
        self.conversation.add(ref, record, node, followed.digests[-1])
        self.log.append((ref, record))
        self.prompts[ref.seq] = prompt
        return record

    def rebuilt(self, record: CallRecord) -> list[int]:
        """Rebuild the whole prompt of a record from records alone."""
        if record.parent is None:
            return unpack_tokens(record.prompt_tail)
        parent = self.log[record.parent.seq - 1][1]
        sampled = parent.choices[record.parent_choice].token_ids()
        return self.rebuilt(parent) + sampled + unpack_tokens(record.prompt_tail)


def test_a_request_extends_the_longest_stored_conversation_that_it_begins_with() -> None:
    episode = Episode()
    first, answer = [turn("user", "a")], turn("assistant", "b")
    episode.call(first, [5, IM_END], answer)
    longer = [*first, answer, turn("user", "c")]
    second = episode.call(longer, [6, IM_END], turn("assistant", "d"))
    third = episode.call([*longer, turn("assistant", "d"), turn("user", "e")], [7], turn("assistant", "f"))
    assert second.parent == CallRef(1, "call-0", b"")
    assert third.parent == CallRef(2, "call-1", b"")
    assert third.messages == (turn("user", "e"),)


def test_other_tools_are_another_conversation() -> None:
    episode = Episode()
    first, answer = [turn("user", "a")], turn("assistant", "b")
    episode.call(first, [5], answer)
    assert episode.call([*first, answer, turn("user", "c")], [6], answer, tools=(TOOL,)).parent is None


def test_ids_and_formatting_of_tool_calls_and_reasoning_do_not_matter() -> None:
    plain = next_digest(b"", called('{"a":1,"b":2}'))
    assert plain == next_digest(b"", called('{"b": 2, "a": 1}', id="another"))
    assert plain == next_digest(b"", {**called('{"a":1,"b":2}'), "content": "", "reasoning_content": "hm"})
    assert plain != next_digest(b"", called('{"a":1,"b":3}'))
    assert plain != next_digest(b"", {**called('{"a":1,"b":2}'), "content": "x"})
    assert next_digest(b"", called("not json")) != plain
    assert plain == next_digest(b"", called('{"a":1.0,"b":2}'))
    assert plain != next_digest(b"", called('{"a":1.5,"b":2}'))
    assert plain == next_digest(b"", {**called('{"a":1,"b":2}'), "name": "bee"})
    assert next_digest(b"", called("")) == next_digest(b"", called("{}"))
    assert next_digest(b"", turn("user", "x", name="bee")) != next_digest(b"", turn("user", "x"))


def test_arguments_that_are_nested_too_deeply_to_be_read_are_compared_as_text() -> None:
    deep = "[" * 5000 + "]" * 5000
    assert next_digest(b"", called(deep)) == next_digest(b"", called(deep))
    assert next_digest(b"", called(deep)) != next_digest(b"", called(deep + " "))


def test_what_was_sampled_before_an_edited_message_is_still_continued() -> None:
    episode = Episode()
    messages = [turn("user", "a")]
    for index in range(3):
        answer = turn("assistant", f"answer {index}")
        episode.call(messages, [10 + index, IM_END], answer)
        messages = [*messages, answer, turn("user", "more")]
    edited = [*messages]
    edited[3] = turn("assistant", "edited")
    branch = episode.call(edited, [20], turn("assistant", "z"))
    assert branch.parent is not None
    assert branch.parent.seq == 1  # its first answer is still the sampled one
    assert [message["content"] for message in branch.messages] == ["more", "edited", "more", "answer 2", "more"]


def test_of_two_equal_answers_the_first_that_is_not_continued_is_before_and_after_a_rebuild() -> None:
    episode = Episode()
    first, answer = [turn("user", "a")], turn("assistant", "b")
    episode.call(first, [5, IM_END], answer)
    episode.call(first, [6, 6, IM_END], answer)
    third = episode.call([*first, answer, turn("user", "c")], [7], answer)
    assert third.parent is not None
    assert third.parent.seq == 1
    again = Conversation()
    for ref, record in episode.log:
        again.add_stored(ref, record)
    found = again.follow(b"", [*first, answer]).last
    assert found is not None
    assert found.ref.seq == 2, "the first one is continued already"


def test_of_answers_with_other_reasoning_the_one_that_a_request_echoes_is_continued() -> None:
    episode = Episode()
    first, answers = [turn("user", "a")], [turn("assistant", "b", reasoning_content=text) for text in ("one", "two")]
    for number, answer in enumerate(answers):
        episode.call(first, [5 + number, IM_END], answer)
    conversation = episode.conversation
    for echoed, seq in ((answers[0], 1), (answers[1], 2), (turn("assistant", "b"), 1)):
        messages = [*first, echoed, turn("user", "c")]
        found = conversation.follow(b"", messages)
        assert found.last is not None
        assert (found.count, found.last.ref.seq) == (2, seq)


def test_a_call_that_was_cut_off_is_known_but_never_continued() -> None:
    conversation = Conversation()
    choice = Choice(tokens=pack_tokens([5]), logprobs=b"")
    record = CallRecord(
        id="x",
        engine="main",
        run=1,
        episode="main-1-1",
        prompt_tail=b"",
        prompt_tokens=0,
        choices=(choice,),
        sampling=SamplingParams(),
        status=CallStatus.CUT_OFF,
        request_digest=b"d",
    )
    ref = CallRef(1, "x", b"")
    conversation.add(ref, record, None, b"")
    assert conversation.knows(ref)
    assert conversation.answers == {}
    assert conversation.longest_tokens(pack_tokens([5, 6])) is None


def long_episode(turns: int, tokens: int) -> tuple[Conversation, int]:
    """Return a linear conversation, and how many bytes its tokens take."""
    conversation, before, node, sampled = Conversation(), b"", None, pack_tokens([1] * 64)
    tail, length = pack_tokens([1] * (tokens // turns - 64)), 0
    for seq in range(turns):
        question, answer = turn("user", str(seq)), turn("assistant", f"answer {seq}")
        length += len(tail) // 4
        ref = CallRef(seq, f"call-{seq}", b"")
        record = CallRecord(
            id=ref.id,
            engine="main",
            run=1,
            episode="main-1-1",
            parent=node.ref if node else None,
            prompt_tail=tail,
            prompt_tokens=length,
            choices=(Choice(tokens=sampled, logprobs=b"", message=answer),),
            sampling=SamplingParams(),
        )
        conversation.add(ref, record, node, next_digest(before, question))
        node = conversation.sampled.after(next_digest(before, question))[0]
        before, length = node.digest, length + 64
    assert node is not None
    assert len(node.tokens) == 4 * length
    assert node.tokens.startswith(node.prompt)
    return conversation, 4 * length


def test_a_conversation_takes_memory_for_each_of_its_tokens_once() -> None:
    for turns in (10, 400):
        conversation, tokens = long_episode(turns, 200_000)
        assert tokens < conversation.memory_bytes < tokens + 3000 * turns


def test_what_a_dropped_conversation_leaves_to_the_next_one_is_counted_and_goes_on_counting() -> None:
    dropped, tokens = long_episode(10, 10_000)
    (node,) = dropped.sampled.after(next_digest(_before_last(9), turn("user", "9")))
    fresh = Conversation()
    record = CallRecord(
        id="x",
        engine="main",
        run=1,
        episode="main-1-1",
        parent=node.ref,
        prompt_tail=b"",
        prompt_tokens=node.count,
        choices=(Choice(tokens=pack_tokens([5]), logprobs=b"", message=turn("assistant", "b")),),
        sampling=SamplingParams(),
    )
    fresh.add(CallRef(10, "x", b""), record, node, b"d")
    assert fresh.memory_bytes > tokens
    assert fresh.sampled.after(b"d")[0].sampled == 10 * 64 + 1


def _before_last(turns: int) -> bytes:
    """Return the digest of a long episode after so many turns."""
    digest = b""
    for seq in range(turns):
        digest = next_digest(next_digest(digest, turn("user", str(seq))), turn("assistant", f"answer {seq}"))
    return digest


def test_what_is_remembered_of_requests_is_counted() -> None:
    conversation = Conversation()
    before = conversation.memory_bytes
    question, text = turn("user", "a"), "x" * 100_000
    for number in range(WALKS + 2):
        asked = [turn("system", f"{number}{text}"), question, turn("assistant", "b"), question]
        conversation.follow(b"", [*asked, turn("assistant", "c"), question])
    assert WALKS * len(text) < conversation.memory_bytes - before < WALKS * (len(text) + 10_000)
    conversation.forget_walks()
    assert conversation.memory_bytes == before


def test_the_longest_of_plain_completions_that_fit_is_continued() -> None:
    conversation, length = Conversation(), 0
    node = None
    for seq, (tail, sampled) in enumerate([([3, 4], [5]), ([6], [7, 8]), ([6], [9])]):
        record = CallRecord(
            id=f"call-{seq}",
            engine="main",
            run=1,
            episode="main-1-1",
            prompt_tail=pack_tokens(tail),
            prompt_tokens=length + len(tail),
            choices=(Choice(tokens=pack_tokens(sampled), logprobs=b""),),
            sampling=SamplingParams(),
        )
        conversation.add(CallRef(seq, record.id, b""), record, node, b"")
        node = node or conversation.longest_tokens(pack_tokens([3, 4, 5]))
        length = 3
    for prompt, seq in (([3, 4, 5], 0), ([3, 4, 5, 6, 7], 0), ([3, 4, 5, 6, 7, 8, 1], 1), ([3, 4, 5, 6, 9], 2)):
        found = conversation.longest_tokens(pack_tokens(prompt))
        assert found is not None
        assert found.ref.seq == seq
    assert conversation.longest_tokens(pack_tokens([3, 4])) is None


texts = st.text(alphabet="ab ", max_size=4)
moves = st.lists(
    st.tuples(
        st.integers(0, 2),  # which agent's line
        st.sampled_from(["extend", "edit", "cut"]),
        texts,
        st.lists(st.integers(3, 60), min_size=1, max_size=4),
        st.booleans(),  # ended by the model, or by length
    ),
    min_size=1,
    max_size=12,
)


def play(steps: Any, call: Callable[[list[ChatMessage], list[int], ChatMessage], None]) -> list[list[ChatMessage]]:
    """Let three agents of a harness make these moves. `call` gets each request, what is sampled for it, and its answer.

    Return their conversations.
    """
    lines = [[turn("system", str(line)), turn("user", "go")] for line in range(3)]
    for which, what, text, sampled, ended in steps:
        line = lines[which]
        if what == "edit" and len(line) > 3:
            line = [*line[:2], turn("assistant", text), *line[3:]]
        elif what == "cut":
            line = line[:2]
        answer = turn("assistant", text)
        call(line, [*sampled, IM_END] if ended else sampled, answer)
        lines[which] = [*line, answer, turn("user", text)]
    return lines


@given(moves)
@settings(max_examples=80)
def test_whatever_a_harness_does_prompts_are_rebuilt_exactly_from_the_records(steps: Any) -> None:
    episode = Episode()

    def call(messages: list[ChatMessage], sampled: list[int], answer: ChatMessage) -> None:
        record = episode.call(messages, sampled, answer)
        assert episode.rebuilt(record) == episode.prompts[len(episode.log)]

    lines = play(steps, call)
    again = Conversation()
    for ref, record in episode.log:
        again.add_stored(ref, record)
    for line in lines:
        found, known = again.follow(b"", line), episode.conversation.follow(b"", line)
        assert (found.messages, found.digests, found.count) == (known.messages, known.digests, known.count)
        assert (found.last and found.last.ref) == (known.last and known.last.ref)


@given(moves)
@settings(max_examples=80)
def test_what_is_remembered_of_earlier_requests_changes_nothing(steps: Any) -> None:
    remembering, forgetful = Episode(), Episode()

    def call(messages: list[ChatMessage], sampled: list[int], answer: ChatMessage) -> None:
        forgetful.conversation.forget_walks()
        found, whole = remembering.conversation, forgetful.conversation.follow(b"", messages)
        forgetful.conversation.forget_walks()
        gone_on = found.follow_on(b"", messages, (), 1 << 20)
        if gone_on is not None:
            assert [*map(name_of, gone_on.candidates)] == [*map(name_of, whole.candidates)]
            assert (gone_on.messages, gone_on.digests, gone_on.count) == (whole.messages, whole.digests, whole.count)
            assert gone_on.outline == NO_OUTLINE.extended(whole.messages, gone_on.outline.known)
        record = remembering.call(messages, sampled, answer)
        assert record == forgetful.call(messages, sampled, answer)

    play(steps, call)


def name_of(node: Node) -> tuple[str, int]:
    return node.name


def test_a_conversation_is_followed_on_where_an_answer_and_little_else_is_new() -> None:
    episode, messages = Episode(), [turn("user", "a")]
    found: list[int | None] = []
    outlined: list[int] = []
    for number in range(4):
        for bytes_max in (10_000, 100):
            followed = episode.conversation.follow_on(b"", messages, (), bytes_max)
            found.append(None if followed is None else followed.count)
            outlined += [] if followed is None else [followed.outline.known]
        answer = turn("assistant", f"{number}")
        episode.call(messages, [number, IM_END], answer)
        messages = [*messages, answer, turn("user", "more")]
    assert found == [None, None, None, None, 4, None, 6, None]
    assert outlined == [1, 3], "all but what could still be matched otherwise"
    again = episode.conversation.follow_on(b"", messages[:5], (), 10_000)
    assert again is None, "no later answer is in it, and of equal ones another may be free"
