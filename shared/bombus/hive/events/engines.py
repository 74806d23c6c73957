"""The events of an engine's run: its phases, its trainer's steps, its weights, and the replicas that serve them."""

import msgspec

from bombus.errors import Code
from bombus.hive.events.common import Collection, Event, RunKind
from bombus.hive.fates import StepTokens


class EpochOpened(Event, frozen=True, kw_only=True, omit_defaults=True, tag="epoch.opened"):
    """A coordinator has become the leader. The event gives the size limits of the streams `calls` and `trajectories`; 0
    means that a stream has no limit.

    What is written from here on can be read by every release that knows the feature level `level`.
    """

    epoch: int
    leader: str
    calls_bytes_max: int = 0
    trajectories_bytes_max: int = 0
    level: int = 1


class LeadingPaused(Event, frozen=True, kw_only=True, omit_defaults=True, tag="leading.paused"):
    """No coordinator led from `since_ns` until now: there was no leader, the leader stalled, or the bus was
    unreachable."""

    since_ns: int


class EngineConfigured(Event, frozen=True, kw_only=True, omit_defaults=True, tag="engine.configured"):
    """An engine has a job. `by` is who sent the command (see `bombus.hive.shares.sender_name`), here and in others."""

    config: str  # the whole job as canonical JSON
    config_digest: str
    collection: Collection
    model: str
    command: str = ""
    by: str = ""


