"""Read the bodies of `/scored_data` and `/scored_data_list` as records of rollout groups.

JSON is packed group by group, so only one group's lists are in memory at a time. A large group is packed row by row, so
that no single step blocks the interpreter, and with it other requests, for long.
"""

import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Annotated, Any, Generic, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from bombus.errors import Code, Refused
from bombus.hive.records import BODY_BYTES_MAX
from bombus.hive.trajectories.records import PackedCandidates, PackedFloats, RolloutGroup, encode_group, pack_ints
from bombus_gateway import limits
from bombus_gateway.atropos.json_body import decode_at, within
from bombus_gateway.atropos.plain import INT32_MAX, INT32_MIN, count_lists, read_plain
from bombus_gateway.atropos.refusals import UnfitBody

BY_ROW_BYTES = 1 << 20  # smallest group whose rows are decoded one by one
_TextT = TypeVar("_TextT")
_RowT = TypeVar("_RowT")
_NULL = msgspec.Raw(b"null")

# Atropos accepts integers written as floats, and 0 and 1 written as booleans.
_Token: TypeAlias = Annotated[int, Meta(ge=0, le=INT32_MAX)] | float | bool
_Mask: TypeAlias = Annotated[int, Meta(ge=INT32_MIN, le=INT32_MAX)] | float | bool
_Number: TypeAlias = float | bool

_Floats: TypeAlias = Collection[Sequence[float]]
_Candidates: TypeAlias = Collection[Sequence[Sequence[float]]]


class _KeptText(msgspec.Struct, kw_only=True):
    """The fields of a group that are kept as raw JSON."""

    generation_params: msgspec.Raw = _NULL
    messages: msgspec.Raw = _NULL
    overrides: msgspec.Raw = _NULL
    group_overrides: msgspec.Raw = _NULL
    images: msgspec.Raw = _NULL


class _Group(_KeptText, kw_only=True):
    tokens: list[list[_Token]]
    masks: list[list[_Mask]]
    scores: list[_Number]
    advantages: list[list[_Number]] | None = None
    ref_logprobs: list[list[_Number]] | None = None
    inference_logprobs: list[list[_Number]] | None = None
    distill_token_ids: list[list[list[_Token]]] | None = None
    distill_logprobs: list[list[list[_Number]]] | None = None
    env_id: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = None


class _GroupText(_KeptText, kw_only=True):
    """A group whose arrays are not decoded yet."""

    tokens: msgspec.Raw
    masks: msgspec.Raw
    scores: list[_Number]
    advantages: msgspec.Raw = _NULL
    ref_logprobs: msgspec.Raw = _NULL
    inference_logprobs: msgspec.Raw = _NULL
    distill_token_ids: msgspec.Raw = _NULL
    distill_logprobs: msgspec.Raw = _NULL
    env_id: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = None


class _Message(msgspec.Struct, gc=False):
    """The fields that every message must have, of any type."""

    role: msgspec.Raw
    content: msgspec.Raw


_groups = msgspec.json.Decoder(_Group)
_texts = msgspec.json.Decoder(_GroupText)
_token_row = msgspec.json.Decoder(list[_Token])
_mask_row = msgspec.json.Decoder(list[_Mask])
_number_row = msgspec.json.Decoder(list[_Number])
_token_rows = msgspec.json.Decoder(list[list[_Token]])
_number_rows = msgspec.json.Decoder(list[list[_Number]])
_lists = msgspec.json.Decoder(list[msgspec.Raw])
_messages = msgspec.json.Decoder(list[list[_Message]])
_objects = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_anything = msgspec.json.Decoder(msgspec.Raw)
_kept = msgspec.json.Decoder(_KeptText)
_FORMS: dict[str, msgspec.json.Decoder[Any]] = {
    "generation_params": _object,
    "messages": _messages,
    "overrides": _objects,
    "group_overrides": _object,
    "images": _anything,
}


def read_scored_data(body: bytes) -> RolloutGroup:
    """Read one group. Raises `UnfitBody` with the place of the error."""
    return _group(body, "")


def read_scored_data_list(body: bytes) -> tuple[RolloutGroup, ...]:
    """Read several groups, or refuse all of them. Raises `UnfitBody` for an invalid group, and `Refused` TOO_LARGE for
    too many groups."""
    items = decode_at(_lists, body)
    if len(items) > limits.TRAJECTORY_GROUPS:
        why = (
            f"{len(items)} groups in one request are over the limit of {limits.TRAJECTORY_GROUPS}; send them in parts."
        )
        raise Refused(Code.TOO_LARGE, why)
    return tuple(_group(bytes(item), f"[{index}]") for index, item in enumerate(items))


def record_of(group: RolloutGroup) -> bytes:
    """Return the record of a group. Raises `Refused` TOO_LARGE if the record cannot be stored."""
    record = encode_group(group)
    if len(record) > BODY_BYTES_MAX:
        why = (
            f"A group takes {len(record)} bytes, but the limit is {BODY_BYTES_MAX}: send fewer or shorter sequences "
            "in one group, or leave out images and a teacher's candidates."
        )
        raise Refused(Code.TOO_LARGE, why)
    return record


