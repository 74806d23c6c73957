"""How deep JSON is, and how much is in it, without decoding it."""

import json
import random
import time
from collections.abc import Iterator

import pytest

from bombus_gateway.decoding.json_shape import _CHUNK_BYTES as CHUNK
from bombus_gateway.decoding.json_shape import is_deeper, marks_of

TEXTS = ("", "a", "[", "]", "{", "}", '"', "\\", '\\"', '"]', "\\\\[", "[[[[", "é\n", "\\u005b")


def depth_of(value: object) -> int:
    """Return how many lists and objects are within each other."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth_of, inner), default=0)


def some_value(pick: random.Random, depth: int) -> object:
    kind = pick.random()
    if depth == 0 or kind < 0.4:
        return pick.choice((*TEXTS, 1, -0.5, None, True))
    members = [some_value(pick, depth - 1) for _ in range(pick.randrange(4))]
    return members if kind < 0.7 else dict(zip(pick.sample(TEXTS, len(members)), members, strict=True))


def test_depth_is_that_of_the_decoded_value_whatever_is_in_its_texts() -> None:
    for seed in range(300):
        pick = random.Random(seed)
        value = [some_value(pick, 5) for _ in range(3)]
        text = json.dumps(value, ensure_ascii=pick.random() < 0.5, separators=pick.choice(((",", ":"), (", ", ": "))))
        depth = depth_of(value)
        assert not is_deeper(marks_of(text.encode()), depth), seed
        assert is_deeper(marks_of(text.encode()), depth - 1), seed


@pytest.mark.parametrize(
    ("text", "deeper"), [(b"[" * 9, True), (b"]" * 9, False), (b"[[]" * 9, True), (b"}{" * 9, False)]
)
def test_what_is_not_closed_is_as_deep_as_it_may_be(text: bytes, deeper: bool) -> None:
    assert is_deeper(marks_of(text), 8) == deeper


def test_lists_names_and_values_are_counted_outside_of_texts() -> None:
    marks = marks_of(json.dumps({"a:,[{": ["[", 1, "\\", {}], 'b"]': ":"}).encode())
    assert (marks.count(b"["), marks.count(b":"), marks.count(b",")) == (3, 2, 4)


def around_the_end_of_a_chunk() -> Iterator[list[str]]:
    """Yield texts whose quotation marks and backslashes are at each place around the end of the first chunk."""
    for before in range(CHUNK - 12, CHUNK):
        for text in ("[", '"[', "\\[", '\\"[', "\\\\", "\\\\\\\\["):
            yield ["x" * before + text, "]"]


def test_texts_and_what_is_escaped_may_lie_across_chunks() -> None:
    for value in around_the_end_of_a_chunk():
        text = json.dumps([value, [[]]]).encode()
        assert not is_deeper(marks_of(text), 3)
        assert is_deeper(marks_of(text), 2)


@pytest.mark.parametrize("each", [b'""', b'"]"', b'"[]"', b'"\\\\\\""', b"{}", b'{"]":"}"}'])
def test_millions_of_texts_and_lists_take_less_time_than_to_decode_them(each: bytes) -> None:
    text = b"[" + b"[[]]," * 100 + b",".join([each] * 500_000) + b"]"
    began = time.thread_time()
    json.loads(text)
    decoded = time.thread_time()
    assert not is_deeper(marks_of(text), 3)
    assert time.thread_time() - decoded < 2 * (decoded - began) + 0.05
