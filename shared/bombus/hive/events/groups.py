"""The events of rollout groups: environments push groups, and trainers take batches of them."""

import msgspec

from bombus.hive.events.common import EnvironmentEnd, Event
from bombus.hive.records import BodyRef
from bombus.hive.trajectories.queue import QueuedGroup


class TrainerRegistered(Event, frozen=True, kw_only=True, omit_defaults=True, tag="trainer.registered"):
    """An outside trainer has registered for this run's batches, of `batch_size` sequences each.

    The other settings are passed on to environments and to trackers of the run. `owner` is the name of the key with
    which the trainer registered (or `bombus.hive.shares.ADMIN`); clients with that key receive the batches.
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
    """The trainer has requested its first batch: environments can join from now on."""

    run: int


class EnvironmentJoined(Event, frozen=True, kw_only=True, omit_defaults=True, tag="environment.joined"):
    """An environment has joined in order to push groups. If it falls silent and returns, it joins under the same
    number.

    `minimum` is the fraction of each batch that the environment requests, and `owner` the name of its client's key.
    `admin` says whether that key is the hive's admin key.
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
    """An environment has left. Its groups stay in the queue."""

    environment: int
    reason: EnvironmentEnd


class GroupsPushed(Event, frozen=True, kw_only=True, omit_defaults=True, tag="groups.pushed"):
    """Rollout groups were pushed. They wait for a batch, in this order, after all groups pushed earlier.

    The groups' bodies are in the stream `trajectories`. A later push with the same `key` is a duplicate. If a group was
    made from ended `episodes` of this run, these episodes leave the pool, and `version` is the policy version when the
    group was queued.
    """

    groups: tuple[QueuedGroup, ...]
    key: str = ""
    episodes: tuple[str, ...] = ()
    version: int = -1  # -1 if the group was not made from episodes, or by an older release


class BatchHandedOut(Event, frozen=True, kw_only=True, omit_defaults=True, tag="batch.handed_out"):
    """These groups form the run's batch `number`, counted from 1. Until the batch is delivered, every request returns
    it."""

    run: int
    number: int
    groups: tuple[int, ...]


class BatchDelivered(Event, frozen=True, kw_only=True, omit_defaults=True, tag="batch.delivered"):
    """The whole batch was sent to the trainer that requested it. That trainer's next request gets the next batch."""

    run: int
    number: int


class GroupsGivenUp(Event, frozen=True, kw_only=True, omit_defaults=True, tag="groups.given_up"):
    """Groups were dropped because their bodies are lost, they waited too long, or their key stored too much.

    If `number` is 0, the groups were in the queue. Otherwise `number` identifies the batch that contained them: either
    a batch that was handed out, whose other groups are queued again, or the batch of that step of our own trainer,
    which is then made without them.
    """

    run: int
    number: int
    groups: tuple[int, ...]
    why: str


class MovedBody(msgspec.Struct, frozen=True, array_like=True):
    """The new place of a group's body. The group is queued or in the last batch."""

    group: int
    body: BodyRef


class BodiesMoved(Event, frozen=True, kw_only=True, omit_defaults=True, tag="bodies.moved"):
    """The bodies of groups that have waited long were stored again, so that the messages before the new copies can be
    purged."""

    moved: tuple[MovedBody, ...]


class GroupsReset(Event, frozen=True, kw_only=True, omit_defaults=True, tag="groups.reset"):
    """All groups and environments were removed."""

    by: str = ""


class HolderFloor(msgspec.Struct, frozen=True, array_like=True):
    """The sequence number in `trajectories` before which none of a holder's bodies on an engine are needed."""

    engine: str
    holder: str
    below: int


class TrajectoriesReleased(Event, frozen=True, kw_only=True, omit_defaults=True, tag="trajectories.released"):
    """The messages of `trajectories` before `below` may be purged; for some holders, so may their messages before a
    later sequence number.

    A group whose body was stored before the sequence number that applies to it is refused.
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
