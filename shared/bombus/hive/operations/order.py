"""Invariants of training operations that every log must satisfy (R17), checked for each event before it is folded."""

from bombus.hive import events as ev
from bombus.hive.operations.state import END_MODEL, ClientModel
from bombus.hive.state import EngineState, Hive


def why_out_of_order(hive: Hive, event: ev.Event) -> str:
    """Return why no coordinator could have written this event after the events folded into `hive`, or "" if one could
    have."""
    engine = hive.engine(event.engine)
    match event:
        case ev.OperationAccepted():
            return _accepted(engine.clients.models.get(event.model), event)
        case ev.OperationCompleted():
            return _completed(engine.clients.models.get(event.model), event)
        case ev.ModelCheckpointed():
            return _checkpointed(engine.clients.models.get(event.model), event)
        case ev.EpisodesTaken():
            return _taken(engine, event)
        case _:
            return ""


def _accepted(model: ClientModel | None, event: ev.OperationAccepted) -> str:
    if model is None or model.closed is not None:
        return f"an operation of {event.model} is accepted, but there is no such model"
    if event.number != model.numbers + 1:
        return f"operation {event.number} of {event.model} follows operation {model.numbers}"
    return f"operation {event.key} of {event.model} is accepted twice" if event.key in model.operations else ""


def _completed(model: ClientModel | None, event: ev.OperationCompleted) -> str:
    queued = None if model is None else model.operations.get(event.key)
    if model is None or queued is None or queued.number != event.number:
        return f"operation {event.number} of {event.model} is completed, but was not accepted"
    if not queued.waits:
        return f"operation {event.number} of {event.model} is completed twice"
    if model.suspended and event.op == END_MODEL:  # executed although earlier operations are still waiting
        return ""
    ahead = [each.number for each in model.operations.values() if each.waits and each.number < event.number]
    return f"operation {event.number} of {event.model} is completed before {ahead[0]}" if ahead else ""


def _checkpointed(model: ClientModel | None, event: ev.ModelCheckpointed) -> str:
    if model is None or not model.checkpointed < event.number <= model.numbers:
        return f"a recovery checkpoint of {event.model} covers operation {event.number}, which is out of range"
    waits = any(each.waits and each.number <= event.number for each in model.operations.values())
    return f"a recovery checkpoint of {event.model} covers operation {event.number}, which is waiting" if waits else ""


def _taken(engine: EngineState, event: ev.EpisodesTaken) -> str:
    gone = next((episode for episode in event.episodes if episode not in engine.pool), "")
    return f"{event.client} takes {gone}, which is not in the pool" if gone else ""
