"""The group of each kind of event, by which the tail is filtered. `bombus.hive.describe` has their texts."""

from enum import StrEnum

from bombus.hive import events as ev
from bombus.hive.events import Event


class EventGroup(StrEnum):
    """A group of events that the tail can show alone. `TROUBLE` overlaps with the others."""

    ALL = "all"
    ENGINE = "engine"
    EPISODES = "episodes"
    CALLS = "calls"
    BATCHES = "batches"
    TRAINING = "training"
    WEIGHTS = "weights"
    TROUBLE = "trouble"


GROUPS: dict[type[Event], EventGroup] = {
    ev.EpochOpened: EventGroup.ENGINE,
    ev.LeadingPaused: EventGroup.ENGINE,
    ev.EngineConfigured: EventGroup.ENGINE,
    ev.EngineStarted: EventGroup.ENGINE,
    ev.EngineProgressed: EventGroup.ENGINE,
    ev.EngineBooted: EventGroup.ENGINE,
    ev.EngineStopped: EventGroup.ENGINE,
    ev.EngineFailed: EventGroup.ENGINE,
    ev.EngineSuspended: EventGroup.ENGINE,
    ev.EngineResumed: EventGroup.ENGINE,
    ev.CommandAnswered: EventGroup.ENGINE,
    ev.ModelRead: EventGroup.ENGINE,
    ev.RollingStarted: EventGroup.ENGINE,
    ev.RollingClosed: EventGroup.ENGINE,
    ev.SyncingStarted: EventGroup.ENGINE,
    ev.SyncAgreed: EventGroup.ENGINE,
    ev.EpisodeClaimed: EventGroup.EPISODES,
    ev.EpisodeEnded: EventGroup.EPISODES,
    ev.EpisodeAborted: EventGroup.EPISODES,
    ev.CallsNoted: EventGroup.CALLS,
    ev.GroupDropped: EventGroup.BATCHES,
    ev.EpisodesTaken: EventGroup.BATCHES,
    ev.PoolCleared: EventGroup.BATCHES,
    ev.BatchReady: EventGroup.BATCHES,
    ev.TrainerOpened: EventGroup.TRAINING,
    ev.TrainerStalled: EventGroup.TRAINING,
    ev.StepCompleted: EventGroup.TRAINING,
    ev.StepFailed: EventGroup.TRAINING,
    ev.WeightsReady: EventGroup.WEIGHTS,
    ev.WeightsLoaded: EventGroup.WEIGHTS,
    ev.ReplicaJoined: EventGroup.WEIGHTS,
    ev.ReplicaLeft: EventGroup.WEIGHTS,
    ev.ReplicaQuarantined: EventGroup.WEIGHTS,
    ev.SessionOpened: EventGroup.ENGINE,
    ev.SessionEnded: EventGroup.ENGINE,
    ev.SessionForgotten: EventGroup.ENGINE,
    ev.SamplingBegun: EventGroup.ENGINE,
    ev.ModelOpened: EventGroup.TRAINING,
    ev.ModelClosed: EventGroup.TRAINING,
    ev.OperationAccepted: EventGroup.TRAINING,
    ev.OperationCompleted: EventGroup.TRAINING,
    ev.ModelCovered: EventGroup.TRAINING,
    ev.ModelSuspended: EventGroup.TRAINING,
    ev.ModelRemaking: EventGroup.TRAINING,
    ev.OperationBegun: EventGroup.TRAINING,
    ev.WeightsKept: EventGroup.WEIGHTS,
    ev.WeightsRemoved: EventGroup.WEIGHTS,
    ev.EndpointAdded: EventGroup.WEIGHTS,
    ev.EndpointRemoved: EventGroup.WEIGHTS,
    ev.RestAsked: EventGroup.TRAINING,
    ev.RestReached: EventGroup.TRAINING,
    ev.OperationsReleased: EventGroup.ENGINE,
    ev.TrainerRegistered: EventGroup.TRAINING,
    ev.BatchesBegun: EventGroup.TRAINING,
    ev.EnvironmentJoined: EventGroup.ENGINE,
    ev.EnvironmentLeft: EventGroup.ENGINE,
    ev.GroupsPushed: EventGroup.EPISODES,
    ev.BatchHandedOut: EventGroup.BATCHES,
    ev.BatchDelivered: EventGroup.BATCHES,
    ev.GroupsReset: EventGroup.BATCHES,
    ev.GroupsGivenUp: EventGroup.BATCHES,
    ev.BodiesMoved: EventGroup.ENGINE,
    ev.TrajectoriesReleased: EventGroup.ENGINE,
    ev.StorageFilled: EventGroup.ENGINE,
    ev.StorageFreed: EventGroup.ENGINE,
    ev.MessageSetAside: EventGroup.ENGINE,
    ev.LogCompacted: EventGroup.ENGINE,
    ev.CompactionFailed: EventGroup.ENGINE,
    ev.StreamWentBack: EventGroup.ENGINE,
}

TROUBLE: frozenset[type[Event]] = frozenset(
    {
        ev.EngineFailed,
        ev.EngineSuspended,
        ev.EpisodeAborted,
        ev.GroupDropped,
        ev.GroupsGivenUp,
        ev.PoolCleared,
        ev.TrainerStalled,
        ev.StepFailed,
        ev.ReplicaLeft,
        ev.ReplicaQuarantined,
        ev.StorageFilled,
        ev.MessageSetAside,
        ev.CompactionFailed,
        ev.StreamWentBack,
    }
)


def tone_of(event: Event) -> EventGroup:
    """Return the group that gives an event's line its colour."""
    return EventGroup.TROUBLE if type(event) in TROUBLE else GROUPS[type(event)]