class _Rows(Generic[_RowT]):
    """The rows of an array. Each row is decoded during iteration, which raises `UnfitBody` for an invalid row."""

    def __init__(self, text: msgspec.Raw, decoder: "msgspec.json.Decoder[_RowT]", place: str) -> None:
        self._rows = decode_at(_lists, bytes(text), place)
        self._decoder = decoder
        self._place = place

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[_RowT]:
        for index, row in enumerate(self._rows):
            text, place = bytes(row), f"{self._place}[{index}]"
            if text.count(b",") >= limits.SEQUENCE_NUMBERS:
                why = f"{place} has more than {limits.SEQUENCE_NUMBERS} values; send shorter sequences."
                raise UnfitBody(place, why)
            yield decode_at(self._decoder, text, place)

    def __contains__(self, row: object) -> bool:
        return any(row == each for each in self)


class _ByRow:
    """A group with the fields of `_Group`, whose arrays are decoded row by row. Raises `UnfitBody` for an invalid
    body."""

    def __init__(self, body: bytes, place: str) -> None:
        text = self.text = decode_at(_texts, body, place)
        self._place = place
        self.tokens = _Rows(text.tokens, _token_row, within(place, "tokens"))
        self.masks = _Rows(text.masks, _mask_row, within(place, "masks"))
        self.advantages = self._maybe(text.advantages, _number_row, "advantages")
        self.ref_logprobs = self._maybe(text.ref_logprobs, _number_row, "ref_logprobs")
        self.inference_logprobs = self._maybe(text.inference_logprobs, _number_row, "inference_logprobs")
        self.distill_token_ids = self._maybe(text.distill_token_ids, _token_rows, "distill_token_ids")
        self.distill_logprobs = self._maybe(text.distill_logprobs, _number_rows, "distill_logprobs")

    def _maybe(self, text: msgspec.Raw, decoder: "msgspec.json.Decoder[_RowT]", field: str) -> Collection[_RowT] | None:
        return None if bytes(text) == b"null" else _Rows(text, decoder, within(self._place, field))


def _group(body: bytes, place: str) -> RolloutGroup:
    return _plain(body, place) or _careful(body, place)


def _plain(body: bytes, place: str) -> RolloutGroup | None:
    """Return a group, or None if the fast reader cannot read it. Raises `UnfitBody` for errors outside the group's
    arrays."""
    arrays = read_plain(body)
    if arrays is None:
        return None
    texts: dict[str, Any] = {}
    if arrays.has_texts:
        texts = _kept_texts(decode_at(_kept, body, place), place)
    if count_lists(body) != arrays.lists + sum(map(count_lists, texts.values())):
        return None  # a row contains lists
    return RolloutGroup(
        lengths=pack_ints(arrays.lengths),
        tokens=arrays.tokens,
        masks=arrays.masks,
        scores=arrays.scores,
        advantages=arrays.advantages,
        ref_logprobs=arrays.ref_logprobs,
        inference_logprobs=arrays.inference_logprobs,
        environment=arrays.environment,
        advantage_lengths=arrays.advantage_lengths,
        **texts,
    )


def _careful(body: bytes, place: str) -> RolloutGroup:
    if len(body) < BY_ROW_BYTES:
        rows: _Group | _ByRow = decode_at(_groups, body, place)
    else:
        rows = _ByRow(body, place)
    given = rows if isinstance(rows, _Group) else rows.text
    lengths, tokens = _tokens(rows.tokens, within(place, "tokens"))
    scores = within(place, "scores")
    if len(given.scores) != len(lengths):
        why = f"{scores} has {len(given.scores)} numbers for {len(lengths)} sequences; send one for each."
        raise UnfitBody(scores, why)
    ids, logprobs = _teacher(rows, lengths, place)
    advantages, advantage_lengths = _advantages(rows.advantages, lengths, within(place, "advantages"))
    return RolloutGroup(
        lengths=pack_ints(lengths),
        tokens=tokens,
        masks=_masks(rows.masks, lengths, within(place, "masks")),
        scores=PackedFloats.of(given.scores),
        advantages=advantages,
        ref_logprobs=_beside(rows.ref_logprobs, lengths, within(place, "ref_logprobs")),
        inference_logprobs=_beside(rows.inference_logprobs, lengths, within(place, "inference_logprobs")),
        distill_token_ids=ids,
        distill_logprobs=logprobs,
        environment=given.env_id,
        advantage_lengths=advantage_lengths,
        **_kept_texts(given, place),
    )


def _tokens(rows: _Floats, place: str) -> tuple[list[int], bytes]:
    """Return the number of tokens in each sequence, and the packed tokens of all sequences."""
    if not 0 < len(rows) <= limits.GROUP_SEQUENCES:
        why = f"{place} has {len(rows)} sequences, but a group must have 1 to {limits.GROUP_SEQUENCES}."
        raise UnfitBody(place, why)
    lengths: list[int] = []

    def counted() -> Iterator[Sequence[float]]:
        for row in rows:
            if not row:
                empty = f"{place}[{len(lengths)}]"
                raise UnfitBody(empty, f"{empty} is a sequence without tokens; leave it out of its group.")
            lengths.append(len(row))
            yield row

    return lengths, _whole_numbers(counted(), place, 0)


