"""Invariants of rollout groups that every log must satisfy (R16), checked for each event before it is folded."""

from bombus.hive import events as ev
from bombus.hive.state import EngineState, Hive
from bombus.hive.trajectories.state import HandedOut


def why_out_of_order(hive: Hive, event: ev.Event) -> str:
    """Return why no coordinator could have written this event after the events folded into `hive`, or "" if one could
    have."""
    engine = hive.engine(event.engine)
    match event:
        case ev.BatchHandedOut():
            return _handed_out(engine, event)
        case ev.BatchDelivered():
            if _waiting(engine, event.run, event.number) is None:
                return f"batch {event.number} of run {event.run} is delivered, but was not handed out"
            return ""
        case ev.BatchReady():
            gone = next((number for number in event.taken if number not in engine.trajectories.queue.groups), 0)
            return f"step {event.step} takes group {gone}, which is not queued" if gone else ""
        case ev.GroupsPushed():
            away = next((episode for episode in event.episodes if episode not in engine.pool), "")
            return f"a group was made of {away}, which is not in the pool" if away else ""
        case ev.GroupsGivenUp():
            return _given_up(engine, event)
        case _:
            return ""


def _waiting(engine: EngineState, run: int, number: int) -> HandedOut | None:
    """Return the batch with this number if it has been handed out and not yet delivered."""
    batch = engine.trajectories.batch
    return batch if batch and not batch.delivered and (batch.run, batch.number) == (run, number) else None


def _handed_out(engine: EngineState, event: ev.BatchHandedOut) -> str:
    state = engine.trajectories
    if event.number != state.batches + 1:
        return f"batch {event.number} of run {event.run} follows batch {state.batches}"
    if state.batch is not None and not state.batch.delivered:
        return f"batch {event.number} is handed out before batch {state.batch.number} is delivered"
    gone = next((number for number in event.groups if number not in state.queue.groups), 0)
    if gone:
        return f"batch {event.number} has group {gone}, which is not queued"
    sequences = sum(state.queue.groups[number].sequences for number in set(event.groups))
    if sequences != state.queue.batch_size:
        return f"batch {event.number} has {sequences} sequences instead of {state.queue.batch_size}"
    return ""


def _given_up(engine: EngineState, event: ev.GroupsGivenUp) -> str:
    handed = _waiting(engine, event.run, event.number)
    known = set(engine.trajectories.queue.groups) if not event.number else set[int]()
    if handed is not None:
        known = set(handed.numbers)
    elif event.number and engine.batch is not None and engine.batch.step == event.number:
        known = set(engine.batch.taken)
    gone = next((number for number in event.groups if number not in known), 0)
    return f"group {gone} is given up, but is not in that batch or the queue" if gone else ""
