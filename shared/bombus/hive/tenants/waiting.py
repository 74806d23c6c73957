"""Why an operation waits, in words: all that its client sees of the queue."""

from bombus.hive.state import EngineState, Phase
from bombus.hive.status.detail import detail_of


def why_waiting(engine: EngineState, operation: str, now_ns: int) -> str:
    """Return what an operation waits for, "" for one that does not wait or is not known."""
    model = engine.tenants.models.get(operation.rpartition(":")[0])
    queued = engine.tenants.operation(operation)
    if model is None or queued is None or not queued.waits:
        return ""
    ahead = sum(each.waits and each.number < queued.number for each in model.operations.values())
    others = sum(
        each.waits and each.arrival < queued.arrival
        for other in engine.tenants.open_models
        if other is not model and other.waiting
        for each in other.operations.values()
    )
    parts = [
        _trouble(engine, now_ns),
        f"the model cannot go on: {model.suspended}" if model.suspended else "",
        f"{_operations(ahead)} of this model before it" if ahead else "",
        f"{_operations(others)} of other models that came earlier" if others else "",
    ]
    return "; ".join(filter(None, parts)) or "it is being executed"


def _trouble(engine: EngineState, now_ns: int) -> str:
    """Return why nothing is executed now, "" when something is."""
    if engine.phase != Phase.ROLLING:
        return f"the engine is booting: {detail_of(engine, now_ns)}"
    if engine.suspended or engine.stalled is not None:
        return detail_of(engine, now_ns)
    return ""


def _operations(number: int) -> str:
    return "1 operation" if number == 1 else f"{number} operations"
