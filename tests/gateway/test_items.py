"""Bodies of a conversation, of which only what is new is read: what they say must not depend on that."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bombus.errors import Refused
from bombus.hive.records import digest
from bombus_gateway.anthropic.request import read_messages
from bombus_gateway.call.prefixes import BODIES_KEPT, AnotherList, BodyPrefix, EarlierBodies, EarlierBody, nothing_of
from bombus_gateway.decoding import items as reading
from bombus_gateway.decoding.items import ITEMS_READ_AGAIN, ItemReader
from bombus_gateway.decoding.json_body import BadParameter, BodyDecoder
from bombus_gateway.openai.request import read_chat
from bombus_gateway.responses.request import read_response_request

Json = dict[str, Any]
ROUTE = b"route"
MARK = {"cache_control": {"type": "ephemeral"}}
TOOL = {"type": "object", "properties": {"messages": {"type": "array"}, "input": {"type": "array"}}}
SIGNATURE = "0123456789abcdef" * 2


class ModelAPI(NamedTuple):
    """How one dialect writes a conversation: items that ask, items that answer, and the fields around the list."""

    read: Callable[..., Any]
    field: str
    asked: Sequence[Callable[[str], Json]]
    answered: Sequence[Callable[[str], Json]]
    around: Json


def call(text: str) -> Json:
    return {"id": text, "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": text})}}


def blocks(*found: Json) -> list[Json]:
    return [*found]


APIS = {
    "chat": ModelAPI(
        read_chat,
        "messages",
        [
            lambda text: {"role": "user", "content": text},
            lambda text: {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": text, **MARK}]},
            lambda text: {"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": text}]},
        ],
        [
            lambda text: {"role": "assistant", "content": text, "reasoning_content": "hm"},
            lambda text: {"role": "assistant", "content": None, "tool_calls": [call(text)]},
        ],
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": TOOL}}], "metadata": {"messages": []}},
    ),
    "messages": ModelAPI(
        read_messages,
        "messages",
        [
            lambda text: {"role": "user", "content": text},
            lambda text: {"role": "user", "content": blocks({"type": "tool_result", "tool_use_id": "c", **MARK})},
            lambda text: {"role": "user", "content": blocks({"type": "image"}, {"type": "text", "text": text})},
            lambda text: {"role": "system", "content": text},
            lambda text: {"role": "user", "content": blocks({"type": "tool_reference", "tool_name": "late"})},
        ],
        [
            lambda text: {
                "role": "assistant",
                "content": blocks({"type": "thinking", "thinking": text, "signature": SIGNATURE}),
            },
            lambda text: {
                "role": "assistant",
                "content": blocks({"type": "tool_use", "id": "c", "name": "f", "input": {"a": text}}),
            },
        ],
        {
            "max_tokens": 9,
            "system": "be brief",
            "tools": [{"name": "f", "input_schema": TOOL}, {"name": "late", "defer_loading": True}],
        },
    ),
    "responses": ModelAPI(
        read_response_request,
        "input",
        [
            lambda text: {"role": "user", "content": text},
            lambda text: {"type": "function_call_output", "call_id": "c", "output": text, **MARK},
            lambda text: {"type": "message", "role": "user", "content": [{"type": "image"}]},
            lambda text: {"type": "additional_tools", "tools": [{"type": "function", "name": text or "g"}]},
        ],
        [
            lambda text: {"role": "assistant", "content": [{"type": "output_text", "text": text}]},
            lambda text: {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            lambda text: {"type": "reasoning", "id": f"rs_{SIGNATURE}_0", "summary": [{"type": "t", "text": text}]},
            lambda text: {"type": "item_reference", "id": f"msg_{SIGNATURE}_0"},
        ],
        {"instructions": "be brief", "tools": [{"type": "function", "name": "f", "parameters": TOOL}]},
    ),
}

texts = st.sampled_from(["", "a", '"messages":[', '\\"input": [', "ü🙂", "\ud83d"])
items = st.tuples(st.booleans(), st.integers(0, 4), texts)
turns = st.lists(
    st.tuples(
        st.lists(items, min_size=1, max_size=4),  # what is added
        st.integers(0, 12),  # how many of the last items are taken away before that
        st.none() | items,  # what stands in place of the last item so far
        st.sampled_from([None, 1]),  # how the body is indented
        st.booleans(),  # whether the list comes before all other fields, or after them
    ),
    min_size=2,
    max_size=8,
)


def made(api: ModelAPI, item: tuple[bool, int, str]) -> Json:
    is_answer, kind, text = item
    forms = api.answered if is_answer else api.asked
    return forms[kind % len(forms)](text)


class Reader:
    """Reads the bodies of one episode as an API does."""

    def __init__(self) -> None:
        self.bodies = EarlierBodies()
        self.spared = 0  # items that were not read again

    def read(self, api: ModelAPI, body: bytes) -> Any:
        before = self.bodies.continued_by(ROUTE, body)
        self.spared += before.prefix.items
        try:
            found = api.read(body, before.prefix)
        except AnotherList:
            before = nothing_of(ROUTE)
            found = api.read(body)
        found_digest, kept = before.continued(body, found.prefix)
        assert found_digest == digest(ROUTE + b"\0" + body)
        self.bodies.keep(kept, before)
        return found


def outcome(read: Callable[[bytes], Any], body: bytes) -> Any:
    """Return what a body says, in a form that can be compared, or why it is refused."""
    try:
        found: Any = read(body)
    except Refused as error:
        return type(error), str(error), getattr(error, "param", None)
    fields: Json = msgspec.structs.asdict(found) if isinstance(found, msgspec.Struct) else found._asdict()
    return fields | {"prefix": None}


def alone(api: ModelAPI, body: bytes) -> Any:
    """Return what a body says when all its items are read in one go."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "ITEMS_READ_AGAIN", 1 << 20)
        return outcome(api.read, body)


