"""Read groups' arrays with simdjson, which packs numbers without creating a Python object for each number.

This fast path reads the common form: rows of integers, and rows of numbers. Anything else, including every error, is
left to `scored_data`, which reports where an error is. If simdjson is not installed, this path is not used.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

import msgspec

from bombus.hive.trajectories.records import PackedFloats, pack_ints
from bombus_gateway import limits

if TYPE_CHECKING:
    from numpy.typing import NDArray

INT32_MIN, INT32_MAX = -(1 << 31), (1 << 31) - 1
PLAIN_BYTES = 8 << 20  # largest body read here; it blocks the interpreter for a few milliseconds
ARRAYS = ("advantages", "ref_logprobs", "inference_logprobs")
TEXTS = ("generation_params", "messages", "overrides", "group_overrides", "images")
_KNOWN = frozenset(("tokens", "masks", "scores", "env_id", "distill_token_ids", "distill_logprobs", *ARRAYS, *TEXTS))
_simdjson: Any = importlib.import_module("simdjson") if importlib.util.find_spec("simdjson") else None


class PlainGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The arrays of a group. `lists` counts the arrays and rows; `has_texts` is true if any of `TEXTS` was given."""

    lengths: list[int]
    tokens: bytes
    masks: bytes
    scores: PackedFloats
    advantages: PackedFloats | None
    advantage_lengths: bytes
    ref_logprobs: PackedFloats | None
    inference_logprobs: PackedFloats | None
    environment: int | None
    lists: int
    has_texts: bool


class _NotPlain(Exception):
    """Raised for a body that this module leaves to the slower reader."""


def read_plain(body: bytes) -> PlainGroup | None:
    """Return a group's arrays, or None if the slower reader has to read the body. The caller must rule out nested
    lists."""
    if _simdjson is None or len(body) > PLAIN_BYTES or not body.startswith(b"{"):
        return None
    try:
        document = _simdjson.Parser().parse(body)
        names = [*document.keys()]
        if not _KNOWN.issuperset(names) or len(set(names)) < len(names):
            return None
        given = {name: document[name] for name in names}  # simdjson's array objects
        return _arrays({name: value for name, value in given.items() if value is not None})
    except (
        _NotPlain,
        ValueError,
        TypeError,
        AttributeError,
        LookupError,
        RuntimeError,
    ):  # simdjson raises all of these except the first
        return None


def count_lists(body: bytes) -> int:
    """Return how many lists begin in JSON text, including brackets within its strings."""
    return body.count(b"[")


def _arrays(given: dict[str, Any]) -> PlainGroup:
    if given.keys() & {"distill_token_ids", "distill_logprobs"}:
        raise _NotPlain
    lengths = [*map(len, given["tokens"])]
    scores = _floats(given["scores"])
    if not 0 < len(lengths) <= limits.GROUP_SEQUENCES or 0 in lengths or len(scores) != len(lengths):
        raise _NotPlain
    rows = {name: [*map(len, given[name])] for name in ARRAYS if name in given}
    beside = [rows[name] for name in ARRAYS[1:] if name in rows] + [[*map(len, given["masks"])]]
    if any(each != lengths for each in beside) or rows.get("advantages") == []:
        raise _NotPlain
    environment = given.get("env_id")
    if environment is not None and (type(environment) is not int or not 0 <= environment <= INT32_MAX):
        raise _NotPlain
    packed = {name: _floats(given[name], sum(each)) for name, each in rows.items()}
    return PlainGroup(
        lengths=lengths,
        tokens=_ints(given["tokens"], sum(lengths), 0),
        masks=_ints(given["masks"], sum(lengths), INT32_MIN),
        scores=scores,
        advantages=packed.get("advantages"),
        advantage_lengths=b"" if rows.get("advantages", lengths) == lengths else pack_ints(rows["advantages"]),
        ref_logprobs=packed.get("ref_logprobs"),
        inference_logprobs=packed.get("inference_logprobs"),
        environment=environment,
        lists=3 + 2 * len(lengths) + sum(1 + len(each) for each in rows.values()),
        has_texts=any(name in given for name in TEXTS),
    )


def _ints(rows: Any, count: int, least: int) -> bytes:
    import numpy as np  # imported late: it takes 10 MB, and gateways without groups do not need it

    numbers: NDArray[np.int64] = np.frombuffer(rows.as_buffer(of_type="i"), "<i8")
    if len(numbers) != count or numbers.min() < least or numbers.max() > INT32_MAX:
        raise _NotPlain
    return numbers.astype("<i4").tobytes()


def _floats(rows: Any, count: int | None = None) -> PackedFloats:
    """Pack numbers in the same way as `PackedFloats.of`."""
    import numpy as np

    wide: NDArray[np.float64] = np.frombuffer(rows.as_buffer(of_type="d"), "<f8")
    if count is not None and len(wide) != count:
        raise _NotPlain
    with np.errstate(over="ignore"):
        narrow = wide.astype("<f4")
    if np.array_equal(narrow, wide):
        return PackedFloats(narrow.tobytes())
    return PackedFloats(wide.tobytes(), True)
