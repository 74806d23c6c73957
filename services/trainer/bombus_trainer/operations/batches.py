"""Checks one operation's data and flattens them into items to pack and a loss's inputs for each target."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bombus.errors import Code, Refused
from bombus.operations import Array, Datum, DType
from bombus_trainer.backends.torch.transfer import to_device
from bombus_trainer.data.packing import Terms, TrainingItem
from bombus_trainer.data.sequences import Floats, Ints
from bombus_trainer.operations.client_losses import MASK, RATIO_MASK, TARGETS, WEIGHTS, ClientLoss, ScoredTokens

NUMPY: dict[DType, np.dtype[Any]] = {
    DType.FLOAT32: np.dtype("<f4"),
    DType.INT32: np.dtype("<i4"),
    DType.INT64: np.dtype("<i8"),
}
INTEGERS = (DType.INT32, DType.INT64)
NOT_NEGATIVE = (RATIO_MASK, MASK)
OWN = "of the batch: "  # prefix of arrays that the caller did not send


@dataclass(frozen=True)
class DataLimits:
    """The limits of one operation's data: token ids below `vocabulary`, sequences of at most `context` tokens."""

    vocabulary: int
    context: int
    tokens_max: int
    targets_max: int


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """The data of an operation: S sequences with P tokens and M targets in total.

    `items` are to be packed; their terms are numbered from 0 to M - 1 in the caller's order. The arrays are indexed by
    these numbers. They hold the loss's `inputs`, whether a target counts (`counted_M`) and is the first of its token's
    targets that counts (`first_M`), and the token (`rows_M`, below P) and sequence (`sequences_M`, below S) that the
    target belongs to. `shapes` has the shape of each datum's targets.
    """

    items: tuple[TrainingItem, ...]
    shapes: tuple[tuple[int, ...], ...]
    inputs: Mapping[str, Floats]
    counted_M: Floats
    first_M: Floats
    rows_M: Ints
    sequences_M: Ints

    @property
    def tokens(self) -> int:
        """The number of tokens with a target that counts."""
        return int(self.first_M.sum())

    def scored(self, ids_N: Ints, logprobs_N: Tensor, logsumexp_N: Tensor | None) -> ScoredTokens:
        """Return the targets numbered `ids_N`, with their logprobs. They must be all of the targets of one or more
        sequences."""
        sequences, sequences_N = np.unique(self.sequences_M[ids_N], return_inverse=True)
        inputs = {name: values_M[ids_N] for name, values_M in self.inputs.items()}
        own = {f"{OWN}counted": self.counted_M[ids_N], f"{OWN}first": self.first_M[ids_N]}
        moved = to_device({**inputs, **own, f"{OWN}sequences": sequences_N}, logprobs_N.device)
        return ScoredTokens(
            logprobs_N=logprobs_N,
            inputs={name: moved[name] for name in inputs},
            sequences_N=moved[f"{OWN}sequences"],
            sequences=len(sequences),
            counted_N=moved[f"{OWN}counted"],
            first_N=moved[f"{OWN}first"],
            logsumexp_N=logsumexp_N,
        )

    def by_target(self, values_M: Floats) -> list[Array]:
        """Split the values of all targets into one array per datum, with the shape of the datum's targets."""
        ends = np.cumsum([int(np.prod(shape)) for shape in self.shapes], dtype=np.int64)
        return _cut(values_M, ends, self.shapes)

    def by_token(self, values_M: Floats) -> list[Array]:
        """Sum the values of each token's targets, and split the sums into one array [N] per datum."""
        lengths = [shape[0] for shape in self.shapes]
        sums_P = np.bincount(self.rows_M, weights=values_M, minlength=sum(lengths)).astype(np.float32)
        return _cut(sums_P, np.cumsum(lengths, dtype=np.int64), [(length,) for length in lengths])


