"""Types that several kinds of events share: the base class, and the rules and reasons that they contain."""

from enum import StrEnum

import msgspec

from bombus.hive.failures import FailureKind

HIVE = "_hive"  # the engine name in events that belong to no engine


class EpisodeType(StrEnum):
    TRAIN = "train"
    EVAL = "eval"


class AbortReason(StrEnum):
    CLIENT = "client"
    IDLE = "idle"
    UNCONFIRMED = "unconfirmed"  # the claim's answer never reached a live connection
    ENGINE_STOPPED = "engine_stopped"
    SUPERSEDED = "superseded"  # the drain deadline passed
    INFRA = "infra"  # an infrastructure failure: no reward, and not counted in its group's statistics
    MULTI_MODEL = "joint"  # another episode of its multi-model episode was aborted
    SILENT = "silent"  # its client, which sends heartbeats, was silent for too long
    CROWDED = "crowded"  # its key pinned more than its share of the stream of calls, which was full

    @property
    def failure(self) -> FailureKind | None:
        """Return the kind of failure that this reason implies if the abort itself does not give one, for instance
        because the hive aborted the episode. Returns None if nothing failed."""
        match self:
            case AbortReason.IDLE | AbortReason.UNCONFIRMED | AbortReason.SILENT:
                return FailureKind.CLIENT
            case AbortReason.ENGINE_STOPPED | AbortReason.SUPERSEDED | AbortReason.CROWDED:
                return FailureKind.HIVE
            case AbortReason.INFRA:  # from a client that does not know the kinds of failure
                return FailureKind.ENVIRONMENT
            case AbortReason.CLIENT | AbortReason.MULTI_MODEL:
                return None


class DropReason(StrEnum):
    NO_SIGNAL = "no_signal"
    STALE = "stale"
    OVERFLOW = "overflow"
    UNTAKEN = "untaken"  # in an operations run: its client did not take it in time
    UNFIT = "unfit"  # in a rollout-group run: it cannot be turned into a rollout group


class RunKind(StrEnum):
    """The kind of a run, which only older logs contain. In newer logs, `base`, `config_digest` and the job's collection
    determine it."""

    EPISODES = "episodes"
    OPERATIONS = "operations"
    TRAJECTORIES = "trajectories"


class EnvironmentEnd(StrEnum):
    """Why an environment has left."""

    DISCONNECTED = "disconnected"  # it said that it was leaving
    SILENT = "silent"  # it was silent for too long


class SessionEnd(StrEnum):
    """Why a session has ended."""

    FINISHED = "finished"  # its client ended it
    IDLE = "idle"  # its client was silent for too long


class ModelEnd(StrEnum):
    """Why a model has ended."""

    ENDED = "ended"  # an operation ended it
    NOT_CREATED = "not_created"  # its first operation failed
    NOT_SAVED = "not_saved"  # its session ended, and it could not be saved
    RUN_OVER = "run_over"


class Method(StrEnum):
    """The rule that decides when a batch is complete. A job may omit the prefix of a method's name."""

    ENOUGH_EPISODES = "rollout_until_finish_enough_episodes"
    ENOUGH_TASKS = "rollout_until_finish_enough_tasks"
    ENOUGH_NON_DUMMY_TASKS = "rollout_until_finish_enough_non_dummy_tasks"
    ANY_CLIENT_AGREES = "rollout_until_any_client_agree_sync_weight"
    ALL_CLIENTS_AGREE = "rollout_until_all_clients_agree_sync_weight"


class OperationLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of training operations on an engine, and how long unused sessions, runs and results are kept."""

    sessions_max: int = 256
    models_max: int = 16
    waiting_max: int = 256  # the most waiting operations of one model
    operations_max: int = 4096  # the most operations of one model, including executed ones not yet in a checkpoint
    bodies_bytes_max: int = 512 << 20  # total size of waiting operations, and of executed ones not yet in a checkpoint
    results_bytes_max: int = 256 << 20  # above this, the oldest results are dropped
    results_s: float = 3600.0  # how long results can be read after their session has ended
    session_idle_s: float = 3600.0  # for a session that does not give an idle time
    run_idle_s: float = 300.0  # time after which a run without a model ends
    checkpoints_max: int = 1000
    executions_max: int = 3  # attempts at one operation if each trainer ends before it has a result
    episodes_s: float = 86_400.0  # how long an ended episode waits for its client to take it


class Collection(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a job that the coordinator needs: how episodes are handed out and batches are formed."""

    method: Method = Method.ENOUGH_TASKS
    batch_size: int = 32
    num_repeat: int = 4
    max_open_claims: int = 128
    max_pool_episodes: int = 9999
    max_pool_bytes: int = 2 << 30
    max_staleness: int = 0
    max_carry_staleness: int = 1
    drain_s: float = 300.0
    boot_s: float = 1800.0
    sync_s: float = 600.0
    agreed_sync_s: float = 6.0  # the shortest sync under the methods that rely on the clients' agreement
    client_silence_s: float = 15.0  # silence after which the episodes of a client that sends heartbeats are aborted
    max_step_failures: int = 3
    replay_steps: int = 1000  # number of steps whose calls are kept for replay while there is room (R12)
    resume: str = "never"  # the checkpoint at which a new run begins: never, auto, or "from VERSION"
    checkpoints_kept: int = 2
    operations: OperationLimits = msgspec.field(default=OperationLimits(), name="tenancy")
    # The job trains on groups that environments have scored.
    rollout_groups: bool = msgspec.field(default=False, name="scored_groups")
    episode_groups: bool = False  # whether the job's episodes become rollout groups, from which batches are formed

    @property
    def episode_target(self) -> int:
        return self.batch_size * self.num_repeat

    @property
    def trained_staleness(self) -> int | None:
        """Return the greatest age at which a token is trained on (R14). Returns None if that age is 0, because the
        coordinator then enforces the limit."""
        return self.max_staleness or None


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind"):
    """A fact on the log. `at_ns` is the time of the inbox message that led to the event (R5). It never decreases from
    one event to the next."""

    at_ns: int = 0
    engine: str = HIVE