@pytest.mark.parametrize("api", APIS.values(), ids=APIS)
@given(turns)
@settings(max_examples=150, deadline=None)
def test_what_a_body_says_does_not_depend_on_those_before_it(api: ModelAPI, steps: Any) -> None:
    reader, said = Reader(), list[Json]()
    for added, taken_away, other, indent, is_first in steps:
        said = said[: max(len(said) - taken_away, 0)] if taken_away > 8 else said
        if other is not None:
            said = [*said[:-1], made(api, other)]
        said = [*said, *(made(api, item) for item in added)]
        listed = {api.field: said}
        fields = {"model": "m", **({**listed, **api.around} if is_first else {**api.around, **listed})}
        body = json.dumps(fields, indent=indent).encode()
        assert outcome(partial(reader.read, api), body) == alone(api, body)


@pytest.mark.parametrize("api", APIS.values(), ids=APIS)
def test_only_what_is_new_of_a_long_conversation_is_read(api: ModelAPI) -> None:
    reader, said = Reader(), list[Json]()
    for number in range(20):
        said += [made(api, (False, number, str(number))), made(api, (True, number // 2, str(number)))]
        body = json.dumps({"model": "m", api.field: said, **api.around}).encode()
        assert outcome(partial(reader.read, api), body) == alone(api, body)
    assert reader.spared == sum(max(2 * number - ITEMS_READ_AGAIN, 0) for number in range(20))


@pytest.mark.parametrize("api", APIS.values(), ids=APIS)
def test_a_refused_item_is_named_by_its_place_in_the_whole_list(api: ModelAPI) -> None:
    reader = Reader()
    said = [made(api, (number % 2 == 1, 0, str(number))) for number in range(10)]
    reader.read(api, json.dumps({"model": "m", api.field: said}).encode())
    for wrong in ({"role": "user", "content": [{"type": "text"}]}, {"role": 3}):
        with pytest.raises(BadParameter) as caught:
            reader.read(api, json.dumps({"model": "m", api.field: [*said, wrong]}).encode())
        assert caught.value.param.startswith((f"{api.field}.10.", f"{api.field}[10]."))
    assert reader.spared == 2 * (len(said) - ITEMS_READ_AGAIN)


class Body(msgspec.Struct):
    messages: list[msgspec.Raw]
    other: Any = None


def joined(before: bytes | None, parts: Sequence[bytes], at: int) -> bytes:
    return (before or b"") + b"".join(b"%d%s " % (number, part) for number, part in enumerate(parts, at))


READ = ItemReader(BodyDecoder(Body, "messages"), "messages", joined)


def test_a_body_with_two_lists_that_look_alike_is_read_whole_each_time() -> None:
    numbers = b"[1,2,3,4,5,6]"
    for body, is_spared in (
        (b'{"messages":%s,"other":{"input":%s}}' % (numbers, numbers), True),
        (b'{"other":{"messages":%s},"messages":%s}' % (numbers, numbers), False),
        (b'{"other":{"messages":[2,2]},"messages":%s}' % numbers, True),
        (b'{"other":"\\"messages\\":[1,2","messages" : [ 1 ,2,3,4,5,6]}', True),
        (b'{"\\u006dessages":%s}' % numbers, False),
    ):
        found = READ(body)
        assert (found.items, found.prefix.items) == (b"01 12 23 34 45 56 ", 2 if is_spared else 0), body
        if is_spared:
            assert found.prefix.read == b"01 12 "
            again = READ(body.replace(b"5,6]", b"5,6,7]"), found.prefix)
            assert (again.items, again.prefix.items) == (b"01 12 23 34 45 56 67 ", 3)
            assert again.body.messages[1:] == [msgspec.Raw(b"%d" % number) for number in range(3, 8)]


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b'{"messages":[1,2,3,4,5,6,7],"messages":[8]}', id="a field that comes twice"),
        pytest.param(b'{"other":{"messages":[1,2,3,4,5,6,7]},"messages":[8]}', id="a list that is another field's"),
        pytest.param(b'{"messages":[1,2,3,4,5,6,7],"\\u006dessages":[8]}', id="a name that is spelled otherwise"),
    ],
)
def test_a_list_that_is_not_the_one_that_was_read_is_read_alone(body: bytes) -> None:
    start = body.index(b"1,2")
    before = BodyPrefix(start, start + 3, 2, b"01 12 ")
    with pytest.raises(AnotherList):
        READ(body, before)
    assert READ(body).items == b"08 "