def _cut(values: Floats, ends: Ints, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    parts = np.split(values, ends[:-1]) if len(ends) else []
    return [Array(DType.FLOAT32, shape, part.tobytes()) for part, shape in zip(parts, shapes, strict=True)]


def read_batch(data: Sequence[Datum], loss: ClientLoss, limits: DataLimits) -> TokenBatch:
    """Check and flatten an operation's data. Raises `Refused` if they are invalid, naming the datum (counted from 0),
    the input and the limit."""
    total = sum(len(datum.tokens) // 4 for datum in data)
    if total > limits.tokens_max:
        raise Refused(
            Code.TOO_LARGE,
            f"one operation may have {limits.tokens_max} tokens, but this one has {total}: split it",
        )
    read = [_Reader(number, datum, loss, limits).read() for number, datum in enumerate(data)]
    names = list(dict.fromkeys(name for each in read for name in each.inputs))
    for name in names:
        lacking = next((number for number, each in enumerate(read) if name not in each.inputs), None)
        if lacking is not None:
            raise Refused(Code.MALFORMED, f"datum {lacking} has no {name}, but others do: give it for all or for none")
    targets = sum(each.targets_M.size for each in read)
    if targets > limits.targets_max:
        raise Refused(
            Code.TOO_LARGE,
            f"one operation may have {limits.targets_max} targets, but this one has {targets}: split it",
        )
    items, rows, token, term = [], [], 0, 0
    for each in read:
        ids = np.arange(term, term + each.targets_M.size)
        items.append(each.item(ids))
        rows.append(each.rows_M + token)
        token, term = token + each.shape[0], term + each.targets_M.size
    counted_M = _joined([each.counted_M for each in read])
    rows_M = np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)
    return TokenBatch(
        items=tuple(items),
        shapes=tuple(each.shape for each in read),
        inputs={name: _joined([each.inputs[name] for each in read]) for name in names},
        counted_M=counted_M,
        first_M=_firsts(counted_M, rows_M),
        rows_M=rows_M,
        sequences_M=np.repeat(np.arange(len(read)), [each.targets_M.size for each in read]),
    )


def _joined(parts: Sequence[Floats]) -> Floats:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.float32)


def _firsts(counted_M: Floats, rows_M: Ints) -> Floats:
    """Return 1 for each token's first target that counts, and 0 for all other targets."""
    first_M = np.zeros(len(counted_M), dtype=np.float32)
    places = np.flatnonzero(counted_M)
    _, at = np.unique(rows_M[places], return_index=True)
    first_M[places[at]] = 1.0
    return first_M


@dataclass(frozen=True, eq=False)
class _Read:
    """One datum: its tokens [N], and the loss's inputs for each of its M targets, row by row."""

    tokens_N: Ints
    shape: tuple[int, ...]
    targets_M: Ints
    rows_M: Ints
    inputs: Mapping[str, Floats]
    counted_M: Floats

    def item(self, ids_M: Ints) -> TrainingItem:
        """Return the item to pack. A last token of 0 is appended: other trainers' items end with the last label there,
        but here the targets are explicit."""
        zeros = np.zeros(len(ids_M), dtype=np.float32)
        terms = Terms(ids_M, self.targets_M, np.ones(len(ids_M), dtype=np.float32), zeros, zeros, zeros)
        return TrainingItem(np.append(self.tokens_N, 0), self.rows_M + 1, terms)


