"""Values that some library cannot hold, and changes of a tree of JSON or msgpack. Pure: all chance is `random`."""

import json
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

Tree = Any  # None, a bool, a number, text, bytes, a list, a dict with names, a `Written` or `Pairs`
Path = tuple[int | str, ...]


class Written(NamedTuple):
    """A value by its bytes, for what the encoders would not write."""

    json: bytes
    msgpack: bytes


class Pairs(NamedTuple):
    """An object whose names may repeat."""

    items: tuple[tuple[Tree, Tree], ...]


def _nested(depth: int) -> Written:
    return Written(b"[" * depth + b"]" * depth, b"\x91" * depth + b"\xc0")


def _objects(depth: int) -> Written:
    return Written(b'{"a":' * depth + b"1" + b"}" * depth, b"\x81\xa1a" * depth + b"\x01")


ODD: tuple[Tree, ...] = (
    None, True, False, 0, 1, -1, 2, 127, 128, 255, 4096, 65536, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53, 2**63 - 1,
    -(2**63), 2**63, 2**64 - 1, 0.0, -0.0, 0.1, -0.5, 1e-300, 5e-324, 1e9, 1e16, 1.7e308, -1.7e308,
    float("nan"), float("inf"), float("-inf"), "", " ", "a", "0", "1e999", "null", "NaN", "\0",
    "\x1b[31mred\x1b[0m\r\n",
    "\u202egnp\u2066", "e\u0301" * 20, "\U0001f600", "\ufeff", "../../../etc/passwd", "${jndi:ldap://x}", "{{ 7 * 7 }}",
    "{% for x in range(10**9) %}{% endfor %}", "<|im_start|>system\n<|im_end|>", "<tool_call>", "<think>", "%s%n%x",
    "main", "train", "eval", "user", "system", "tool", "x" * 129, "x" * 300, "y" * 5000, "z " * 50_000, [], {}, [[]],
    [None], [{}], {"": ""}, {"a": {"b": []}}, [0] * 5000, ["a"] * 300, {str(number): number for number in range(300)},
    Written(b"9" * 5000, b"\xcf" + b"\xff" * 8), Written(b"-" + b"9" * 400, b"\xd3\x80" + b"\0" * 7),
    Written(b"9" * 5000 + b".5", b"\xcb\x7f\xf0" + b"\0" * 6), Written(b"1e400", b"\xca\x7f\xc0\0\0"),
    Written(b"1e-400", b"\xca\xff\x80\0\0"), Written(b"0x10", b"\xc1"), Written(b"01", b"\xd9"), Written(b"+1",
    b"\xde\xff\xff"),
    Written(b"Infinity", b"\xdf\xff\xff\xff\xff"), Written(b"-NaN", b"\xdd\xff\xff\xff\xff"), Written(b"", b""),
    Written(b"'a'", b"\xdb\xff\xff\xff\xff"), Written(b'"\\ud800"', b"\xa3\xed\xa0\x80"),
    Written(b'"\\udfff\\ud800x"', b"\xa2\xc3("),
    Written(b'"\xff\xfe"', b"\xa2\xff\xfe"), Written(b'"\\u0000"', b"\xa1\0"), Written(b'"\\x"', b"\xc4\x02\xff\0"),
    Written(b"/* */ 1", b"\xc7\x01\x05a"), Written(b"[1,]", b"\xd6\xff\0\0\0\x01"), Written(b"{1:2}",
    b"\x81\x91\x01\x01"),
    Written(b'"\n"', b"\x81\xc0\x01"), _nested(100), _nested(127), _nested(129), _nested(900), _nested(3000),
    _objects(120), _objects(200),
    _objects(1100), Written(b'"' + b"\\u0001" * 20_000 + b'"', b"\xd9\x02\x01\x02"),
)  # fmt: skip
NAMES = (
    "",
    "a",
    "id",
    "type",
    "name",
    "model",
    "reward",
    "__proto__",
    "__class__",
    "x" * 300,
    "\n",
    "\u202e",
    "\ud800",
    "é",
)


# ---- writing -------------------------------------------------------------------------------------------------------


def to_json(tree: Tree) -> bytes:
    """Write a tree as JSON, or as what comes closest to it."""
    match tree:
        case Written():
            return tree.json
        case Pairs():
            return b"{" + b",".join(_name(name) + b":" + to_json(value) for name, value in tree.items) + b"}"
        case dict():
            return to_json(Pairs(tuple(tree.items())))
        case list() | tuple():
            return b"[" + b",".join(map(to_json, tree)) + b"]"
        case bytes():
            return json.dumps(tree.decode("latin-1")).encode()
    return json.dumps(tree).encode()


def to_msgpack(tree: Tree) -> bytes:
    """Write a tree as msgpack, or as what comes closest to it."""
    match tree:
        case Written():
            return tree.msgpack
        case Pairs():
            head = b"\xdf" + len(tree.items).to_bytes(4, "big")
            return head + b"".join(to_msgpack(part) for pair in tree.items for part in pair)
        case dict():
            return to_msgpack(Pairs(tuple(tree.items())))
        case list() | tuple():
            return b"\xdd" + len(tree).to_bytes(4, "big") + b"".join(map(to_msgpack, tree))
        case str():
            text = tree.encode("utf-8", "surrogatepass")
            return b"\xdb" + len(text).to_bytes(4, "big") + text
        case int() if not -(2**63) <= tree < 2**64:
            return b"\xcb" + struct.pack(">d", tree)
    return msgspec.msgpack.encode(tree)


def _name(name: Tree) -> bytes:
    return json.dumps(str(name)).encode()


# ---- changing ------------------------------------------------------------------------------------------------------


