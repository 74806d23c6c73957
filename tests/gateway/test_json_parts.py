"""What is remembered of the parts of bodies, and what is forgotten again."""

import json
from typing import Any

import pytest

from bombus_gateway.anthropic.request import read_messages
from bombus_gateway.decoding.json_body import BadParameter
from bombus_gateway.decoding.json_parts import PART_SIZE, RememberedParts
from bombus_gateway.openai.request import read_chat

GOOD = {"role": "user", "content": "hello"}


class Reader:
    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def __call__(self, part: bytes) -> str:
        self.parts.append(part)
        if part == b"bad":
            raise ValueError("bad")
        return part.decode()


def test_a_part_is_read_once() -> None:
    reader = Reader()
    remembered = RememberedParts(reader)
    assert [remembered(part) for part in (b"a", b"b", b"a")] == ["a", "b", "a"]
    assert remembered(b"a") is remembered(b"a")
    assert reader.parts == [b"a", b"b"]


def test_what_cannot_be_read_is_refused_each_time() -> None:
    remembered = RememberedParts(Reader())
    for _ in range(2):
        with pytest.raises(ValueError, match="bad"):
            remembered(b"bad")


def test_what_nobody_asks_for_is_forgotten() -> None:
    reader = Reader()
    remembered = RememberedParts(reader, size_max=4 * (PART_SIZE + 1))
    for other in b"bcdefghijk":
        remembered(b"a")
        remembered(bytes([other]))
    remembered(b"b")
    assert reader.parts.count(b"a") == 1
    assert reader.parts.count(b"b") == 2


def test_a_large_part_does_not_displace_the_others() -> None:
    reader = Reader()
    remembered = RememberedParts(reader, size_max=4 * (PART_SIZE + 1))
    for part in (b"a", b"x" * 1000, b"x" * 1000, b"a"):
        remembered(part)
    assert reader.parts == [b"a", b"x" * 1000, b"x" * 1000]


def test_a_part_of_many_lists_counts_as_what_it_takes_in_memory() -> None:
    reader = Reader()
    remembered = RememberedParts(reader, size_max=40_000)
    lists, text = b"[" + b"[]," * 300 + b"1]", b"x" * 900
    for part in (lists, text, lists, text):
        remembered(part)
    assert reader.parts == [lists, text, lists]


@pytest.mark.parametrize(
    ("wrong", "place"),
    [
        pytest.param({"role": 3}, "messages[2].role", id="a field"),
        pytest.param(7, "messages[2]", id="the message"),
        pytest.param({"role": "user", "content": [{"type": "text"}]}, "messages.2.content.0", id="a part of it"),
    ],
)
@pytest.mark.parametrize("read", [read_chat, read_messages])
def test_a_refused_message_is_named_by_its_own_place(read: Any, wrong: Any, place: str) -> None:
    body = {"model": "m", "max_tokens": 5, "messages": [GOOD, {"role": "assistant", "content": "hi"}, wrong]}
    for _ in range(2):
        with pytest.raises(BadParameter) as caught:
            read(json.dumps(body).encode())
        assert caught.value.param.startswith(place)


@pytest.mark.parametrize("read", [read_chat, read_messages])
def test_what_is_left_out_is_named_by_the_place_of_each_request(read: Any) -> None:
    picture = {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "audio"}]}
    answer = {"role": "assistant", "content": "hi"}
    for messages, place in (([picture], "messages.0.content.1"), ([GOOD, answer, picture], "messages.2.content.1")):
        body = json.dumps({"model": "m", "max_tokens": 5, "messages": messages}).encode()
        assert [found.field for found in read(body).completion.unsupported] == [place]