class _Reader:
    """Reads one datum."""

    def __init__(self, number: int, datum: Datum, loss: ClientLoss, limits: DataLimits) -> None:
        self._number, self._datum, self._loss, self._limits = number, datum, loss, limits

    def read(self) -> _Read:
        """Read the datum. The result does not depend on the rest of the request."""
        tokens_N = self._tokens()
        given = self._datum.inputs
        own = (TARGETS, *self._loss.needs, *self._loss.takes, MASK)
        if unknown := sorted(given.keys() - set(own)):
            raise self._refused(f"has an input {unknown[0][:64]!r}, which this loss does not use: it uses {_list(own)}")
        if missing := TARGETS if TARGETS not in given else self._loss.missing(given):
            raise self._refused(f"has no {missing}: it has {_list(sorted(given)) or 'no inputs'}")
        targets_M, shape = self._targets(len(tokens_N))
        wide = shape[1] if len(shape) == 2 else 1
        rows_M = np.repeat(np.arange(shape[0]), wide)
        inputs = {
            name: self._floats(name, shape if name == WEIGHTS else shape[:1], wide) for name in given if name != TARGETS
        }
        if WEIGHTS in self._loss.takes:
            inputs.setdefault(WEIGHTS, np.ones(len(rows_M), dtype=np.float32))
        inputs.setdefault(MASK, np.ones(len(rows_M), dtype=np.float32))
        counts_M = inputs[MASK] != 0.0
        if self._loss.counted_by == WEIGHTS or MASK not in given:
            counts_M &= inputs[self._loss.counted_by] != 0.0
        if RATIO_MASK in inputs and counts_M.any() and not inputs[RATIO_MASK].any():
            raise self._refused(f"has only zeros in {RATIO_MASK}: mark the tokens to average the sequence's ratio over")
        return _Read(tokens_N, shape, targets_M, rows_M, inputs, counts_M.astype(np.float32))

    def _refused(self, what: str, code: Code = Code.MALFORMED) -> Refused:
        return Refused(code, f"datum {self._number} {what}")

    def _tokens(self) -> Ints:
        body = self._datum.tokens
        if not body or len(body) % 4:
            raise self._refused(f"has {len(body)} bytes of tokens: it needs at least one token of 4 bytes (int32)")
        if len(body) // 4 > self._limits.context:
            raise self._refused(
                f"has {len(body) // 4} tokens, but the limit is {self._limits.context}: shorten it", Code.TOO_LARGE
            )
        return self._ids("token", np.frombuffer(body, dtype=NUMPY[DType.INT32]))

    def _targets(self, tokens: int) -> tuple[Ints, tuple[int, ...]]:
        array = self._datum.inputs[TARGETS]
        if array.dtype not in INTEGERS:
            raise self._refused(f"has {TARGETS} in {array.dtype}: they must be int64 or int32")
        shapes = [1, 2] if self._loss.wide else [1]
        if len(array.shape) not in shapes or array.shape[0] != tokens or not len(array):
            wanted = f"[{tokens}] or [{tokens}, K]" if self._loss.wide else f"[{tokens}]"
            raise self._refused(f"has {TARGETS} of shape {list(array.shape)}: with {tokens} tokens it must be {wanted}")
        return self._ids(TARGETS, np.frombuffer(array.data, dtype=NUMPY[array.dtype])), array.shape

    def _ids(self, what: str, values: NDArray[np.signedinteger]) -> Ints:
        wrong = np.flatnonzero((values < 0) | (values >= self._limits.vocabulary))
        if len(wrong):
            hint = "; to ignore a target, give it the weight (or mask) 0" if what == TARGETS else ""
            raise self._refused(
                f"has the {what} id {values[wrong[0]]} at {wrong[0]}: this model's ids are 0 to "
                f"{self._limits.vocabulary - 1}{hint}"
            )
        return values.astype(np.int64)

    def _floats(self, name: str, shape: tuple[int, ...], wide: int) -> Floats:
        """Return an input's value for each target. If given per token, a value applies to all the token's targets."""
        array = self._datum.inputs[name]
        if array.shape != shape:
            raise self._refused(
                f"has {name} of shape {list(array.shape)}: to match its targets it must be {list(shape)}"
            )
        values = np.frombuffer(array.data, dtype=NUMPY[array.dtype]).astype(np.float32)
        wrong = np.flatnonzero(~np.isfinite(values))
        if len(wrong):
            raise self._refused(f"has {values[wrong[0]]} in {name} at {wrong[0]}: it must be a finite number")
        if name in NOT_NEGATIVE and len(wrong := np.flatnonzero(values < 0.0)):
            raise self._refused(f"has {values[wrong[0]]} in {name} at {wrong[0]}: it cannot be below 0")
        return values if name == WEIGHTS else np.repeat(values, wide)


def _list(names: Sequence[str]) -> str:
    return ", ".join(names)
