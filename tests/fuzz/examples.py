"""A valid value of every type that msgspec decodes, made from the type itself, so that a new field is not forgotten."""

from typing import Any

from msgspec import inspect

from tests.fuzz.values import Tree


def examples(kind: object) -> list[Tree]:
    """Return valid trees of a type: one with all fields for each struct that it may be."""
    found = inspect.type_info(kind)
    return [_example(each) for each in (found.types if isinstance(found, inspect.UnionType) else (found,))]


def _example(kind: inspect.Type, above: tuple[type, ...] = ()) -> Tree:
    """`above` are the structs in which this is: a type that holds itself does so once."""
    match kind:
        case inspect.StructType(cls=cls, fields=fields, tag_field=name, tag=tag, array_like=True):
            return [*([tag] if name else []), *(_example(field.type, (*above, cls)) for field in fields)]
        case inspect.StructType(cls=cls, fields=fields, tag_field=name, tag=tag):
            tagged = {name: tag} if name else {}
            return tagged | {field.encode_name: _example(field.type, (*above, cls)) for field in fields}
        case inspect.UnionType(types=types):
            possible = [each for each in types if getattr(each, "cls", None) not in above]
            return _example(
                next((each for each in possible if not isinstance(each, inspect.NoneType)), possible[0]), above
            )
        case inspect.DictType(key_type=key, value_type=value):
            return {_example(key, above): _example(value, above)}
        case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item) | inspect.SetType(item_type=item):
            return [_example(item, above)]
        case inspect.TupleType(item_types=items):
            return [_example(item, above) for item in items]
        case inspect.EnumType(cls=cls):
            return next(iter(cls)).value
        case inspect.LiteralType(values=values):
            return values[0]
    return _plain(kind)


def _plain(kind: inspect.Type) -> Tree:
    plain: dict[type[Any], Tree] = {
        inspect.StrType: "text",
        inspect.BytesType: b"\x01\0\0\0\x02\0\0\0",
        inspect.IntType: 3,
        inspect.FloatType: 0.5,
        inspect.BoolType: True,
        inspect.AnyType: {"any": [1, "text", None]},
        inspect.NoneType: None,
    }
    return plain[type(kind)]
