"""Reads only the new part of a body that begins like an earlier body of its episode."""

import json
import re
import secrets
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import msgspec

from bombus.errors import Refused
from bombus_gateway.call.prefixes import NOTHING_READ, AnotherList, BodyPrefix
from bombus_gateway.call.request import Unsupported
from bombus_gateway.decoding.json_body import BodyDecoder, check_depth, repaired

# A body's last items are read again with the next body, because clients move cache marks among them.
ITEMS_READ_AGAIN = 4
MARK = json.dumps(secrets.token_hex(16)).encode()  # takes the place of the items that were read before
_COMMA = re.compile(rb"[ \t\n\r]*+,[ \t\n\r]*+")
_OPENING = rb'"%s"[ \t\n\r]*+:[ \t\n\r]*+\[[ \t\n\r]*+'

BodyT = TypeVar("BodyT", bound=msgspec.Struct)
ReadT = TypeVar("ReadT")


class ReadItems(NamedTuple, Generic[BodyT, ReadT]):
    """A body that was read. The list in `body` contains only the new items; `items` is the result of reading all items.

    `unknown` lists the unknown fields. `prefix` is the part with which the conversation's next body may begin.
    """

    body: BodyT
    unknown: list[Unsupported]
    items: ReadT
    prefix: BodyPrefix


class ItemReader(Generic[BodyT, ReadT]):
    """Reads the bodies sent to a route, in which the field `name` is a list of items.

    `read` is called with the result for the earlier items (or None), the new items, and the number of the first new
    item. It returns the result for all items. It must not mutate its arguments, since requests share them.
    """

    def __init__(
        self, decoder: BodyDecoder[BodyT], name: str, read: Callable[[ReadT | None, Sequence[bytes], int], ReadT]
    ) -> None:
        self._decoder = decoder
        self._name = name
        self._read = read
        self._opening = re.compile(_OPENING % name.encode())

    def __call__(self, body: bytes, before: BodyPrefix = NOTHING_READ) -> ReadItems[BodyT, ReadT]:
        """Read a body that begins with the prefix `before`, which was read earlier.

        Raises the same `Refused` errors as the decoder and `read`, and `AnotherList` unless `before` is `NOTHING_READ`.
        """
        found, unknown, items = self._decoded(body, before)
        for item in items:
            check_depth(item, around=2)
        older, newer = items[:-ITEMS_READ_AGAIN], items[-ITEMS_READ_AGAIN:]
        read, prefix = before.read, before
        if older:
            read = self._read(read, older, before.items)
            seen = self._prefix(body, before, older, read) or self._prefix(repaired(body), before, older, read)
            prefix = seen or before
        return ReadItems(found, unknown, self._read(read, newer, before.items + len(older)), prefix)

    def _decoded(self, body: bytes, before: BodyPrefix) -> tuple[BodyT, list[Unsupported], list[bytes]]:
        """Return the decoded body without the items that were read before, its unknown fields, and its new items."""
        if not before.items:
            found, unknown = self._decoder(body)
            return found, unknown, self._items(found)
        try:
            found, unknown = self._decoder(body[: before.start] + MARK + body[before.end :])
        except Refused as error:
            raise AnotherList from error  # reading the whole body will raise an error with the right place
        items = self._items(found)
        if items[:1] != [MARK]:
            raise AnotherList
        return found, unknown, items[1:]

    def _items(self, found: BodyT) -> list[bytes]:
        given = getattr(found, self._name)
        return [*map(bytes, given)] if isinstance(given, list) else []

    def _prefix(self, body: bytes, before: BodyPrefix, items: Sequence[bytes], read: ReadT) -> BodyPrefix | None:
        """Return the prefix of a body up to the last of these items, or None if the items are not found in the body."""
        start = before.start if before.items else self._start(body, items[0])
        at = before.end if before.items else start
        for number, item in enumerate(items, before.items):
            comma = _COMMA.match(body, at) if number else None
            at = comma.end() if comma is not None else at
            if not start or not body.startswith(item, at):
                return None
            at += len(item)
        return BodyPrefix(start, at, before.items + len(items), read)

    def _start(self, body: bytes, first: bytes) -> int:
        """Return the offset of the first item, or 0 unless exactly one place in the body looks like the start of this
        item."""
        places = [place.end() for place in self._opening.finditer(body) if body.startswith(first, place.end())]
        return places[0] if len(places) == 1 else 0
