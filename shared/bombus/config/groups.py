"""The base of a configuration's groups of settings, and the words in which a refusal says what a field takes."""

import json
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

from bombus.errors import Code, Refused

Tree = dict[str, Any]  # a document: nested mappings, lists and scalars


def _number(value: object) -> object:
    """Convert text where a float is wanted: YAML 1.1 reads `1e-6` as text."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


Float = Annotated[float, BeforeValidator(_number)]
Beta = Annotated[float, BeforeValidator(_number), Field(ge=0, lt=1)]


class ConfigGroup(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def allowed(field: FieldInfo) -> str:
    """Say what a field takes, such as `it takes a number, at least 0, at most 1`."""
    signs = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
    bounds = [
        f"{word} {getattr(bound, sign)}"
        for bound in field.metadata
        for sign, word in signs.items()
        if getattr(bound, sign, None) is not None
    ]
    if field.description and not bounds:
        return f"it takes {field.description}"
    kind = without_none(field.annotation)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return "it takes one of " + ", ".join(kind)
    choices = getattr(kind, "__args__", ())
    if choices and all(isinstance(choice, str) for choice in choices):
        return "it takes one of " + ", ".join(choices)
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path"}
    word = words.get(cast(type, kind), "two numbers from 0 to below 1")
    return ", ".join([f"it takes {word}", *bounds])


def without_none(kind: Any) -> Any:
    """Return X of `X | None`."""
    kinds = getattr(kind, "__args__", ())
    return next(one for one in kinds if one is not NoneType) if NoneType in kinds else kind


def bad_config(why: str) -> Refused:
    return Refused(Code.BAD_CONFIG, why)


def shown(value: object) -> str:
    """Return a value as an error sentence quotes it, in at most 80 characters."""
    if isinstance(value, Mapping):
        return "a mapping"
    text = json.dumps(value, default=str) if not isinstance(value, list) else f"a list of {len(value)}"
    return text if len(text) <= 80 else text[:77] + "..."