def paths(tree: Tree, above: Path = ()) -> Iterator[Path]:
    """Yield the place of every value in a tree, its own first."""
    yield above
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from paths(value, (*above, name))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from paths(value, (*above, index))


def at(tree: Tree, path: Path) -> Tree:
    """Return the value at a place."""
    for step in path:
        tree = tree[step]
    return tree


def changed(tree: Tree, path: Path, change: Callable[[Tree], Tree]) -> Tree:
    """Return the tree with the value at `path` changed. What is not on the way there is shared, not copied."""
    if not path:
        return change(tree)
    copy: Any = dict(tree) if isinstance(tree, dict) else list(tree)
    copy[path[0]] = changed(tree[path[0]], path[1:], change)
    return copy


def mutated(tree: Tree, pick: random.Random, donors: Sequence[Tree] = ()) -> Tree:
    """Return the tree with one to four changes; `donors` are trees from which parts are taken."""
    for _ in range(pick.choices((1, 2, 3, 4), (6, 3, 1, 1))[0]):
        path = pick.choice(list(paths(tree)))
        tree = changed(tree, path, lambda value: _changed_value(value, pick, donors))
    return tree


def _changed_value(value: Tree, pick: random.Random, donors: Sequence[Tree]) -> Tree:
    roll = pick.random()
    if roll < 0.4:
        return pick.choice(ODD)
    if roll < 0.5 and donors:
        donor = pick.choice(donors)
        return at(donor, pick.choice(list(paths(donor))))
    if roll < 0.56:
        return pick.choice(
            ([value], copies(value, pick.choice((2, 64, 500))), {"a": value}, json.dumps(str(value)[:200]))
        )
    match value:
        case bool() | None:
            return pick.choice((not value, 0, "true"))
        case int() | float():
            return pick.choice((value + 1, value - 1, -value, value * 1e6, str(value), float(value), value + 0.5))
        case str():
            return _changed_text(value, pick)
        case bytes():
            return _changed_bytes(value, pick)
        case dict():
            return _changed_object(value, pick)
        case list() | tuple():
            return _changed_list(list(value), pick)
    return pick.choice(ODD)


def copies(value: Tree, count: int) -> list[Tree]:
    """Return copies of a value, as many of `count` as keep a request writable in a moment."""
    return [value] * max(1, min(count, 20_000 // _size(value)))


def _size(tree: Tree) -> int:
    """Return roughly how much a tree is to write, in values or hundreds of characters."""
    match tree:
        case Pairs():
            return 1 + sum(_size(value) for _, value in tree.items)
        case dict():
            return 1 + sum(map(_size, tree.values()))
        case Written():
            return 1 + len(tree.json) // 100
        case list() | tuple():
            return 1 + sum(map(_size, tree))
        case str() | bytes():
            return 1 + len(tree) // 100
    return 1


def _changed_text(text: str, pick: random.Random) -> Tree:
    odd = pick.choice([each for each in ODD if isinstance(each, str) and len(each) < 400])
    where = pick.randrange(len(text) + 1)
    return pick.choice(
        (text[:where] + odd + text[where:], text[:where], text * (2 if len(text) > 10_000 else 50), text.upper(), odd)
    )


def _changed_bytes(body: bytes, pick: random.Random) -> bytes:
    where = pick.randrange(len(body) + 1)
    return pick.choice((body[:where], body + b"\0", body[where:] * 2, bytes(len(body)), b"\xff" * len(body), body * 50))


def _changed_object(value: dict[str, Tree], pick: random.Random) -> Tree:
    items = list(value.items())
    name = pick.choice((*NAMES, *value))
    change = pick.randrange(5)
    if change == 0 and items:
        items.pop(pick.randrange(len(items)))
    elif change == 1 and items:
        where = pick.randrange(len(items))
        items[where] = (name, items[where][1])
    elif change == 2 and items:
        name, again = pick.choice(items)
        items += [(name, each) for each in copies(again, pick.choice((1, 3, 200)))]
    else:
        items.insert(pick.randrange(len(items) + 1), (name, pick.choice(ODD)))
    return dict(items) if len(dict(items)) == len(items) else Pairs(tuple(items))


def _changed_list(value: list[Tree], pick: random.Random) -> list[Tree]:
    change = pick.randrange(4)
    if change == 0 and value:
        value.pop(pick.randrange(len(value)))
    elif change == 1 and value:
        value = value + copies(pick.choice(value), pick.choice((1, 3, 100, 2000)))
    elif change == 2:
        pick.shuffle(value)
    else:
        value.insert(pick.randrange(len(value) + 1), pick.choice(ODD))
    return value


def damaged(body: bytes, pick: random.Random) -> bytes:
    """Return bytes with something wrong that no encoder would write."""
    where = pick.randrange(len(body) + 1)
    until = min(len(body), where + pick.choice((1, 2, 8, 64)))
    match pick.randrange(8):
        case 0:
            return body[:where]
        case 1:
            return body[:where] + pick.randbytes(until - where) + body[until:]
        case 2:
            return (
                body[:where] + pick.choice((b"\xff", b"\0", b"\xc3(", b"\xed\xa0\x80", b"\xef\xbb\xbf")) + body[where:]
            )
        case 3:
            return body[:where] + body[until:]
        case 4:
            return body + pick.choice((b"\0", b"}", b"]", b" " * 1000, body))
        case 5:
            return body[:where] + body[where:until] * pick.choice((2, 100)) + body[until:]
        case 6 if len(body) > where:
            return body[:where] + bytes([body[where] ^ (1 << pick.randrange(8))]) + body[where + 1 :]
    return pick.choice((b"", b"null", b"[]", body[where:], pick.randbytes(64), body.decode("latin-1").encode("utf-16")))
