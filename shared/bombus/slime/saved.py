"""Rollouts as files, in slime's own format (.pt) or as JSON lines."""

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bombus.errors import BombusError, Code, Refused, in_one_line
from bombus.slime.types import SlimeSample

TORCH_ENDING = ".pt"
DEPTH_MAX = 32  # nesting depth of values
INTEGERS = range(-(1 << 63), 1 << 64)  # integers that our JSON encoder accepts
LEFT_OUT = object()  # stands for a value that a file cannot contain
NUMBERS_OF_NUMPY = "?bhilqBHILQefd"
NEEDS_CODE = re.compile(r"GLOBAL (\S+)|but got (<class '[^']+'>)")


def rollout_file(template: str, rollout_id: int) -> Path:
    """Return the file of a rollout, with its number in place of `{rollout_id}`. Raises `Refused` for an unusable
    template."""
    try:
        return Path(template.format(rollout_id=rollout_id))
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        why = f"{template!r} names no file: write {{rollout_id}} where the number goes, and no other braces"
        raise Refused(Code.BAD_CONFIG, why) from error


def save_rollout(path: Path, rollout_id: int, samples: Sequence[Any]) -> list[str]:
    """Write the samples of a rollout to a file, replacing any file of that name.

    Arrays and tensors become lists. Values that no file can contain, such as an object that a hook put into a sample,
    are left out, and their names are returned. Raises `BombusError` if the file cannot be written.
    """
    left_out: set[str] = set()
    rows = [_plain(sample.to_dict(), "", left_out) for sample in samples]
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == TORCH_ENDING:
            import torch

            torch.save({"rollout_id": rollout_id, "samples": rows}, partial)
        else:
            lines = (msgspec.json.encode({"rollout_id": rollout_id, **row}) for row in rows)
            partial.write_bytes(b"".join(line + b"\n" for line in lines))
        partial.replace(path)
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError if the disk is full
        why = f"the rollout cannot be written to {path} ({in_one_line(error)}), but its episodes ended normally"
        raise BombusError(f"{why}; make room, or give another --save-debug-rollout-data") from error
    return sorted(left_out)


def _plain(value: Any, name: str, left_out: set[str], above: tuple[int, ...] = ()) -> Any:
    """Return a value in a form that both kinds of files can contain.

    If the value has no such form, add its name to `left_out` and return `LEFT_OUT`. `above` contains the ids of the
    containers around the value, so that a container that contains itself is left out.
    """
    found = LEFT_OUT
    inside = (*above, id(value))
    if id(value) in above or len(above) > DEPTH_MAX:
        pass
    elif isinstance(value, Mapping):
        return _plain_mapping(value, name, left_out, inside)
    elif isinstance(value, list | tuple):
        if _are_numbers(value):
            return [*value]
        items = [_plain(one, name, left_out, inside) for one in value]
        found = LEFT_OUT if any(one is LEFT_OUT for one in items) else items
    elif isinstance(value, Enum):
        return _plain(value.value, name, left_out, inside)
    elif hasattr(value, "tolist"):
        with suppress(Exception):  # a user object's method may raise anything, and then the object is left out
            return _plain(value.tolist(), name, left_out, inside)
    else:
        found = _plain_scalar(value)
    if found is LEFT_OUT:
        left_out.add(f"{name} ({type(value).__name__})")
    return found


def _are_numbers(values: Sequence[Any]) -> bool:
    """Return whether values can be written unchanged. This is a fast path for tokens, masks and logprobs."""
    kinds = {*map(type, values)}
    return kinds == {float} or (kinds == {int} and min(values) in INTEGERS and max(values) in INTEGERS)


def _plain_mapping(
    value: Mapping[Any, Any], name: str, left_out: set[str], inside: tuple[int, ...]
) -> dict[str | int, Any]:
    found: dict[str | int, Any] = {}
    for key, one in value.items():
        inner = f"{name}.{key}" if name else str(key)
        plain = _plain_scalar(key)
        if not isinstance(plain, str | int) or isinstance(plain, bool):
            left_out.add(f"{inner} ({type(key).__name__} as a key)")
        elif (item := _plain(one, inner, left_out, inside)) is not LEFT_OUT:
            found[plain] = item
    return found


def _plain_scalar(value: object) -> Any:
    match value:
        case None | bool():
            return value
        case int() if int(value) in INTEGERS:
            return int(value)
        case float():
            return float(value)
        case str() if not any("\ud800" <= one <= "\udfff" for one in value):
            return str(value)
    return LEFT_OUT


def check_can_save(template: str) -> None:
    """Raise `Refused` if the files cannot be written. Call this before anything is played."""
    if rollout_file(template, 0).suffix == TORCH_ENDING and find_spec("torch") is None:
        raise Refused(Code.BAD_CONFIG, f"{template} needs torch: install it, or name a file that ends in .jsonl")


def load_rollout(path: Path) -> list[SlimeSample]:
    """Return the samples in a file. Code in a .pt file is never run. Raises `Refused` if the file cannot be read."""
    try:
        if path.suffix == TORCH_ENDING:
            rows: Iterable[Any] = _load_torch(path)["samples"]
        else:
            rows = (msgspec.json.decode(line) for line in path.read_bytes().splitlines() if line.strip())
        return [SlimeSample.from_dict(row) for row in rows]
    except Exception as error:  # a damaged file may make its reader raise anything
        needs = NEEDS_CODE.search(str(error))
        why = f"loading {needs[1] or needs[2]} would run code: save plain values" if needs else in_one_line(error)
        raise Refused(Code.BAD_CONFIG, f"{path} cannot be read as a rollout: {why}") from error


def _load_torch(path: Path) -> Any:
    """Load a .pt file, which may contain only plain values, tensors, and NumPy numbers and arrays."""
    import torch

    makes: dict[Any, str] = {np.float64(0).__reduce__()[0]: "scalar", np.zeros(1).__reduce__()[0]: "_reconstruct"}
    places = ("numpy._core.multiarray", "numpy.core.multiarray")  # places in NumPy 2, and in NumPy 1
    named = [(function, f"{place}.{name}") for function, name in makes.items() for place in places]
    kinds = {type(np.dtype(letter)) for letter in NUMBERS_OF_NUMPY}
    with torch.serialization.safe_globals([np.ndarray, np.dtype, *kinds, *named]):
        return torch.load(path, weights_only=True)
