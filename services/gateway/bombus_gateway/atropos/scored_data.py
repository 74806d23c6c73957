"""The bodies of `/scored_data` and `/scored_data_list`, as records of scored groups.

JSON is read straight into packed numbers, group by group; its lists live no longer than that.
"""

import struct
from collections.abc import Sequence
from itertools import chain
from typing import Annotated, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from bombus.errors import Code, Refused
from bombus.hive.records import BODY_BYTES_MAX
from bombus.hive.trajectories.records import PackedCandidates, PackedFloats, ScoredGroup, encode_group, pack_ints
from bombus_gateway import limits
from bombus_gateway.atropos.json_body import check_counts, decode_at, within
from bombus_gateway.atropos.refusals import UnfitBody

INT32_MIN, INT32_MAX = -(1 << 31), (1 << 31) - 1
_TextT = TypeVar("_TextT")
_NULL = msgspec.Raw(b"null")

# Programs write whole numbers as floats, and 0 and 1 as booleans, which Atropos takes.
_Token: TypeAlias = Annotated[int, Meta(ge=0, le=INT32_MAX)] | float | bool
_Mask: TypeAlias = Annotated[int, Meta(ge=INT32_MIN, le=INT32_MAX)] | float | bool
_Number: TypeAlias = float | bool


class _Group(msgspec.Struct):
    tokens: list[list[_Token]]
    masks: list[list[_Mask]]
    scores: list[_Number]
    advantages: list[list[_Number]] | None = None
    ref_logprobs: list[list[_Number]] | None = None
    inference_logprobs: list[list[_Number]] | None = None
    distill_token_ids: list[list[list[_Token]]] | None = None
    distill_logprobs: list[list[list[_Number]]] | None = None
    generation_params: msgspec.Raw = _NULL
    messages: msgspec.Raw = _NULL
    overrides: msgspec.Raw = _NULL
    group_overrides: msgspec.Raw = _NULL
    images: msgspec.Raw = _NULL
    env_id: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = None


class _Message(msgspec.Struct):
    """A message has these two at least, whatever they are."""

    role: msgspec.Raw
    content: msgspec.Raw


_groups = msgspec.json.Decoder(_Group)
_lists = msgspec.json.Decoder(list[msgspec.Raw])
_messages = msgspec.json.Decoder(list[list[_Message]])
_objects = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_anything = msgspec.json.Decoder()


def read_scored_data(body: bytes) -> ScoredGroup:
    """Read one group. Raises `UnfitBody` with the place of what is wrong, and `Refused` TOO_LARGE."""
    check_counts(body)
    return _group(body, "")


def read_scored_data_list(body: bytes) -> tuple[ScoredGroup, ...]:
    """Read several groups, all or none of them. Raises as `read_scored_data` does."""
    check_counts(body)
    items = decode_at(_lists, body)
    if len(items) > limits.TRAJECTORY_GROUPS:
        why = (
            f"{len(items)} groups in one request are over the limit of {limits.TRAJECTORY_GROUPS}; send them in parts."
        )
        raise Refused(Code.TOO_LARGE, why)
    return tuple(_group(bytes(item), f"[{index}]") for index, item in enumerate(items))


def record_of(group: ScoredGroup) -> bytes:
    """Return the record of a group. Raises `Refused` TOO_LARGE for one that cannot be stored."""
    record = encode_group(group)
    if len(record) > BODY_BYTES_MAX:
        why = (
            f"A group takes {len(record)} bytes, and the limit is {BODY_BYTES_MAX}: send fewer or shorter sequences "
            "in one group, or leave out images and candidates of a teacher."
        )
        raise Refused(Code.TOO_LARGE, why)
    return record


def _group(body: bytes, place: str) -> ScoredGroup:
    given = decode_at(_groups, body, place)
    lengths = _lengths(given.tokens, within(place, "tokens"))
    scores = within(place, "scores")
    if len(given.scores) != len(lengths):
        why = f"{scores} has {len(given.scores)} numbers for {len(lengths)} sequences; send one for each."
        raise UnfitBody(scores, why)
    ids, logprobs = _teacher(given, lengths, place)
    advantages, rows = _advantages(given.advantages, lengths, within(place, "advantages"))
    return ScoredGroup(
        lengths=pack_ints(lengths),
        tokens=_whole_numbers(given.tokens, within(place, "tokens"), 0),
        masks=_masks(given.masks, lengths, within(place, "masks")),
        scores=PackedFloats.of(given.scores),
        advantages=advantages,
        ref_logprobs=_beside(given.ref_logprobs, lengths, within(place, "ref_logprobs")),
        inference_logprobs=_beside(given.inference_logprobs, lengths, within(place, "inference_logprobs")),
        distill_token_ids=ids,
        distill_logprobs=logprobs,
        generation_params=_text(given.generation_params, _object, within(place, "generation_params")),
        messages=_text(given.messages, _messages, within(place, "messages")),
        overrides=_text(given.overrides, _objects, within(place, "overrides")),
        group_overrides=_text(given.group_overrides, _object, within(place, "group_overrides")),
        images=_text(given.images, _anything, within(place, "images")),
        environment=given.env_id,
        advantage_lengths=rows,
    )