def _fitting(rows: Collection[Sequence[_RowT]], lengths: Sequence[int], place: str) -> Iterator[Sequence[_RowT]]:
    """Yield rows. Raises `UnfitBody` if their number or lengths differ from those of the sequences."""
    if len(rows) != len(lengths):
        raise UnfitBody(place, f"{place} has {len(rows)} rows for {len(lengths)} sequences; send one for each.")
    for index, (row, length) in enumerate(zip(rows, lengths)):
        if len(row) != length:
            where = f"{place}[{index}]"
            why = f"{where} has {len(row)} values for the {length} tokens of its sequence; send one for each token."
            raise UnfitBody(where, why)
        yield row


def _masks(rows: _Floats, lengths: Sequence[int], place: str) -> bytes:
    return _whole_numbers(_fitting(rows, lengths, place), place, INT32_MIN)


def _beside(rows: _Floats | None, lengths: Sequence[int], place: str) -> PackedFloats | None:
    return None if rows is None else PackedFloats.of_rows(_fitting(rows, lengths, place))


def _advantages(rows: _Floats | None, lengths: Sequence[int], place: str) -> tuple[PackedFloats | None, bytes]:
    """Return advantages, and the lengths of their rows if these differ from the lengths of the sequences.

    The lengths may differ because some of Atropos's environments send one advantage per turn, for trainers that expect
    this form.
    """
    if rows is None:
        return None, b""
    if not rows:
        raise UnfitBody(place, f"{place} has no rows; send one for each sequence, or null.")
    given: list[int] = []

    def counted() -> Iterator[Sequence[float]]:
        for row in rows:
            given.append(len(row))
            yield row

    packed = PackedFloats.of_rows(counted())
    return packed, b"" if given == list(lengths) else pack_ints(given)


def _whole_numbers(rows: Iterable[Sequence[float]], place: str, least: int) -> bytes:
    """Pack rows of integers. Raises `UnfitBody` for a number that is not an integer or is out of range."""
    return b"".join([_whole_row(row, f"{place}[{index}]", least) for index, row in enumerate(rows)])


def _whole_row(row: Sequence[float], place: str, least: int) -> bytes:
    try:
        return pack_ints(row)  # type: ignore[arg-type]  # raises for floats, which are converted below
    except struct.error:
        return pack_ints([_whole(number, f"{place}[{at}]", least) for at, number in enumerate(row)])


def _whole(number: float, place: str, least: int) -> int:
    if not float(number).is_integer() or not least <= number <= INT32_MAX:
        raise UnfitBody(place, f"{place} is {number}, but must be a whole number from {least} to {INT32_MAX}.")
    return int(number)


def _teacher(
    rows: _Group | _ByRow, lengths: Sequence[int], place: str
) -> tuple[PackedCandidates | None, PackedCandidates | None]:
    """Return a teacher's candidates for each token, and the candidates' logprobs. If both are given, their counts must
    match."""
    ids = logprobs = None
    tokens_at, logprobs_at = within(place, "distill_token_ids"), within(place, "distill_logprobs")
    if rows.distill_token_ids is not None:
        counts: list[int] = []
        packed: list[bytes] = []
        for index, row in enumerate(_fitting(rows.distill_token_ids, lengths, tokens_at)):
            counts += map(len, row)
            packed.append(_whole_numbers(row, f"{tokens_at}[{index}]", 0))
        ids = PackedCandidates(counts=pack_ints(counts), tokens=b"".join(packed))
    if rows.distill_logprobs is not None:
        beside: list[int] = []

        def counted(all_rows: _Candidates) -> Iterator[Sequence[float]]:
            for row in _fitting(all_rows, lengths, logprobs_at):
                beside.extend(map(len, row))
                yield [*chain.from_iterable(row)]

        numbers = PackedFloats.of_rows(counted(rows.distill_logprobs))
        logprobs = PackedCandidates(counts=pack_ints(beside), logprobs=numbers)
    if ids is not None and logprobs is not None and ids.counts != logprobs.counts:
        why = f"{logprobs_at} and {tokens_at} differ in how many candidates a token has; send a logprob for each."
        raise UnfitBody(logprobs_at, why)
    return ids, logprobs


def _kept_texts(given: _KeptText, place: str) -> dict[str, Any]:
    return {name: _text(getattr(given, name), form, within(place, name)) for name, form in _FORMS.items()}


def _text(raw: msgspec.Raw, decoder: "msgspec.json.Decoder[_TextT]", place: str) -> bytes:
    """Check that JSON fits the decoder's type, and return it unchanged, or b"" for null."""
    text = bytes(raw)
    if text == b"null":
        return b""
    decode_at(decoder, text, place)
    return text
