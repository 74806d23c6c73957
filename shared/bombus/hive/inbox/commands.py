"""Commands, which get an answer."""

from typing import Any

import msgspec

from bombus.hive.events import Collection, EpisodeType
from bombus.hive.inbox.common import Message
from bombus.hive.records import BodyRef
from bombus.hive.shares import share_name
from bombus.hive.trajectories.queue import QueuedGroup

BASE_SAMPLER = "base"  # instead of a saved model: the base of the run, without any adapter


class Configure(Message, frozen=True, kw_only=True, omit_defaults=True, tag="configure"):
    config: str
    config_digest: str
    collection: Collection
    model: str


class Start(Message, frozen=True, kw_only=True, omit_defaults=True, tag="start"):
    pass


class Stop(Message, frozen=True, kw_only=True, omit_defaults=True, tag="stop"):
    pass


class Resume(Message, frozen=True, kw_only=True, omit_defaults=True, tag="resume"):
    """Let a suspended run try again."""


class Claim(Message, frozen=True, kw_only=True, omit_defaults=True, tag="claim"):
    """Claim `count` episodes, all or none. `claim` stays the same over the slices of one long wait (R13).

    `owner` is the name of the key that the client has shown, if it has one. Such a key may have caps on its open
    episodes and on its waiting claims; 0 is no cap. In a run of operations `sampler` names the saved model that their
    calls sample from, by its `MODEL/USE/NAME`, or is `BASE_SAMPLER`. `admin`: the client has shown the hive's own key.
    `touches`: it shows every few seconds that it lives (`Touch.clients`), so that its silence says that it does not.
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
        """Return for whose share it counts while it waits."""
        return share_name(self.owner, self.admin)


class MultiModelClaim(Claim, frozen=True, kw_only=True, omit_defaults=True, tag="claim_joint"):
    """Claim `count` multi-model episodes, of one episode on each of `engines`, all or none. It is about the hive."""

    engines: tuple[str, ...]


class EpisodeResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The outcome of one episode as a client reports it: with `reward`, `call_rewards` in the order of the calls, or
    `rewards_by_call`, by the calls' ids. `data_set` names the set that the task is of."""

    episode: str
    task: str
    reward: float | None = None
    call_rewards: tuple[float, ...] | None = None
    is_success: bool | None = None
    metadata: dict[str, Any] = {}
    log_metrics: dict[str, float] = {}
    rewards_by_call: dict[str, float] | None = None
    data_set: str = ""


class End(Message, frozen=True, kw_only=True, omit_defaults=True, tag="end"):
    """End episodes, all or none."""

    client: str
    results: tuple[EpisodeResult, ...]
    client_active: bool = True


class MultiModelEnd(Message, frozen=True, kw_only=True, omit_defaults=True, tag="end_joint"):
    """End multi-model episodes, all or none: each with a result for every one of its engines. It is about the hive."""

    client: str
    results: tuple[dict[str, EpisodeResult], ...]


class Abort(Message, frozen=True, kw_only=True, omit_defaults=True, tag="abort"):
    """Abort episodes. With one of a multi-model episode, its partners are aborted too."""

    client: str
    episodes: tuple[str, ...]
    infra: bool = False
    detail: str = ""


class Take(Message, frozen=True, kw_only=True, omit_defaults=True, tag="take"):
    """Let ended episodes of a run of operations go: their client has their tokens. Those that are gone are skipped."""

    client: str
    episodes: tuple[str, ...]


class AgreeSync(Message, frozen=True, kw_only=True, omit_defaults=True, tag="agree_sync"):
    client: str


class Lookup(Message, frozen=True, kw_only=True, omit_defaults=True, tag="lookup"):
    """Request the calls of an episode, for a gateway that did not serve its earlier turns (R10)."""

    episode: str


class OpenSession(Message, frozen=True, kw_only=True, omit_defaults=True, tag="open_session"):
    """Open a session of training operations. `idle_s` is 0 where its client names no time.

    `owner` is the name of the key that the client has shown, if it has one. One `for_model` ends with its model. One of
    the hive's own `admin` key has a share of its own.
    """

    session: str
    idle_s: float = 0.0
    owner: str = ""
    dialect: str = msgspec.field(default="", name="door")
    metadata: dict[str, Any] = {}
    for_model: bool = False
    admin: bool = False


