"""The events of rollout groups: environments that push them, and trainers that take batches of them."""

import msgspec

from bombus.hive.events.common import EnvironmentEnd, Event
from bombus.hive.records import BodyRef
from bombus.hive.trajectories.queue import QueuedGroup


class TrainerRegistered(Event, frozen=True, kw_only=True, omit_defaults=True, tag="trainer.registered"):
    """A trainer of its own takes the batches of this run, of `batch_size` sequences each.

    The other settings are passed on to environments, and to whoever tracks the run. `owner` is whose key registered it,
    which takes the batches: its name, or `bombus.hive.shares.ADMIN`.
    """

    run: int
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


class BatchesBegun(Event, frozen=True, kw_only=True, omit_defaults=True, tag="batches.begun"):
    """The trainer has asked for its first batch: environments can join from now on."""

    run: int


class EnvironmentJoined(Event, frozen=True, kw_only=True, omit_defaults=True, tag="environment.joined"):
    """An environment sends groups. One that fell silent and is heard from again joins under the same number.

    `minimum` is the part of each batch that it asks for, and `owner` the name of its client's key. `admin`: it is the
    hive's own.
    """

    environment: int
    desired_name: str
    name: str
    max_tokens: int
    weight: float
    group_size: int
    minimum: float | None = None
    owner: str = ""
    admin: bool = False


class EnvironmentLeft(Event, frozen=True, kw_only=True, omit_defaults=True, tag="environment.left"):
    """An environment has left. Its groups stay."""

    environment: int
    reason: EnvironmentEnd


class GroupsPushed(Event, frozen=True, kw_only=True, omit_defaults=True, tag="groups.pushed"):
    """Rollout groups wait for a batch, in this order after all that were pushed before.

    Their bodies are in the stream `trajectories`. A push of the same `key` soon after is the same one. A group that was
    made of ended `episodes` of this run takes them from the pool, and was queued at this policy `version`.
    """

    groups: tuple[QueuedGroup, ...]
    key: str = ""
    episodes: tuple[str, ...] = ()
    version: int = -1  # -1: nobody made it of episodes, or an older release did


class BatchHandedOut(Event, frozen=True, kw_only=True, omit_defaults=True, tag="batch.handed_out"):
    """These groups are the run's batch `number`, from 1. Until it is delivered, whoever asks gets it."""

    run: int
    number: int
    groups: tuple[int, ...]


class BatchDelivered(Event, frozen=True, kw_only=True, omit_defaults=True, tag="batch.delivered"):
    """The whole batch was sent to the trainer that asked for it: the next time it gets another one."""

    run: int
    number: int


class GroupsGivenUp(Event, frozen=True, kw_only=True, omit_defaults=True, tag="groups.given_up"):
    """No batch has these groups any more: their bodies are lost, they have waited too long, or their key kept too much.

    They were in the batch `number` that was handed out, whose other groups are queued again; in that of our own
    trainer's step of this number, which is made without them; or, if it is 0, in the queue.
    """

    run: int
    number: int
    groups: tuple[int, ...]
    why: str


class MovedBody(msgspec.Struct, frozen=True, array_like=True):
    """Where the body of a group is now that is queued, or in the last batch."""

    group: int
    body: BodyRef


class BodiesMoved(Event, frozen=True, kw_only=True, omit_defaults=True, tag="bodies.moved"):
    """The bodies of groups that have waited for long were stored once more, so that what is before them can go."""

    moved: tuple[MovedBody, ...]


class GroupsReset(Event, frozen=True, kw_only=True, omit_defaults=True, tag="groups.reset"):
    """All groups and environments are forgotten."""


class HolderFloor(msgspec.Struct, frozen=True, array_like=True):
    """The sequence of `trajectories` before which nothing of a holder's groups on an engine is needed."""

    engine: str
    holder: str
    below: int


class TrajectoriesReleased(Event, frozen=True, kw_only=True, omit_defaults=True, tag="trajectories.released"):
    """The messages of `trajectories` before `below` may be purged, and those of some holders before their own floors.

    A group whose body is older is refused.
    """

    below: int
    holders: tuple[HolderFloor, ...] = ()


GroupEvent = (
    TrainerRegistered
    | BatchesBegun
    | EnvironmentJoined
    | EnvironmentLeft
    | GroupsPushed
    | BatchHandedOut
    | BatchDelivered
    | GroupsGivenUp
    | BodiesMoved
    | GroupsReset
    | TrajectoriesReleased
)
