"""Which group of the tail each kind of event belongs to; their words are in `bombus.hive.describe`."""

from enum import StrEnum

from bombus.hive import events as ev
from bombus.hive.events import Event


class Group(StrEnum):
    """What the tail can be filtered by. `TROUBLE` cuts across the others."""

    ALL = "all"
    ENGINE = "engine"
    EPISODES = "episodes"
    CALLS = "calls"
    BATCHES = "batches"
    TRAINING = "training"
    WEIGHTS = "weights"
    TROUBLE = "trouble"


GROUPS: dict[type[Event], Group] = {
    ev.EpochOpened: Group.ENGINE,
    ev.EngineConfigured: Group.ENGINE,
    ev.EngineStarted: Group.ENGINE,
    ev.EngineProgressed: Group.ENGINE,
    ev.EngineBooted: Group.ENGINE,
    ev.EngineStopped: Group.ENGINE,
    ev.EngineFailed: Group.ENGINE,
    ev.RollingStarted: Group.ENGINE,
    ev.RollingClosed: Group.ENGINE,
    ev.SyncingStarted: Group.ENGINE,
    ev.SyncAgreed: Group.ENGINE,
    ev.EpisodeClaimed: Group.EPISODES,
    ev.EpisodeEnded: Group.EPISODES,
    ev.EpisodeAborted: Group.EPISODES,
    ev.CallsNoted: Group.CALLS,
    ev.GroupDropped: Group.BATCHES,
    ev.PoolCleared: Group.BATCHES,
    ev.BatchReady: Group.BATCHES,
    ev.TrainerOpened: Group.TRAINING,
    ev.StepCompleted: Group.TRAINING,
    ev.StepFailed: Group.TRAINING,
    ev.WeightsReady: Group.WEIGHTS,
    ev.WeightsLoaded: Group.WEIGHTS,
    ev.ReplicaJoined: Group.WEIGHTS,
    ev.ReplicaLeft: Group.WEIGHTS,
    ev.StorageFilled: Group.ENGINE,
    ev.StorageFreed: Group.ENGINE,
}

TROUBLE: frozenset[type[Event]] = frozenset(
    {
        ev.EngineFailed,
        ev.EpisodeAborted,
        ev.GroupDropped,
        ev.PoolCleared,
        ev.StepFailed,
        ev.ReplicaLeft,
        ev.StorageFilled,
    }
)


def tone_of(event: Event) -> Group:
    """The group by which an event's line is coloured."""
    return Group.TROUBLE if type(event) in TROUBLE else GROUPS[type(event)]
