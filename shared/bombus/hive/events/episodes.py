"""The events of episodes and their calls, and of the batches formed from them."""

from typing import Any

import msgspec

from bombus.hive.events.common import AbortReason, DropReason, EpisodeType, Event
from bombus.hive.failures import FailureKind
from bombus.hive.records import CallRef, CallStatus
from bombus.hive.trajectories.queue import QueuedGroup


class SamplerWeights(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The weights from which an episode's calls are sampled in an operations run: an adapter, or the base model if all
    fields are "".

    `checkpoint` is the adapter's `MODEL/USE/NAME`, and `address` the hash of its weights file, which is in `folder`.
    """

    checkpoint: str = ""
    address: str = ""
    folder: str = ""


class EpisodeClaimed(Event, frozen=True, kw_only=True, omit_defaults=True, tag="episode.claimed"):
    """A claim was granted, for one episode or a whole group. `version` is the policy version at the claim.

    `owner` is the name of the client's key, or "" if the key has none, and `admin` says whether that key is the hive's
    admin key. `sampler` is set only in operations runs. A multi-model episode has `partners` on other engines, claimed
    in the same decision: they are listed by engine, in the order of `episodes`. `touches` says whether the client sends
    heartbeats while it holds the episodes.
    """

    run: int
    claim: str
    client: str
    episodes: tuple[str, ...]
    type: EpisodeType = EpisodeType.TRAIN
    discard_timeout_s: float = 240.0
    version: int = 0
    task_hint: str = ""
    owner: str = ""
    sampler: SamplerWeights | None = None
    partners: dict[str, tuple[str, ...]] = {}
    touches: bool = False
    admin: bool = False


class NotedCall(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A recorded call. `oldest` and `newest` are the oldest and the newest of the policy versions that sampled its
    tokens.

    For a training client's recorded samples, `episode` is "", and `holder` names the holder whose share they count
    toward.
    """

    episode: str
    ref: CallRef
    prompt_tokens: int
    completion_tokens: int
    oldest: int
    newest: int
    status: CallStatus = CallStatus.COMPLETE
    late: bool = False
    merged: bool = False  # it extended an earlier call of its episode token for token
    masked: bool = False  # an auxiliary call made by its harness, which the job does not train on
    incomplete: bool = False  # part of its conversation, such as an image, is missing from its prompt
    bytes: int = 0  # the size of its record in the stream `calls`
    sampler: str = ""  # the address of the adapter that sampled it, or "" for the engine's own policy or the base
    holder: str = ""


class CallsNoted(Event, frozen=True, kw_only=True, omit_defaults=True, tag="calls.noted"):
    run: int
    calls: tuple[NotedCall, ...]


class Outcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The end of an episode as its client reported it, and the calls that belong to the episode from then on (R7).

    On the log, only outcomes in events from older versions have `calls`: otherwise, the fold adds the calls that were
    noted as complete before the outcome. `call_rewards`, if given, has a reward for each call that is not masked, in
    order; `reward` is then their mean. `digest` is the digest of the report or, for a multi-model episode, of the
    results of all its episodes. `data_set` is the name of the task's data set, or "" if the client gives none.
    `failure` is the budget that the episode used up, or None.
    """

    episode: str
    task: str
    reward: float
    digest: bytes
    call_rewards: tuple[float, ...] | None = None
    is_success: bool | None = None
    metadata: dict[str, Any] = {}
    log_metrics: dict[str, float] = {}
    calls: tuple[CallRef, ...] = ()
    completion_tokens: int = 0
    oldest: int = 0
    data_set: str = ""
    failure: FailureKind | None = None


class EpisodeEnded(Event, frozen=True, kw_only=True, omit_defaults=True, tag="episode.ended"):
    run: int
    client: str
    type: EpisodeType = EpisodeType.TRAIN
    version: int = 0
    outcomes: tuple[Outcome, ...]


class EpisodeAborted(Event, frozen=True, kw_only=True, omit_defaults=True, tag="episode.aborted"):
    """Episodes ended without a reward. `failure` is the kind of failure that the client reported; see `failed_by`.

    `by` is the operator who aborted them, if one did.
    """

    run: int
    episodes: tuple[str, ...]
    reason: AbortReason
    detail: str = ""
    failure: FailureKind | None = None
    by: str = ""

    @property
    def failed_by(self) -> FailureKind | None:
        """The kind of failure that ended the episodes, or None if nothing failed: a client may simply not need an
        episode."""
        return self.failure or self.reason.failure


class GroupDropped(Event, frozen=True, kw_only=True, omit_defaults=True, tag="group.dropped"):
    """Episodes left the pool without being trained on."""

    run: int
    reason: DropReason
    tasks: tuple[str, ...]
    episodes: tuple[str, ...]


class EpisodesTaken(Event, frozen=True, kw_only=True, omit_defaults=True, tag="episodes.taken"):
    """Ended episodes of an operations run left the pool: their client has received their tokens."""

    run: int
    client: str
    episodes: tuple[str, ...]


class PoolCleared(Event, frozen=True, kw_only=True, omit_defaults=True, tag="pool.cleared"):
    run: int
    reason: DropReason
    episodes: int
    bytes: int


class BatchEpisode(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An episode in a batch.

    On the log, only events from older versions have `calls` and `call_rewards`. In newer events, a large batch with
    them might not fit into one message, so the fold adds them from the pool.
    """

    episode: str
    reward: float
    calls: tuple[CallRef, ...] = ()
    call_rewards: tuple[float, ...] | None = None


class BatchGroup(msgspec.Struct, frozen=True, kw_only=True):
    task: str
    episodes: tuple[BatchEpisode, ...]


class BatchReady(Event, frozen=True, kw_only=True, omit_defaults=True, tag="batch.ready"):
    """The batch of optimizer step `step` was sealed. The step trains policy version `step - 1` into version `step`.

    In a rollout-group run, `taken` has the numbers of the groups that the batch takes from the queue. `rollout_groups`
    is not on the log: the fold adds these groups from the queue.
    """

    run: int
    step: int
    groups: tuple[BatchGroup, ...]
    config_digest: str
    taken: tuple[int, ...] = ()
    rollout_groups: tuple[QueuedGroup, ...] = msgspec.field(default=(), name="scored")


EpisodeEvent = (
    EpisodeClaimed
    | CallsNoted
    | EpisodeEnded
    | EpisodeAborted
    | GroupDropped
    | EpisodesTaken
    | PoolCleared
    | BatchReady
)
