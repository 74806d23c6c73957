"""The replicas that a run waits for until they serve its newest weights, and how long it waits for them (R15)."""

from bombus.hive.state import EngineState, Replica


def awaited(engine: EngineState) -> list[str]:
    """Return the replicas that the run is still waiting for.

    The run waits for the replicas that had joined when the weights were ready, except those in quarantine.
    """
    weights = engine.weights
    if weights is None:
        return []
    return [
        name
        for name, replica in engine.usable.items()
        if name not in engine.loaded and replica.joined_ns <= weights.at_ns
    ]


def all_loaded(engine: EngineState) -> bool:
    """Return whether at least one replica, and every one that the run waits for, serves the newest weights."""
    return bool(engine.loaded) and engine.weights is not None and not awaited(engine)


def loading_since_ns(engine: EngineState, replica: Replica) -> int:
    """Return the time from which a replica could have loaded the newest weights. From then on, the replica has `sync_s`
    to load them."""
    ready_ns = 0 if engine.weights is None else engine.weights.at_ns
    return max(ready_ns, engine.phase_since_ns, replica.joined_ns)
