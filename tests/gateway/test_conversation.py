"""Which stored conversation a request extends, and whether a chain of records always gives back the exact prompt."""

from typing import Any

import hypothesis.strategies as st
from hypothesis import given, settings

from bombus.hive.records import CallRecord, CallRef, CallStatus, Choice, SamplingParams, pack_tokens, unpack_tokens
from bombus_gateway.call.conversation import Conversation, next_digest, prefix_digests, root_digest
from bombus_gateway.text.message import ChatMessage
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
        digests = prefix_digests(root_digest(tools, {}), messages)
        count, node = self.conversation.longest(digests, messages) or (0, None)
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
        self.conversation.add(ref, record, pack_tokens(prompt), digests[-1])
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


def test_of_two_equal_answers_the_first_one_is_continued_before_and_after_a_rebuild() -> None:
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
    found = again.longest(prefix_digests(b"", [*first, answer]), [*first, answer])
    assert found is not None
    assert found[1].ref.seq == 1


def test_of_answers_with_other_reasoning_the_one_that_a_request_echoes_is_continued() -> None:
    episode = Episode()
    first, answers = [turn("user", "a")], [turn("assistant", "b", reasoning_content=text) for text in ("one", "two")]
    for number, answer in enumerate(answers):
        episode.call(first, [5 + number, IM_END], answer)
    conversation = episode.conversation
    for echoed, seq in ((answers[0], 1), (answers[1], 2), (turn("assistant", "b"), 1)):
        messages = [*first, echoed, turn("user", "c")]
        found = conversation.longest(prefix_digests(b"", messages), messages)
        assert found is not None
        assert (found[0], found[1].ref.seq) == (2, seq)


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
    conversation.add(ref, record, b"", b"")
    assert conversation.knows(ref)
    assert conversation.answers == {}
    assert conversation.longest_tokens(pack_tokens([5, 6])) is None


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


@given(moves)
@settings(max_examples=80, deadline=None)
def test_whatever_a_harness_does_prompts_are_rebuilt_exactly_from_the_records(steps: Any) -> None:
    episode = Episode()
    lines: list[list[ChatMessage]] = [[turn("system", str(line)), turn("user", "go")] for line in range(3)]
    for which, what, text, sampled, ended in steps:
        line = lines[which]
        if what == "edit" and len(line) > 3:
            line = [*line[:2], turn("assistant", text), *line[3:]]
        elif what == "cut":
            line = line[:2]
        answer = turn("assistant", text)
        record = episode.call(line, [*sampled, IM_END] if ended else sampled, answer)
        assert episode.rebuilt(record) == episode.prompts[len(episode.log)]
        lines[which] = [*line, answer, turn("user", text)]
    again = Conversation()
    for ref, record in episode.log:
        again.add_stored(ref, record)
    for line in lines:
        digests = prefix_digests(b"", line)
        assert again.longest(digests, line) == episode.conversation.longest(digests, line)