class CloseSession(Message, frozen=True, kw_only=True, omit_defaults=True, tag="close_session"):
    """End a session, and its models after what waits for them; with `save` each of them is saved first."""

    session: str
    detail: str = ""
    save: bool = True


class BeginSampling(Message, frozen=True, kw_only=True, omit_defaults=True, tag="begin_sampling"):
    """Let a session sample from a base, or from what was saved on it. An engine that is offline starts a run for it."""

    session: str
    base: str


class Operate(Message, frozen=True, kw_only=True, omit_defaults=True, tag="operate"):
    """Accept an operation on a model. `op` says which, and `body` is where all of it is.

    The same `model` and `key` are the same operation, with the same answer, whatever the message's id. The first one
    of a model is `create_model`, with the name of its `base`. `run` is 0 where the sender knows none. The client's
    `metadata` is for the model that is created, or for the checkpoint that is saved. With `again_s`, they are the same
    operation only within so long: some clients begin to count again. `reads` is the `kept_id` of the saved model that
    it loads, which is not removed meanwhile. `models_max` is how many models the engine may have at once, where the
    gateway says so.
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
    """Remove a saved model. One that is not there is removed already. One that a waiting operation loads stays."""

    model: str
    use: str
    name: str


class AddEndpoint(Message, frozen=True, kw_only=True, omit_defaults=True, tag="add_endpoint"):
    """Give the weights that are put in sync to this inference server too. One that is there already is changed.

    `owner` is the name of its client's key, "" where that has none.
    """

    host: str
    port: int
    world_size: int = 1
    owner: str = ""


class RemoveEndpoint(Message, frozen=True, kw_only=True, omit_defaults=True, tag="remove_endpoint"):
    """Give no more weights to this inference server. One that is not there is removed already."""

    host: str
    port: int


class AskRest(Message, frozen=True, kw_only=True, omit_defaults=True, tag="ask_rest"):
    """Let the trainer of a run of operations free its memory, or with `asleep` false take it again and go on."""

    asleep: bool = False


class RetainWeights(Message, frozen=True, kw_only=True, omit_defaults=True, tag="retain_weights"):
    """Keep a saved model for `ttl_s` from now on, 0 forever."""

    model: str
    use: str
    name: str
    ttl_s: float = 0.0


class RegisterTrainer(Message, frozen=True, kw_only=True, omit_defaults=True, tag="register_trainer"):
    """Begin a run of trajectories for a trainer of its own, which asks for batches of `batch_size` sequences."""

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


class JoinEnvironment(Message, frozen=True, kw_only=True, omit_defaults=True, tag="join_environment"):
    """Let an environment send groups of `group_size`. `minimum` is the part of each batch that it asks for.

    `owner` is the name of the key that its client has shown, if it has one: nobody else acts for it. `admin`: that key
    is the hive's own.
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
    """Queue rollout groups, all or none. Soon after a push of the same `key`, it is the same push.

    With bodies that have no sequences it asks whether they are to be stored: BODY_GONE says that they are.
    """

    groups: tuple[QueuedGroup, ...]
    key: str = ""


class TakeBatch(Message, frozen=True, kw_only=True, omit_defaults=True, tag="take_batch"):
    """Hand out the next batch if there is one, or the last one again where it was not delivered.

    A trainer that says which batch it has, with all before it, gets the next one `after` that, until it says that it
    has it: 0 if it has none. Nothing else counts as delivered to it.
    """

    after: int | None = None


class LostGroup(msgspec.Struct, frozen=True, array_like=True):
    """A group, by its number, whose body was looked for at `first` and is lost."""

    group: int
    first: int


class GiveUpGroups(Message, frozen=True, kw_only=True, omit_defaults=True, tag="give_up_groups"):
    """Give up groups whose bodies are lost. See `GroupsGivenUp` for `number`."""

    run: int
    number: int
    groups: tuple[LostGroup, ...]
    why: str


class ResetGroups(Message, frozen=True, kw_only=True, omit_defaults=True, tag="reset_groups"):
    """End a run of trajectories, and forget its groups and environments."""


class PublishWeights(Message, frozen=True, kw_only=True, omit_defaults=True, tag="publish_weights"):
    """Mark a saved model as `public`, or take the mark away."""

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
