"""The schemas of requests come from the structs that decode them."""

from typing import Annotated

import msgspec
from msgspec import Meta

from bombus_gateway.schemas import object_of, request_of


class Part(msgspec.Struct):
    name: str


class Body(msgspec.Struct, kw_only=True):
    model: Annotated[str, Meta(max_length=8)]
    count: Annotated[int, Meta(ge=1)] | None = None
    part: Part | None = None
    stop: str | list[str] | None = None
    wanted: bool = True
    items: msgspec.Raw = msgspec.Raw(b"null")
    refused: str | None = None


def test_fields_are_those_of_the_struct_and_null_is_left_out() -> None:
    described = request_of(Body, ("refused",), count={"default": 1}, items={"type": "array"}, more={"type": "null"})
    assert described["required"] == ["model"]
    assert described["properties"] == {
        "model": {"type": "string", "maxLength": 8},
        "count": {"type": "integer", "minimum": 1, "default": 1},
        "part": object_of(name=str) | {"title": "Part"},
        "stop": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
        "wanted": {"type": "boolean", "default": True},
        "items": {"type": "array"},
        "more": {"type": "null"},
    }
