"""The rows of a status: plain values, for `bombus status --json` and the screen."""

import msgspec

from bombus.hive.collection import Measure
from bombus.hive.events import AdapterShape, CanaryCheck, ConversationFormat, EpisodeType, Method
from bombus.hive.failures import FailureKind
from bombus.hive.pacing import Pace
from bombus.hive.state import Phase
from bombus.hive.trajectories.status import RolloutGroupStatus


class OpenEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """An open episode. `idle_s` counts from its last recorded call.

    The coordinator may count less idle time, because it also knows about heartbeats and calls in flight, which are
    reported only to the inbox.
    """

    episode: str
    client: str
    type: EpisodeType
    task: str
    version: int
    calls: int
    completion_tokens: int
    idle_s: float
    limit_s: float
    owner: str = ""  # the name of its client's key
    partners: tuple[str, ...] = ()  # the other episodes of its multi-model episode, on other engines


class MultiModelClaimStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The open multi-model episodes of one claim. For each of these, `episodes` lists the names of its parts in the
    order of `engines`.

    The figures are totals over all engines. `idle_s` is the idle time of the multi-model episode that has been idle
    longest, counted from the last recorded call in any of its parts: activity in one part counts for all.
    """

    engines: tuple[str, ...]
    episodes: tuple[tuple[str, ...], ...]
    client: str
    type: EpisodeType
    task: str
    calls: int
    completion_tokens: int
    idle_s: float
    limit_s: float
    owner: str = ""


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    replica: str
    url: str
    capacity: int
    run: int
    version: int  # -1 if nothing is loaded
    current: bool  # whether it serves the newest weights of this run
    sequence_tokens: int = 0  # the longest sequence that it serves, or 0 if it does not say
    constrains: bool = False  # whether it supports structured output
    quarantined: str = ""  # why it gets no calls, and why the run does not wait for it
    canary: CanaryCheck | None = None  # the check of the version that it serves
    unchecked: bool = False  # the trainer says what the version must compute, but the replica was not compared with it


class FormatStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation format for the run's model, and the first gateway that reported it."""

    gateway: str
    format: ConversationFormat


class TrainerStatus(msgspec.Struct, frozen=True, kw_only=True):
    trainer: str  # "" until a trainer has opened the run
    epoch: int
    step_in_flight: int | None  # the step that is sealed but not yet completed
    step_since_ns: int
    groups: int
    episodes: int
    failures: int  # number of failures of the step in flight
    absence: str = ""  # since when and why there has been no trainer, if the last one stalled


class StepStatus(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    at_ns: int
    metrics: dict[str, float]


class StepRollouts(msgspec.Struct, frozen=True, kw_only=True):
    """The training episodes that ended while the batch of `step` was collected.

    `success_rate` covers the episodes that report whether they succeeded, and is None if none do. `metrics` has the
    mean of each metric that the episodes reported.
    """

    step: int
    episodes: int
    mean_reward: float
    success_rate: float | None
    mean_completion_tokens: float
    metrics: dict[str, float]


class DataSetStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Evaluation on one data set. The other figures do not include `mixed` episodes: see `EvalStatus`."""

    data_set: str
    episodes: int
    mean_reward: float
    success_rate: float
    mixed: int
    mixed_mean_reward: float


class EvalStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Evaluation of one policy version, which sampled every token of `episodes` episodes.

    `mixed` episodes were claimed at this version but also have tokens of later versions. `data_sets` has figures only
    for the data sets that clients have named, so they may not add up to the totals.
    """

    version: int
    episodes: int
    mean_reward: float
    success_rate: float
    mixed: int = 0
    mixed_mean_reward: float = 0.0
    data_sets: tuple[DataSetStatus, ...] = ()


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A model that belongs to a client of training operations. `step` counts its optimizer steps."""

    model: str
    session: str
    owner: str
    base: str
    adapter: AdapterShape | None
    step: int
    waiting: int
    executed: int
    checkpointed: int  # the last operation that never has to be re-executed
    idle_s: float  # seconds since an operation was last accepted or executed
    last_op: str = ""  # the kind of the operation executed last
    last_failed: bool = False
    scored: dict[str, float] = {}  # the metrics of the newest forward_backward that succeeded
    stepped: dict[str, float] = {}  # the metrics of the newest optim_step that succeeded


class OperationsStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The training operations of an engine: totals, and the open models."""

    sessions: int
    models: tuple[ModelStatus, ...]  # the open models
    accepted: int
    waiting: int
    executed: int
    failed: int
    held_bytes: int  # size of the operations that a trainer may still have to read
    result_bytes: int
    saved: int  # number of models that were saved for their clients


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    engine: str
    phase: Phase
    phase_s: float
    detail: str
    failure: str  # why the last run failed, "" if it did not
    suspended: str = ""  # why the run is suspended, "" if it is not
    until_served: bool = False  # whether a suspended run also resumes automatically once a replica serves its weights
    model: str
    run: int
    begun: str = ""  # where the run began, "" if there was no checkpoint at which it could begin
    global_step: int
    version: int
    method: Method
    progress: tuple[Measure, ...]
    pool_episodes: int
    pool_bytes: int
    open_episodes: tuple[OpenEpisode, ...]  # the longest idle first
    replicas: tuple[ReplicaStatus, ...]
    trainer: TrainerStatus
    last_step: StepStatus | None
    evals: tuple[EvalStatus, ...]  # by version, ascending
    pace: Pace | None = None  # None if the run is synchronous, or if there is no run
    formats: tuple[FormatStatus, ...] = ()  # empty until a gateway has read the run's model
    disagreement: str = ""  # between gateways that use different formats for the run's model
    clients_take_episodes: bool = False  # whether clients of training operations take the ended episodes
    batches_from_queue: bool = False  # whether batches are formed from a queue of rollout groups
    operations: OperationsStatus | None = None  # None if there have never been any sessions or operations
    taken: int = 0  # number of ended episodes that training clients took, or that became rollout groups
    calls_incomplete: int = 0  # calls answered without part of their conversation, such as an image
    rollout_groups: RolloutGroupStatus | None = None  # None if there are neither rollout groups nor a trainer for them
    rollouts: tuple[StepRollouts, ...] = ()  # figures of the newest sealed batches, oldest first
    silent: str = ""  # why nothing was learned in the newest steps
    aborted_by: dict[FailureKind, int] = {}  # episodes of this run that failed and have no reward, by failure
    ended_by: dict[FailureKind, int] = {}  # episodes of this run that used up a budget but have a reward, by budget


class HiveStatus(msgspec.Struct, frozen=True, kw_only=True):
    epoch: int
    now_ns: int
    engines: tuple[EngineStatus, ...]
    multi_model: tuple[MultiModelClaimStatus, ...] = ()  # the longest idle first
    refusing: str = ""  # why no new work is accepted
    dead_letters: tuple[str, ...] = ()  # the newest messages that could not be decided, because of a bug in bombus
    uncompacted: str = ""  # why the log could not be compacted
    went_back: tuple[str, ...] = ()  # streams that have lost their end in the last day
    level: int = 1  # the feature level of the log