class Beginning(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The checkpoint at which a run begins: the one at step `step` of an earlier run.

    `changed` lists the trainer's settings that have changed since that run, each with both values.
    """

    run: int
    step: int
    checkpoint: str
    checkpoint_digest: str
    changed: tuple[str, ...] = ()


class EngineStarted(Event, frozen=True, kw_only=True, omit_defaults=True, tag="engine.started"):
    """A run has started, either from a checkpoint (`begins`) or from the model as loaded.

    If the run starts from the model as loaded although an earlier run has left checkpoints, `anew` says why. A run that
    serves training operations has a `base`, and a run without a `config_digest` hands out its batches to an outside
    trainer.
    """

    run: int
    config_digest: str
    command: str = ""
    begins: Beginning | None = None
    anew: str = ""
    run_kind: RunKind = RunKind.EPISODES  # read from older logs but no longer written; the default means nothing
    base: str = ""
    by: str = ""


class EngineProgressed(Event, frozen=True, kw_only=True, omit_defaults=True, tag="engine.progressed"):
    """The engine reached a stage of booting. The stage is shown as `engine_status_detail`."""

    run: int
    stage: str


class EngineBooted(Event, frozen=True, kw_only=True, omit_defaults=True, tag="engine.booted"):
    run: int


class EngineStopped(Event, frozen=True, kw_only=True, omit_defaults=True, tag="engine.stopped"):
    run: int
    command: str = ""
    by: str = ""


class EngineFailed(Event, frozen=True, kw_only=True, omit_defaults=True, tag="engine.failed"):
    run: int
    reason: str


class EngineSuspended(Event, frozen=True, kw_only=True, omit_defaults=True, tag="engine.suspended"):
    """The run cannot continue for now. It keeps its state, and waits for its operator to resume or stop it.

    If `until_served` is true, the run also resumes automatically once a replica serves the run's newest weights.
    """

    run: int
    reason: str
    until_served: bool = False


class EngineResumed(Event, frozen=True, kw_only=True, omit_defaults=True, tag="engine.resumed"):
    """A suspended run was resumed, by its operator's `command` or because a replica serves its weights again.

    The deadlines of the run's current phase start over. After a command, quarantined replicas try again immediately.
    """

    run: int
    command: str = ""
    by: str = ""


class CommandAnswered(Event, frozen=True, kw_only=True, omit_defaults=True, tag="command.answered"):
    """A command to configure, start, stop or resume changed nothing: it was refused, for the reason `why`, or it was
    not needed.

    If the same command is sent again, even much later and under another leader, it gets the same answer and has no
    effect.
    """

    command: str
    run: int
    code: Code | None = None  # None if the command was not refused
    why: str = ""
    by: str = ""


class ConversationFormat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The format in which a gateway renders conversations with a model and parses the model's turns.

    `template` is a digest of everything that determines prompts. `tool_calls` and `reasoning` name the syntaxes in
    which tool calls and reasoning are parsed, or are "text" if these are left as text.
    """

    template: str
    tool_calls: str
    reasoning: str


class ModelRead(Event, frozen=True, kw_only=True, omit_defaults=True, tag="model.read"):
    """A gateway reported a conversation format for the run's model that no gateway had reported before in this run."""

    run: int
    gateway: str
    format: ConversationFormat


class RollingStarted(Event, frozen=True, kw_only=True, omit_defaults=True, tag="rolling.started"):
    run: int
    version: int


class RollingClosed(Event, frozen=True, kw_only=True, omit_defaults=True, tag="rolling.closed"):
    run: int


class SyncingStarted(Event, frozen=True, kw_only=True, omit_defaults=True, tag="syncing.started"):
    run: int


class SyncAgreed(Event, frozen=True, kw_only=True, omit_defaults=True, tag="sync.agreed"):
    run: int
    client: str


class TrainerOpened(Event, frozen=True, kw_only=True, omit_defaults=True, tag="trainer.opened"):
    """A trainer has opened the run. It counts as gone after `patience_s` of silence (0 if the trainer did not specify
    this)."""

    run: int
    trainer: str
    trainer_epoch: int
    command: str = ""
    patience_s: float = 0.0


class TrainerStalled(Event, frozen=True, kw_only=True, omit_defaults=True, tag="trainer.stalled"):
    """A trainer has made no progress for `still_s` or, if `silent`, has sent no message for that long. The trainer's
    epoch ends (R11).

    `doing` is the work in which the trainer stalled, or "" if it was waiting. `failures` counts the failures of the
    step that the trainer owed, if any, including this one.
    """

    run: int
    trainer: str
    trainer_epoch: int
    doing: str
    still_s: float
    silent: bool = False
    failures: int = 0


class StepCompleted(Event, frozen=True, kw_only=True, omit_defaults=True, tag="step.completed"):
    """A step was completed. Only this attempt at the step counts (R11)."""

    run: int
    step: int
    trainer_epoch: int
    checkpoint: str
    checkpoint_digest: str
    metrics: dict[str, float] = {}
    tokens: StepTokens | None = None  # None if an older version did not report them


class StepFailed(Event, frozen=True, kw_only=True, omit_defaults=True, tag="step.failed"):
    run: int
    step: int
    trainer_epoch: int
    reason: str
    failures: int


OBJECTS = "object:"


class Weights(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The location of a stored policy version: a folder, or `object:` and a prefix of object names (R15).

    `bytes` and `sha256` always describe the whole safetensors file; `tokenizer` is the name of an object. With the
    format `safetensors-delta`, only the changes since version `base` are stored, in a file with the size `delta_bytes`
    and the hash `delta_sha256`. With the format `safetensors-lora`, the version is an adapter that applies to the full
    copy `adapter_of`.
    """

    where: str
    format: str = "safetensors"
    bytes: int = 0
    sha256: str = ""
    tokenizer: str = ""
    base: int = -1
    delta_bytes: int = 0
    delta_sha256: str = ""
    adapter_of: "Weights | None" = None

    @property
    def objects(self) -> str:
        """Return the prefix of the version's object names, or "" if the version is in a folder."""
        return self.where.removeprefix(OBJECTS) if self.where.startswith(OBJECTS) else ""


class Canary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A trainer's reference values for a version: the logprobs that it computes for the sequences in
    `bombus.weights.canary`, in float64.

    `dtype` is the precision in which the model was published. `bits` is a sum of the bits of all its weights, or "" for
    an adapter. `effect` is the root mean square of the change that an adapter makes to these logprobs.
    """

    logprobs: tuple[float, ...]
    dtype: str
    bits: str = ""
    effect: float = 0.0


class CanaryCheck(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of comparing a replica's canary logprobs with the trainer's, in nats. A `difference` of up to `limit`
    can be explained by rounding.

    At least three of the sequences differ by `difference` or more. `way` says how the logprobs were computed.
    """

    difference: float
    limit: float
    way: str = ""


class WeightsReady(Event, frozen=True, kw_only=True, omit_defaults=True, tag="weights.ready"):
    """A policy version can be loaded. `canary` is None if the trainer computes none."""

    run: int
    version: int
    weights: Weights
    canary: Canary | None = None


class WeightsLoaded(Event, frozen=True, kw_only=True, omit_defaults=True, tag="weights.loaded"):
    """A replica has loaded a policy version.

    `sequence_tokens` is the longest sequence that the replica serves, or 0 if the replica does not report it.
    `constrains` says whether the replica supports structured output. `canary` is None if the replica's weights were not
    compared with the trainer's.
    """

    run: int
    version: int
    replica: str
    sequence_tokens: int = 0
    constrains: bool = False
    canary: CanaryCheck | None = None


class ReplicaJoined(Event, frozen=True, kw_only=True, omit_defaults=True, tag="replica.joined"):
    replica: str
    url: str
    capacity: int = 64


class ReplicaLeft(Event, frozen=True, kw_only=True, omit_defaults=True, tag="replica.left"):
    replica: str
    reason: str = ""


class ReplicaQuarantined(Event, frozen=True, kw_only=True, omit_defaults=True, tag="replica.quarantined"):
    """A replica cannot load the newest weights. It keeps trying.

    Until it has loaded them, it gets no calls and the run does not wait for it. A new run or a command to resume also
    ends the quarantine. If `answers` is true, the replica has loaded the weights but its answers are wrong: it serves
    again once it has loaded other weights or was restarted.
    """

    run: int
    version: int
    replica: str
    reason: str
    answers: bool = False


EngineEvent = (
    EpochOpened
    | LeadingPaused
    | EngineConfigured
    | EngineStarted
    | EngineProgressed
    | EngineBooted
    | EngineStopped
    | EngineFailed
    | EngineSuspended
    | EngineResumed
    | CommandAnswered
    | ModelRead
    | RollingStarted
    | RollingClosed
    | SyncingStarted
    | SyncAgreed
    | TrainerOpened
    | TrainerStalled
    | StepCompleted
    | StepFailed
    | WeightsReady
    | WeightsLoaded
    | ReplicaJoined
    | ReplicaLeft
    | ReplicaQuarantined
)
