"""The names on the wire, on the log and in snapshots, read from the structs. `python -m tests.hive.wire_names` records
them."""

import json
from enum import Enum
from pathlib import Path
from typing import Any, get_args

import msgspec
from msgspec.inspect import type_info

from bombus.bus.snapshots import Snapshot
from bombus.errors import STATUS, Code
from bombus.hive.events import AnyEvent
from bombus.hive.generation import Frame, Generate
from bombus.hive.inbox import AnyAnswer, AnyMessage
from bombus.hive.records import CallRecord, FinishReason

SNAPSHOT = Path(__file__).with_name("wire_names.json")
TOP_LEVEL: dict[str, tuple[type[msgspec.Struct], ...]] = {
    "events": get_args(AnyEvent),
    "messages": get_args(AnyMessage),
    "answers": get_args(AnyAnswer),
    "records": (CallRecord,),
    "generation": (Generate, *get_args(Frame)),
    "snapshots": (Snapshot,),
}


def wire_names() -> dict[str, Any]:
    """Return every struct with its tag, layout and fields, the values of the enums they use, and the error codes.

    Structs that are only ever nested in others are under `nested`, and each enum under `enums`.
    """
    found: dict[str, Any] = {}
    nested: dict[str, Any] = {}
    enums: dict[str, Any] = {"FinishReason": [member.value for member in FinishReason]}  # its field is a plain string
    listed = {struct for structs in TOP_LEVEL.values() for struct in structs}
    for section, structs in TOP_LEVEL.items():
        found[section] = {}
        for struct in structs:
            found[section][struct.__name__] = _layout(struct)
            _collect(type_info(struct), nested, enums, set())
    found["nested"] = {name: nested[name] for name in sorted(nested) if name not in {each.__name__ for each in listed}}
    found["enums"] = {name: enums[name] for name in sorted(enums)}
    found["codes"] = {code.value: STATUS[code] for code in Code}
    return found


def _layout(struct: type[msgspec.Struct]) -> dict[str, Any]:
    config = struct.__struct_config__
    info = type_info(struct)
    assert isinstance(info, msgspec.inspect.StructType)
    return {
        "tag": f"{config.tag_field}={config.tag}" if config.tag_field else "",
        "layout": "array" if config.array_like else "map",
        "omit_defaults": config.omit_defaults,
        "fields": [_field(field) for field in info.fields],
    }


def _field(field: msgspec.inspect.Field) -> str:
    """Describe a field as `name: type`, with its default where it has one. The name is the encoded one."""
    text = f"{field.encode_name}: {_type(field.type)}"
    if field.default is not msgspec.NODEFAULT:
        return f"{text} = {_default(field.default)}"
    if field.default_factory is not msgspec.NODEFAULT:
        return f"{text} = {_default(field.default_factory())}"
    return text


def _default(value: object) -> str:
    return repr(value.value if isinstance(value, Enum) else value)


def _type(kind: msgspec.inspect.Type) -> str:
    match kind:
        case msgspec.inspect.StructType(cls=cls) | msgspec.inspect.EnumType(cls=cls):
            return cls.__name__
        case msgspec.inspect.UnionType(types=types):
            return " | ".join(_type(each) for each in types)
        case msgspec.inspect.VarTupleType(item_type=item):
            return f"tuple[{_type(item)}, ...]"
        case msgspec.inspect.TupleType(item_types=items):
            return f"tuple[{', '.join(map(_type, items))}]"
        case msgspec.inspect.DictType(key_type=key, value_type=value):
            return f"dict[{_type(key)}, {_type(value)}]"
    return type(kind).__name__.removesuffix("Type").lower()


def _collect(kind: Any, nested: dict[str, Any], enums: dict[str, Any], seen: set[type]) -> None:
    """Add every struct and enum that `kind` leads to."""
    match kind:
        case msgspec.inspect.StructType(cls=cls, fields=fields):
            if cls in seen:
                return
            seen.add(cls)
            nested[cls.__name__] = _layout(cls)
            children = [field.type for field in fields]
        case msgspec.inspect.EnumType(cls=cls):
            enums[cls.__name__] = [member.value for member in cls]
            return
        case msgspec.inspect.UnionType(types=types):
            children = list(types)
        case msgspec.inspect.VarTupleType(item_type=item):
            children = [item]
        case msgspec.inspect.TupleType(item_types=items):
            children = list(items)
        case msgspec.inspect.DictType(key_type=key, value_type=value):
            children = [key, value]
        case _:
            return
    for child in children:
        _collect(child, nested, enums, seen)


def main() -> None:
    SNAPSHOT.write_text(json.dumps(wire_names(), indent=1) + "\n")


if __name__ == "__main__":
    main()
