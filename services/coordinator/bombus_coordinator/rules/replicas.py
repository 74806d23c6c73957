"""Handle replicas' reports, and let a run continue without the replicas that cannot load its weights."""

from collections.abc import Iterator

from bombus.hive import events as ev
from bombus.hive.inbox import AnswersBroke, LoadBroke, ReplicaAlive, ReplicaLeaves, WeightsLoadedFact
from bombus.hive.loading import loading_since_ns
from bombus.hive.state import EngineState, Phase, Replica
from bombus_coordinator.rules.decision import Decision, Decisions
from bombus_coordinator.rules.engines import REASON_CHARS_MAX, suspend
from bombus_coordinator.rules.live import REPLICA_LAPSE_S, Live, ns

REASONS_MAX = 3  # maximum number of quarantined replicas named in the reason for a suspension


def replica_alive(engine: EngineState, live: Live, message: ReplicaAlive) -> Decisions:
    live.replica_seen[engine.name, message.replica] = live.now_ns
    joined = engine.replicas.get(message.replica)
    if joined is None or joined.url != message.url or _has_lost(engine, joined, message):
        event = ev.ReplicaJoined(
            at_ns=live.now_ns, engine=engine.name, replica=message.replica, url=message.url, capacity=message.capacity
        )
        yield Decision(events=(event,))
    if message.version >= 0:
        yield from weights_loaded(engine, live, message)


def _has_lost(engine: EngineState, replica: Replica, message: ReplicaAlive) -> bool:
    """Return whether a replica was restarted and so no longer serves the weights that calls expect from it.

    Replicas in quarantine get no calls, and no replica gets any while the engine is offline. But a restart is also
    reported for a replica that was quarantined for its answers, since it may now answer correctly.
    """
    if message.version >= 0 or engine.phase == Phase.OFFLINE:
        return False
    if replica.quarantined is not None and replica.quarantined.answers:
        return True
    is_older = engine.collection.max_staleness > 0 and replica.run == engine.run and replica.version >= 0
    return message.replica in engine.loaded or (is_older and replica.quarantined is None)


def _is_new(engine: EngineState, message: WeightsLoadedFact | ReplicaAlive) -> bool:
    """Return whether a replica now serves the newest weights or, in an asynchronous run, newer weights than before."""
    replica = engine.replicas.get(message.replica)
    if replica is None or message.run != engine.run or _answers_wrongly(replica, message.version):
        return False
    if message.version == engine.version:
        return message.replica not in engine.loaded
    before = replica.version if replica.run == engine.run else -1
    return engine.collection.max_staleness > 0 and before < message.version < engine.version


def _answers_wrongly(replica: Replica, version: int) -> bool:
    """Return whether a replica is in quarantine for its answers at a version."""
    found = replica.quarantined
    return found is not None and found.answers and found.version >= version


def weights_loaded(engine: EngineState, live: Live, message: WeightsLoadedFact | ReplicaAlive) -> Decisions:
    if _is_new(engine, message):
        loaded = ev.WeightsLoaded(
            **live.at(engine),
            version=message.version,
            replica=message.replica,
            sequence_tokens=message.sequence_tokens,
            constrains=message.constrains,
            canary=message.canary,
        )
        yield Decision(events=(loaded,))


def _leave(engine: EngineState, live: Live, replica: str, reason: str) -> Decision:
    live.replica_seen.pop((engine.name, replica), None)
    return Decision(events=(ev.ReplicaLeft(at_ns=live.now_ns, engine=engine.name, replica=replica, reason=reason),))


def replica_leaves(engine: EngineState, live: Live, message: ReplicaLeaves) -> Decisions:
    if message.replica in engine.replicas:
        yield _leave(engine, live, message.replica, "stopped")


def lapse_replicas(engine: EngineState, live: Live) -> Decisions:
    for name, replica in list(engine.replicas.items()):
        seen = live.replica_seen.get((engine.name, name), live.silent_since(replica.joined_ns))
        if seen + ns(REPLICA_LAPSE_S) <= live.now_ns:
            yield _leave(engine, live, name, f"not heard from for {REPLICA_LAPSE_S:.0f} s")


