"""Commands: the messages that get an answer."""

from typing import Any

import msgspec

from bombus.hive.events import Collection, EpisodeType
from bombus.hive.failures import FailureKind
from bombus.hive.inbox.common import Message
from bombus.hive.records import BodyRef
from bombus.hive.shares import share_name
from bombus.hive.trajectories.queue import QueuedGroup

BASE_SAMPLER = "base"  # used in place of a saved model: the run's base model, without an adapter


class Configure(Message, frozen=True, kw_only=True, omit_defaults=True, tag="configure"):
    """Give an engine a job. `by` is who sent the command (see `bombus.hive.shares.sender_name`), here and in others."""

    config: str
    config_digest: str
    collection: Collection
    model: str
    by: str = ""


class Start(Message, frozen=True, kw_only=True, omit_defaults=True, tag="start"):
    by: str = ""


class Stop(Message, frozen=True, kw_only=True, omit_defaults=True, tag="stop"):
    by: str = ""


class Resume(Message, frozen=True, kw_only=True, omit_defaults=True, tag="resume"):
    """Resume a suspended run."""

    by: str = ""


class Claim(Message, frozen=True, kw_only=True, omit_defaults=True, tag="claim"):
    """Claim `count` episodes, all or none. A client that waits long for a claim sends it in slices, which all have the
    same `claim` (R13).

    `owner` is the name of the client's key, if the key has one. A key with a name may have caps on its open episodes
    and on its waiting claims; 0 means no cap. In an operations run, `sampler` is the `MODEL/USE/NAME` of the saved
    model from which the episodes' calls are sampled, or `BASE_SAMPLER`. `admin` says that the client used the hive's
    admin key. `touches` says that the client sends heartbeats every few seconds (`Touch.clients`), so that it counts as
    gone if they stop.
    """

    claim: str
    client: str
    count: int = 1
    type: EpisodeType = EpisodeType.TRAIN
    discard_timeout_s: float = 240.0
    first_asked_ns: int = 0
    wait_s: float = 0.0
    task_hint: str = ""
    owner: str = ""
    open_max: int = 0
    waiting_max: int = 0
    sampler: str = ""
    admin: bool = False
    touches: bool = False

    @property
    def holder(self) -> str:
        """Return the holder whose share the claim counts toward while it waits."""
        return share_name(self.owner, self.admin)


class MultiModelClaim(Claim, frozen=True, kw_only=True, omit_defaults=True, tag="claim_joint"):
    """Claim `count` multi-model episodes, all or none: each has one episode on every engine in `engines`.

    Its `engine` is `HIVE`.
    """

    engines: tuple[str, ...]


class EpisodeResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The outcome of one episode, as a client reports it.

    It has either a `reward`, `call_rewards` in the order of the calls, or `rewards_by_call`, keyed by call id.
    `data_set` is the name of the task's data set. `failure` is the budget that the episode used up.
    """

    episode: str
    task: str
    reward: float | None = None
    call_rewards: tuple[float, ...] | None = None
    is_success: bool | None = None
    metadata: dict[str, Any] = {}
    log_metrics: dict[str, float] = {}
    rewards_by_call: dict[str, float] | None = None
    data_set: str = ""
    failure: FailureKind | None = None


class End(Message, frozen=True, kw_only=True, omit_defaults=True, tag="end"):
    """End episodes, all or none."""

    client: str
    results: tuple[EpisodeResult, ...]
    client_active: bool = True


class MultiModelEnd(Message, frozen=True, kw_only=True, omit_defaults=True, tag="end_joint"):
    """End multi-model episodes, all or none, each with a result for every one of its engines.

    Its `engine` is `HIVE`.
    """

    client: str
    results: tuple[dict[str, EpisodeResult], ...]


BY_OPERATOR = "by an operator"  # why an episode was aborted whose client did not ask for it


class Abort(Message, frozen=True, kw_only=True, omit_defaults=True, tag="abort"):
    """Abort episodes. If an episode is part of a multi-model episode, its partners are aborted too.

    `failure` is the kind of failure, or None if nothing failed. Older clients report only `infra`, which means that no
    model is to blame. `by` is the operator who aborts the episodes, if it is not their client.
    """

    client: str
    episodes: tuple[str, ...]
    infra: bool = False
    detail: str = ""
    failure: FailureKind | None = None
    by: str = ""


class Take(Message, frozen=True, kw_only=True, omit_defaults=True, tag="take"):
    """Remove ended episodes of an operations run, because their client has their tokens. Episodes already removed are
    skipped."""

    client: str
    episodes: tuple[str, ...]


class AgreeSync(Message, frozen=True, kw_only=True, omit_defaults=True, tag="agree_sync"):
    client: str


class Lookup(Message, frozen=True, kw_only=True, omit_defaults=True, tag="lookup"):
    """Request the calls of an episode, for a gateway that did not serve its earlier turns (R10)."""

    episode: str


class OpenSession(Message, frozen=True, kw_only=True, omit_defaults=True, tag="open_session"):
    """Open a session of training operations. `idle_s` is 0 if the client does not specify it.

    `owner` is the name of the client's key, if the key has one. A session that is opened for a single model
    (`for_model`) ends with that model. A session opened with the hive's admin key (`admin`) has a separate share.
    """

    session: str
    idle_s: float = 0.0
    owner: str = ""
    dialect: str = msgspec.field(default="", name="door")
    metadata: dict[str, Any] = {}
    for_model: bool = False
    admin: bool = False


class CloseSession(Message, frozen=True, kw_only=True, omit_defaults=True, tag="close_session"):
    """End a session, and each of its models once its waiting operations are done; with `save`, each model is saved
    first."""

    session: str
    detail: str = ""
    save: bool = True


class BeginSampling(Message, frozen=True, kw_only=True, omit_defaults=True, tag="begin_sampling"):
    """Allow a session to sample from a base model, or from saved models that were trained from it. If the engine is
    offline, it starts a run for this purpose."""

    session: str
    base: str


class Operate(Message, frozen=True, kw_only=True, omit_defaults=True, tag="operate"):
    """Queue an operation on a model. `op` is the kind of operation, and `body` the place of its body.

    Messages with the same `model` and `key` are the same operation and get the same answer, whatever their ids. If
    `again_s` is given, they are the same only for that many seconds, since some clients reuse their keys. The first
    operation of a model is `create_model`, with the name of its `base`. `run` is 0 if the sender does not know the run.
    The client's `metadata` is for the model that is created or the checkpoint that is saved. `reads` is the `kept_id`
    of the saved model that the operation loads; that model is not removed before the operation has loaded it.
    `models_max` is how many models the engine may have at the same time, if the gateway sets a limit.
    """

    session: str
    model: str
    key: str
    op: str
    body: BodyRef
    run: int = 0
    passive: bool = False
    base: str = ""
    metadata: dict[str, str] = {}
    again_s: float = 0.0
    reads: str = ""
    models_max: int = 0


class RemoveWeights(Message, frozen=True, kw_only=True, omit_defaults=True, tag="remove_weights"):
    """Remove a saved model, or do nothing if there is none. The saved model is not removed if a waiting operation will
    load it."""

    model: str
    use: str
    name: str


class AddEndpoint(Message, frozen=True, kw_only=True, omit_defaults=True, tag="add_endpoint"):
    """Register an inference server that gets synced weights, or change its registration.

    `owner` is the name of the client's key, or "" if the key has no name.
    """

    host: str
    port: int
    world_size: int = 1
    owner: str = ""


class RemoveEndpoint(Message, frozen=True, kw_only=True, omit_defaults=True, tag="remove_endpoint"):
    """Unregister an inference server, or do nothing if it is not registered."""

    host: str
    port: int


class AskRest(Message, frozen=True, kw_only=True, omit_defaults=True, tag="ask_rest"):
    """Ask the trainer of an operations run to free its memory or, if `asleep` is false, to load its models again."""

    asleep: bool = False
    by: str = ""


class RetainWeights(Message, frozen=True, kw_only=True, omit_defaults=True, tag="retain_weights"):
    """Keep a saved model for `ttl_s` from now on, or forever if that is 0."""

    model: str
    use: str
    name: str
    ttl_s: float = 0.0


class RegisterTrainer(Message, frozen=True, kw_only=True, omit_defaults=True, tag="register_trainer"):
    """Begin a rollout-group run for an outside trainer, which will request batches of `batch_size` sequences."""

    trainer: str
    batch_size: int
    max_token_len: int
    checkpoint_dir: str
    save_checkpoint_interval: int
    starting_step: int
    num_steps: int
    wandb_group: str = ""
    wandb_project: str = ""
    owner: str = ""
    by: str = ""


class JoinEnvironment(Message, frozen=True, kw_only=True, omit_defaults=True, tag="join_environment"):
    """Register an environment that pushes groups of `group_size`, and requests the fraction `minimum` of each batch.

    `owner` is the name of the client's key, if the key has one; other keys may not act for the environment. `admin`
    says whether that key is the hive's admin key.
    """

    desired_name: str
    max_tokens: int
    weight: float
    group_size: int
    minimum: float | None = None
    owner: str = ""
    admin: bool = False


class LeaveEnvironment(Message, frozen=True, kw_only=True, omit_defaults=True, tag="leave_environment"):
    environment: int


class PushGroups(Message, frozen=True, kw_only=True, omit_defaults=True, tag="push_groups"):
    """Queue rollout groups, all or none. If a push with the same `key` was made shortly before, this one is a
    repetition of it.

    If the bodies have no sequences, the message asks whether the bodies must be stored: the answer BODY_GONE means yes.
    """

    groups: tuple[QueuedGroup, ...]
    key: str = ""


class TakeBatch(Message, frozen=True, kw_only=True, omit_defaults=True, tag="take_batch"):
    """Hand out the next batch if there is one, or the last one again if it was not delivered.

    A trainer may confirm batches itself: `after` is the number of the last batch that it has (0 for none), and every
    request returns the batch after that one until the trainer confirms it. For such a trainer, only the batches that it
    has confirmed count as delivered.
    """

    after: int | None = None


class LostGroup(msgspec.Struct, frozen=True, array_like=True):
    """A group whose body is lost: its number, and `first`, the sequence number at which the body should have been."""

    group: int
    first: int


class GiveUpGroups(Message, frozen=True, kw_only=True, omit_defaults=True, tag="give_up_groups"):
    """Drop groups whose bodies are lost. See `GroupsGivenUp` for `number`."""

    run: int
    number: int
    groups: tuple[LostGroup, ...]
    why: str


class ResetGroups(Message, frozen=True, kw_only=True, omit_defaults=True, tag="reset_groups"):
    """End a rollout-group run, and forget its groups and environments."""

    by: str = ""


class PublishWeights(Message, frozen=True, kw_only=True, omit_defaults=True, tag="publish_weights"):
    """Mark a saved model as `public`, or remove the mark."""

    model: str
    use: str
    name: str
    public: bool = True


AnyCommand = (
    Configure
    | Start
    | Stop
    | Resume
    | Claim
    | MultiModelClaim
    | End
    | MultiModelEnd
    | Abort
    | Take
    | AgreeSync
    | Lookup
    | OpenSession
    | CloseSession
    | BeginSampling
    | Operate
    | RemoveWeights
    | AddEndpoint
    | RemoveEndpoint
    | AskRest
    | RetainWeights
    | RegisterTrainer
    | JoinEnvironment
    | LeaveEnvironment
    | PushGroups
    | TakeBatch
    | GiveUpGroups
    | ResetGroups
    | PublishWeights
)