def test_what_is_no_json_is_refused_as_a_whole_however_it_begins() -> None:
    reader, api = Reader(), APIS["chat"]
    said = [made(api, (number % 2 == 1, 0, str(number))) for number in range(10)]
    body = json.dumps({"model": "m", "messages": said}).encode()
    reader.read(api, body)
    for wrong in (body.replace(b"]}", b",]}"), body[:-1], body[:-2], body.replace(b'"9"', b'"9')):
        assert reader.bodies.continued_by(ROUTE, wrong).prefix.items
        refusal = outcome(partial(reader.read, api), wrong)
        assert refusal == alone(api, wrong)
        assert "could not be read as JSON" in refusal[1]
    assert outcome(partial(reader.read, api), body) == alone(api, body)


def test_half_of_a_character_in_an_older_item_is_read_once() -> None:
    reader, api = Reader(), APIS["chat"]
    said = [made(api, (number % 2 == 1, 0, "x\ud83d")) for number in range(10)]
    for _ in range(2):
        body = json.dumps({"model": "m", "messages": said}).encode()
        assert [each["content"] for each in reader.read(api, body).completion.messages] == ["x\ufffd"] * 10
    assert reader.spared == len(said) - ITEMS_READ_AGAIN


def read_body(numbers: Sequence[int], other: str = "") -> EarlierBody:
    body = json.dumps({"messages": numbers, "other": other}).encode()
    (_, kept) = nothing_of(ROUTE).continued(body, READ(body).prefix)
    return kept