def _lengths(tokens: Sequence[Sequence[float]], place: str) -> list[int]:
    """Return how many tokens each sequence has."""
    if not 0 < len(tokens) <= limits.GROUP_SEQUENCES:
        why = f"{place} has {len(tokens)} sequences; a group has 1 to {limits.GROUP_SEQUENCES}."
        raise UnfitBody(place, why)
    lengths = [len(row) for row in tokens]
    if 0 in lengths:
        empty = f"{place}[{lengths.index(0)}]"
        raise UnfitBody(empty, f"{empty} is a sequence without tokens; leave it out of its group.")
    return lengths


def _check_rows(rows: Sequence[Sequence[object]], lengths: Sequence[int], place: str) -> None:
    """Raises `UnfitBody` where rows are not as long as the sequences beside which they stand."""
    if len(rows) != len(lengths):
        raise UnfitBody(place, f"{place} has {len(rows)} rows for {len(lengths)} sequences; send one for each.")
    for index, (row, length) in enumerate(zip(rows, lengths)):
        if len(row) != length:
            where = f"{place}[{index}]"
            why = f"{where} has {len(row)} values for the {length} tokens of its sequence; send one for each token."
            raise UnfitBody(where, why)


def _masks(rows: Sequence[Sequence[float]], lengths: Sequence[int], place: str) -> bytes:
    _check_rows(rows, lengths, place)
    return _whole_numbers(rows, place, INT32_MIN)


def _beside(rows: Sequence[Sequence[float]] | None, lengths: Sequence[int], place: str) -> PackedFloats | None:
    if rows is None:
        return None
    _check_rows(rows, lengths, place)
    return PackedFloats.of([*chain.from_iterable(rows)])


def _advantages(
    rows: Sequence[Sequence[float]] | None, lengths: Sequence[int], place: str
) -> tuple[PackedFloats | None, bytes]:
    """Return advantages, and the lengths of their rows where these are not those of the sequences.

    Atropos's environments send one for each turn, too, and their trainers know what they make of it.
    """
    if rows is None:
        return None, b""
    if not rows:
        raise UnfitBody(place, f"{place} has no rows; send one for each sequence, or null.")
    given = [*map(len, rows)]
    packed = PackedFloats.of([*chain.from_iterable(rows)])
    return packed, b"" if given == list(lengths) else pack_ints(given)


def _whole_numbers(rows: Sequence[Sequence[float]], place: str, least: int) -> bytes:
    """Pack rows of integers. Raises `UnfitBody` for a number that is not whole, or is out of range."""
    try:
        return b"".join([pack_ints(row) for row in rows])  # type: ignore[arg-type]  # floats are told apart by failing
    except struct.error:
        return b"".join(
            pack_ints([_whole(number, f"{place}[{index}][{at}]", least) for at, number in enumerate(row)])
            for index, row in enumerate(rows)
        )


def _whole(number: float, place: str, least: int) -> int:
    if not float(number).is_integer() or not least <= number <= INT32_MAX:
        raise UnfitBody(place, f"{place} is {number}, and has to be a whole number of {least} to {INT32_MAX}.")
    return int(number)


def _teacher(
    given: _Group, lengths: Sequence[int], place: str
) -> tuple[PackedCandidates | None, PackedCandidates | None]:
    """Return a teacher's candidates for each token, and their logprobs, which go together."""
    ids = logprobs = None
    tokens_at, logprobs_at = within(place, "distill_token_ids"), within(place, "distill_logprobs")
    if given.distill_token_ids is not None:
        _check_rows(given.distill_token_ids, lengths, tokens_at)
        packed = [_whole_numbers(rows, f"{tokens_at}[{at}]", 0) for at, rows in enumerate(given.distill_token_ids)]
        counts = pack_ints([*map(len, chain.from_iterable(given.distill_token_ids))])
        ids = PackedCandidates(counts=counts, tokens=b"".join(packed))
    if given.distill_logprobs is not None:
        _check_rows(given.distill_logprobs, lengths, logprobs_at)
        beside = [*chain.from_iterable(given.distill_logprobs)]
        numbers = PackedFloats.of([*chain.from_iterable(beside)])
        logprobs = PackedCandidates(counts=pack_ints([*map(len, beside)]), logprobs=numbers)
    if ids is not None and logprobs is not None and ids.counts != logprobs.counts:
        why = f"{logprobs_at} and {tokens_at} differ in how many candidates a token has; send a logprob for each."
        raise UnfitBody(logprobs_at, why)
    return ids, logprobs


def _text(raw: msgspec.Raw, decoder: "msgspec.json.Decoder[_TextT]", place: str) -> bytes:
    """Return JSON of the decoder's form as it came, and nothing for null."""
    text = bytes(raw)
    if text == b"null":
        return b""
    decode_at(decoder, text, place)
    if text.count(b"[") + text.count(b"{") > limits.DEPTH and limits.is_deeper(decode_at(_anything, text, place)):
        raise UnfitBody(place, f"{place} is nested deeper than {limits.DEPTH}.")
    return text