# ---- quarantine -----------------------------------------------------------------------------------------------


def load_broke(engine: EngineState, live: Live, message: LoadBroke) -> Decisions:
    """Quarantine a replica that cannot load the newest weights. Reports about older weights are ignored as out of
    date."""
    newest = (message.run, message.version) == (engine.run, engine.version)
    if newest and engine.phase != Phase.OFFLINE and message.replica not in engine.loaded:
        yield from _quarantine(engine, live, message.replica, message.reason)


def answers_broke(engine: EngineState, live: Live, message: AnswersBroke) -> Decisions:
    """Quarantine a replica whose answers are wrong. Gateways' reports about earlier versions are ignored as out of
    date."""
    newest = (message.run, message.version) == (engine.run, engine.version)
    if newest and engine.phase != Phase.OFFLINE and message.replica in engine.usable:
        yield from _quarantine(engine, live, message.replica, message.reason, answers=True)


def look_after(engine: EngineState, live: Live) -> Decisions:
    """Quarantine late replicas, suspend a run that has no others, and resume the run once a replica serves it (R15)."""
    if engine.phase == Phase.OFFLINE or engine.weights is None:
        return
    if engine.suspended:
        if engine.until_served and engine.loaded:
            resumed = ev.EngineResumed(**live.at(engine))
            yield Decision(events=(resumed,))
        return
    if len(engine.loaded) >= len(engine.replicas):  # the usual case; this runs for every message
        return
    for name in list(_late(engine, live)):
        yield from _quarantine(engine, live, name, f"not loaded within {engine.collection.sync_s:.0f} s")
    if not engine.serves_operations and _none_is_left(engine, live):
        yield from suspend(engine, live, _why_none_is_left(engine), until_served=True)


def _quarantine(engine: EngineState, live: Live, name: str, reason: str, answers: bool = False) -> Decisions:
    replica = engine.replicas.get(name)
    if replica is None:
        return
    before, reason = replica.quarantined, reason[:REASON_CHARS_MAX]
    if before is not None and (before.version, before.reason) == (engine.version, reason):
        return
    quarantined = ev.ReplicaQuarantined(
        **live.at(engine), version=engine.version, replica=name, reason=reason, answers=answers
    )
    yield Decision(events=(quarantined,))


def _late(engine: EngineState, live: Live) -> Iterator[str]:
    """Yield the replicas that have not loaded the newest weights in time. During boot, no replica counts as late until
    another has loaded them."""
    assert engine.weights is not None
    if engine.phase == Phase.BOOTING and not engine.loaded:
        return
    for name, replica in engine.usable.items():
        if name not in engine.loaded and _sync_is_over(engine, live, loading_since_ns(engine, replica)):
            yield name


def _sync_is_over(engine: EngineState, live: Live, since_ns: int) -> bool:
    return live.is_over(since_ns, engine.collection.sync_s)


def _none_is_left(engine: EngineState, live: Live) -> bool:
    """Return whether every replica is quarantined. A replica that failed at an older version may still load the
    newest."""
    assert engine.weights is not None
    if engine.loaded or engine.usable:
        return False
    has_failed = all(_version(replica) == engine.version for replica in engine.replicas.values())
    return has_failed or _sync_is_over(engine, live, engine.weights.at_ns)


def _version(replica: Replica) -> int:
    """Return the version for which a replica is quarantined, or -1 if it is not quarantined."""
    return -1 if replica.quarantined is None else replica.quarantined.version


def _why_none_is_left(engine: EngineState) -> str:
    reasons = [
        f"{name}: {replica.quarantined.reason}"
        for name, replica in sorted(engine.replicas.items())
        if replica.quarantined is not None
    ]
    more = f"; and {len(reasons) - REASONS_MAX} more" if len(reasons) > REASONS_MAX else ""
    return f"no replica can serve version {engine.version}. {'; '.join(reasons[:REASONS_MAX])}{more}"