def test_a_body_continues_another_on_its_own_route_where_its_last_item_ends_as_there() -> None:
    bodies = EarlierBodies()
    bodies.keep(first := read_body([1, 2, 3, 4, 5, 6]), nothing_of(ROUTE))
    for rest, continues in ((b",7]}", True), (b" , 7]}", True), (b" ]}", True), (b"", False), (b"7,7]}", False)):
        body = b'{"messages": [1, 2' + rest
        assert (bodies.continued_by(ROUTE, body) is first) == continues
        assert not bodies.continued_by(b"another", body).prefix.items


def test_the_longest_beginning_is_taken_and_the_oldest_bodies_are_forgotten() -> None:
    bodies, nothing = EarlierBodies(), nothing_of(ROUTE)
    bodies.keep(read_body([*range(6)]), nothing)
    bodies.keep(longer := read_body([*range(9)]), nothing)
    for _ in range(BODIES_KEPT):
        bodies.keep(read_body([*range(6)]), nothing)  # requests that come at once read the same
    whole = json.dumps({"messages": [*range(20)]}).encode()
    assert bodies.continued_by(ROUTE, whole) is longer
    bodies.keep(longest := read_body([*range(12)]), longer)
    assert bodies.continued_by(ROUTE, whole) is longest
    for number in range(BODIES_KEPT):
        bodies.keep(read_body([number, *range(50, 60)], "x" * 10_000), nothing)
    assert not bodies.continued_by(ROUTE, whole).prefix.items
    assert BODIES_KEPT * 10_000 < bodies.memory_bytes < 2 * BODIES_KEPT * 10_000


def test_what_was_read_counts_as_what_it_takes_and_what_takes_too_much_is_not_kept() -> None:
    bodies = EarlierBodies()
    lists: list[list[Json]] = [[{}] * 1000] * 20
    body = json.dumps({"messages": [*lists, 1, 2, 3, 4]}).encode()
    (_, kept) = nothing_of(ROUTE).continued(body, READ(body).prefix)
    assert kept.memory_bytes > len(body) + 20 * 1000 * 64
    for copies, is_kept in ((1, True), (30, False)):
        body = json.dumps({"messages": [copies, *lists * copies, 1, 2, 3, 4]}).encode()
        (_, kept) = nothing_of(ROUTE).continued(body, READ(body).prefix)
        bodies.keep(kept, nothing_of(ROUTE))
        assert bool(bodies.continued_by(ROUTE, body).prefix.items) == is_kept


@pytest.mark.parametrize(
    ("leading", "expected"),
    [
        pytest.param([{"role": "system", "content": []}], [("system", "")], id="an empty one"),
        pytest.param([{"role": "system", "content": "a"}] * 2, [("system", "a\na")], id="two"),
    ],
)
def test_leading_messages_of_the_system_are_one(leading: list[Json], expected: list[tuple[str, str]]) -> None:
    for rest in ([], [{"role": "user", "content": "hi"}]):
        body = json.dumps({"model": "m", "max_tokens": 9, "messages": [*leading, *rest]}).encode()
        found = read_messages(body).completion.messages
        assert [(each["role"], each["content"]) for each in found] == [*expected, *(("user", "hi") for _ in rest)]


def test_what_is_left_out_is_named_in_the_order_of_the_conversation() -> None:
    image, audio = {"type": "image"}, {"type": "audio"}
    messages = [
        {"role": role, "content": [part, {"type": "text", "text": "t"}]}
        for role, part in (("user", image), ("assistant", {"type": "text", "text": "a"}), ("user", audio))
    ]
    system = [image, {"type": "text", "text": "s"}]
    body = json.dumps({"model": "m", "max_tokens": 9, "system": system, "messages": messages}).encode()
    places = ["system.0", "messages.0.content.0", "messages.2.content.0"]
    assert [each.field for each in read_messages(body).completion.unsupported] == places
