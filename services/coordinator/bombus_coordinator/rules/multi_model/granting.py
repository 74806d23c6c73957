"""Choose the next multi-model claim, and grant it (R13).

A multi-model claim reserves room in its engines only while lack of room is the sole reason why it is not granted.
Multi-model claims are totally ordered, and an engine reserves room for at most one of them, so no two ever wait for
each other.
"""

from collections.abc import Mapping
from typing import NamedTuple

from bombus.hive import events as ev
from bombus.hive.inbox import Claim, EngineGrant, MultiModelGranted
from bombus.hive.pacing import served
from bombus.hive.state import EngineState, Hive, episode_id
from bombus_coordinator.rules.decision import CommandReply, Decision
from bombus_coordinator.rules.live import Live
from bombus_coordinator.rules.waiting import Place, Waiting, has_room, next_of

NO_PARTNERS: Mapping[str, tuple[str, ...]] = {}


class DueClaim(NamedTuple):
    """A waiting multi-model claim, with its engines."""

    waiting: Waiting
    place: Place
    engines: tuple[EngineState, ...]

    @property
    def has_room(self) -> bool:
        return all(has_room(engine, self.waiting.claim) for engine in self.engines)


def next_multi_model(hive: Hive, live: Live, engine: EngineState) -> DueClaim | None:
    """Return the multi-model claim that an engine reserves room for, or None if there is none.

    The claim must be the first multi-model claim of each of its engines, and no single claim may precede it on any of
    them.
    """
    if not live.multi_model:
        return None
    first = _first_ready(hive, live, engine)
    if first is None or not all(_is_next(hive, live, each, first) for each in first.engines):
        return None
    return first


def _first_ready(hive: Hive, live: Live, engine: EngineState) -> DueClaim | None:
    """Return the first of an engine's multi-model claims that does not have to wait for training on any of the claim's
    engines."""
    found: DueClaim | None = None
    for names, queue in live.multi_model.items():
        if engine.name not in names:
            continue
        engines = tuple(map(hive.engine, names))
        if not all(each.granting and each.plays_episodes and not each.queues_groups for each in engines):
            continue
        waiting = next_of(queue, engines)
        if waiting is not None and (found is None or queue.place_of(waiting) < found.place):
            found = DueClaim(waiting, queue.place_of(waiting), engines)
    return found


def _is_next(hive: Hive, live: Live, engine: EngineState, due: DueClaim) -> bool:
    """Return whether a multi-model claim precedes all others on an engine, including single claims."""
    first = _first_ready(hive, live, engine)
    if first is None or first.waiting is not due.waiting:
        return False
    queue = live.queue(engine)
    single = next_of(queue, (engine,))
    return single is None or queue.place_of(due.waiting) < queue.place_of(single)


def episodes_claimed(
    engine: EngineState,
    live: Live,
    claim: Claim,
    sampler: ev.SamplerWeights | None = None,
    partners: Mapping[str, tuple[str, ...]] = NO_PARTNERS,
) -> ev.EpisodeClaimed:
    """Return the event that grants a claim on one engine."""
    version = served(engine)
    return ev.EpisodeClaimed(
        at_ns=live.now_ns,
        engine=engine.name,
        run=engine.run,
        claim=claim.claim,
        client=claim.client,
        episodes=next_episodes(engine, claim.count),
        type=claim.type,
        discard_timeout_s=claim.discard_timeout_s,
        version=max(engine.version, 0) if version is None else version,  # if None, its calls will wait for a replica
        task_hint=claim.task_hint,
        owner=claim.owner,
        admin=claim.admin,
        sampler=sampler,
        partners=dict(partners),
        touches=claim.touches,
    )


def next_episodes(engine: EngineState, count: int) -> tuple[str, ...]:
    """Return the ids of the next episodes that an engine will hand out."""
    return tuple(episode_id(engine.name, engine.run, engine.next_episode + index) for index in range(count))


def granted_multi_model(due: DueClaim, live: Live) -> Decision:
    """Remove a multi-model claim from its queue, and grant it with one event for each engine; the events are stored all
    or nothing."""
    waiting, claim = due.waiting, due.waiting.claim
    names = tuple(engine.name for engine in due.engines)
    live.multi_model[names].remove(waiting)
    if not live.multi_model[names]:
        del live.multi_model[names]
    ids = {engine.name: next_episodes(engine, claim.count) for engine in due.engines}
    events = tuple(
        episodes_claimed(
            engine, live, claim, partners={name: given for name, given in ids.items() if name != engine.name}
        )
        for engine in due.engines
    )
    live.remember_grant(claim.claim, due.engines[0])
    granted = MultiModelGranted(
        grants=tuple(
            EngineGrant(engine=event.engine, run=event.run, episodes=event.episodes, version=event.version)
            for event in events
        ),
        claimed_ns=live.now_ns,
        discard_timeout_s=claim.discard_timeout_s,
    )
    return Decision(events=events, replies=tuple(CommandReply(command, granted) for command in waiting.commands))
