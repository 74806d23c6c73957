"""What an audit reports."""

from typing import NamedTuple

import msgspec


class Difference(NamedTuple):
    """A place where the log contradicts itself. `seq` is the event that shows the contradiction."""

    seq: int
    engine: str
    episode: str
    why: str


class TrainedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A completed step: how many tokens it trained on, the digest of that data, and the weights it produced."""

    engine: str
    run: int
    step: int
    tokens: int
    data: str
    weights: str = ""


class SourceTokens(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the tokens that a client's episodes sampled in a run."""

    engine: str
    run: int
    client: str
    sampled: int
    tokens: dict[str, int]


class VersionTokens(msgspec.Struct, frozen=True, kw_only=True):
    """How many tokens the policy versions `oldest` to `newest` sampled, counting whole calls.

    `weights` is the hash of the weights of `newest`, or of the adapter that sampled for a training client. It is "" if
    the hash is not in the log.
    """

    engine: str
    run: int
    oldest: int
    newest: int
    tokens: int
    weights: str = ""


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """What an audit found. `sampled` is the sum of `tokens`, unless there are differences."""

    sampled: int
    tokens: dict[str, int]  # keyed by fate
    sources: list[SourceTokens]
    versions: list[VersionTokens]
    steps: list[TrainedStep]
    groups: dict[str, int]
    operations: dict[str, int]
    differences: list[Difference]
    differences_count: int
