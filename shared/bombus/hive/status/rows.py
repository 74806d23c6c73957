"""What a status has: rows of plain values, for `bombus status --json` and the screen."""

import msgspec

from bombus.hive.collection import Measure
from bombus.hive.events import AdapterShape, ConversationFormat, EpisodeType, Method
from bombus.hive.pacing import Pace
from bombus.hive.state import Phase
from bombus.hive.trajectories.status import RolloutGroupStatus


class OpenEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """An open episode. `idle_s` counts from its last recorded call.

    The coordinator may count less: heartbeats and calls in flight are only in the inbox.
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
    """A claim of multi-model episodes, those that are open: `episodes` has the names of each, in the order of
    `engines`.

    The figures are those of all their engines. `idle_s` is that of the multi-model episode that is idle longest, and
    counts from the last recorded call of any of its parts: activity of one is activity of all.
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
    version: int  # -1: nothing loaded
    current: bool  # serves the newest weights of this run
    sequence_tokens: int = 0  # the longest sequence that it serves, 0 where it does not say
    constrains: bool = False  # whether it supports structured output
    quarantined: str = ""  # why it gets no calls, and nothing waits for it


class FormatStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A way in which the model of the run is read, and the first gateway that reported it."""

    gateway: str
    format: ConversationFormat


class TrainerStatus(msgspec.Struct, frozen=True, kw_only=True):
    trainer: str  # "" before one has opened the run
    epoch: int
    step_in_flight: int | None  # sealed, not yet completed
    step_since_ns: int
    groups: int
    episodes: int
    failures: int  # of the step in flight
    absence: str = ""  # since when and why there is no trainer, after the last one has stalled


class StepStatus(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    at_ns: int
    metrics: dict[str, float]


class StepRollouts(msgspec.Struct, frozen=True, kw_only=True):
    """The training episodes that ended while the batch of `step` was collected.

    `success_rate` is of those that say whether they are a success, None where none does. `metrics` has the mean of each
    metric that they have reported.
    """

    step: int
    episodes: int
    mean_reward: float
    success_rate: float | None
    mean_completion_tokens: float
    metrics: dict[str, float]


class DataSetStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Evaluation on one data set. `mixed` episodes are in none of the other figures: see `EvalStatus`."""

    data_set: str
    episodes: int
    mean_reward: float
    success_rate: float
    mixed: int
    mixed_mean_reward: float


class EvalStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Evaluation of one policy version, which has sampled every token of `episodes`.

    `mixed` episodes were claimed at this version, and have tokens of later ones too. `data_sets` are those that
    clients have named, which need not be all.
    """

    version: int
    episodes: int
    mean_reward: float
    success_rate: float
    mixed: int = 0
    mixed_mean_reward: float = 0.0
    data_sets: tuple[DataSetStatus, ...] = ()


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A model of a client of training operations. `step` counts its optimizer steps."""

    model: str
    session: str
    owner: str
    base: str
    adapter: AdapterShape | None
    step: int
    waiting: int
    executed: int
    checkpointed: int  # the last operation that need not be executed again
    idle_s: float  # since an operation was accepted or executed
    last_op: str = ""  # that was executed
    last_failed: bool = False
    scored: dict[str, float] = {}  # the metrics of the newest forward_backward that succeeded
    stepped: dict[str, float] = {}  # and of the newest optim_step


class OperationsStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine has to do with training operations: totals, and the models that are there now."""

    sessions: int
    models: tuple[ModelStatus, ...]  # those that are open
    accepted: int
    waiting: int
    executed: int
    failed: int
    held_bytes: int  # of operations that a trainer may still have to read
    result_bytes: int
    saved: int  # models that were saved for their clients


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    engine: str
    phase: Phase
    phase_s: float
    detail: str
    failure: str  # why the last run ended, "" when it did not fail
    suspended: str = ""  # why the run waits for its operator, "" while it goes on
    until_served: bool = False  # it also resumes by itself, once a replica serves its weights
    model: str
    run: int
    begun: str = ""  # where the run began, "" where it had no checkpoint to begin at
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
    pace: Pace | None = None  # None: the run is synchronous, or there is none
    formats: tuple[FormatStatus, ...] = ()  # empty until a gateway has read the model of the run
    disagreement: str = ""  # between gateways that read the model of the run in different ways
    clients_take_episodes: bool = False  # clients of training operations take the ended episodes
    batches_from_queue: bool = False  # batches are made of a queue of rollout groups
    operations: OperationsStatus | None = None  # None: there never was one
    taken: int = 0  # ended episodes of a run of operations that their clients have taken
    calls_incomplete: int = 0  # answered without a part of their conversation, such as an image
    rollout_groups: RolloutGroupStatus | None = None  # None: it has no rollout groups, and no trainer for them
    rollouts: tuple[StepRollouts, ...] = ()  # of the newest sealed batches, oldest first
    silent: str = ""  # why the newest steps have learnt nothing


class HiveStatus(msgspec.Struct, frozen=True, kw_only=True):
    epoch: int
    now_ns: int
    engines: tuple[EngineStatus, ...]
    multi_model: tuple[MultiModelClaimStatus, ...] = ()  # the longest idle first
    refusing: str = ""  # why no new work is taken
    dead_letters: tuple[str, ...] = ()  # the newest messages that could not be decided: a fault of bombus
    uncompacted: str = ""  # why the log is longer than it should be
    went_back: tuple[str, ...] = ()  # streams that have lost their ends in the last day
