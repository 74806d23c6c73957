"""The fold: how an event changes the hive's state. All services fold the same log with this function."""

import msgspec

from bombus.hive import events as ev
from bombus.hive.events import Event
from bombus.hive.fold import clients, engine, episodes, operations
from bombus.hive.fold.episodes import ended_calls
from bombus.hive.pauses import note_pause
from bombus.hive.state import ASIDE_KEPT, EngineState, Hive

_HANDLERS = {**engine.HANDLERS, **episodes.HANDLERS, **clients.HANDLERS}


def evolve(hive: Hive, event: Event) -> None:
    """Fold one event into the state, in place."""
    if event.at_ns > hive.now_ns:
        hive.now_ns = event.at_ns
    if isinstance(event, _OF_THE_HIVE):
        _evolve_hive(hive, event)
        return
    state = hive.engines.get(event.engine)
    if state is None:
        state = hive.engines[event.engine] = EngineState(name=event.engine)
    _HANDLERS[type(event)](state, event)


_OF_THE_HIVE = (
    ev.EpochOpened,
    ev.LeadingPaused,
    ev.StorageFilled,
    ev.StorageFreed,
    ev.MessageDeadLettered,
    ev.OperationsReleased,
    ev.TrajectoriesReleased,
    ev.LogCompacted,
    ev.CompactionFailed,
    ev.StreamWentBack,
)


def _evolve_hive(hive: Hive, event: Event) -> None:
    """Fold an event that belongs to no engine."""
    match event:
        case ev.EpochOpened():
            hive.epoch = event.epoch
            hive.calls_bytes_max = event.calls_bytes_max
            hive.trajectories_bytes_max = event.trajectories_bytes_max
            hive.level = event.level
        case ev.LeadingPaused():
            note_pause(hive.pauses, event.since_ns, event.at_ns)
        case ev.StorageFilled():
            hive.full[event.what] = event
        case ev.StorageFreed():
            hive.full.pop(event.what, None)
        case ev.MessageDeadLettered():
            hive.aside = [*hive.aside[1 - ASIDE_KEPT :], event]
        case ev.OperationsReleased():
            _released(hive, event)
        case ev.TrajectoriesReleased():
            _groups_released(hive, event)
        case ev.LogCompacted() | ev.CompactionFailed():
            hive.uncompacted = event.why if isinstance(event, ev.CompactionFailed) else ""
        case ev.StreamWentBack():
            hive.went_back[event.what] = event


def _released(hive: Hive, event: ev.OperationsReleased) -> None:
    if event.below < hive.released:  # a power cut has removed the end of the stream (R6)
        for each in hive.engines.values():
            each.clients.released = {}
    hive.released = event.below
    for floor in event.models:
        if floor.engine in hive.engines:
            operations.release(hive.engines[floor.engine].clients, floor)


def _groups_released(hive: Hive, event: ev.TrajectoriesReleased) -> None:
    hive.trajectories_released = event.below
    for floor in event.holders:
        if floor.engine in hive.engines:
            hive.engines[floor.engine].trajectories.queue.kept_of(floor.holder).released = floor.below


def as_folded(hive: Hive, event: ev.AnyEvent) -> ev.AnyEvent:
    """Return the event that was folded last. If it is a batch, it includes the calls or rollout groups that the fold
    added."""
    batch = hive.engine(event.engine).batch
    return batch if isinstance(event, ev.BatchReady) and batch is not None else event


def with_calls(hive: Hive, event: ev.EpisodeEnded) -> ev.EpisodeEnded:
    """Return an event that is not folded yet, with the calls of the episodes that it ends."""
    state = hive.engine(event.engine)
    outcomes = (
        msgspec.structs.replace(outcome, calls=ended_calls(outcome, state.open.get(outcome.episode)))
        for outcome in event.outcomes
    )
    return msgspec.structs.replace(event, outcomes=tuple(outcomes))
