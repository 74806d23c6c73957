"""Purge calls: the leader removes, for each engine, those that can no longer be needed (R12).

Why nothing is purged that is needed later: a call is stored before it is noted, and an episode's key exists only once
its claim is on the log. So all calls of an episode come after every call that was noted before its claim, including
calls that are not reported yet and parents that its outcome does not list. That bound is the episode's `calls_from`,
which it keeps in the pool and in its step. The calls of later claims come after `newest_call`. A floor therefore holds
for every log that begins with this one: a leader that is deposed and does not know it removes nothing that its
successor needs, as long as the state that it purges by is on the log.

After a power cut on one replica the stream may end earlier and reuse sequences (R6). For this reason `newest_call` is
the call noted last, not the greatest; a call before its episode's bound lowers the bound; and a floor beyond the
stream's end purges nothing. New calls could still be purged while the stream has grown beyond an earlier floor and none
of them is noted yet. Their episodes would fail like those whose calls the power cut removed.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from math import ceil

import msgspec

from bombus.bus import Bus, ServerRefused
from bombus.errors import BusUnavailable
from bombus.hive.state import EngineState, Hive

log = logging.getLogger(__name__)

PERIOD_S = 10.0
FILL_FOR_REPLAY = 0.5  # of the stream: above it, calls kept only for replay are purged
SHARE_MIN = 0.125  # of these calls at once, so that the stream is not above this mark again soon


class Floor(msgspec.Struct, frozen=True):
    """Sequences of an engine's calls: those before `needed` are not trained, those before `kept` not even replayed."""

    kept: int
    needed: int


def floor(engine: EngineState) -> Floor:
    """Return the floor of this state and of every state that may follow it."""
    before = sum(step.batch.step < engine.begun for step in engine.steps)  # of the run before, from which it goes on
    made = min(engine.steps_needed, engine.step - engine.begun + before)  # other steps are kept for replay alone
    held = [engine.newest_call, *engine.steps_from[len(engine.steps_from) - made :]]
    held += [episode.calls_from for episode in engine.open.values()]
    held += [completed.calls_from for completed in engine.pool.values()]
    needed = min(held)
    if len(engine.steps_from) < engine.collection.replay_steps:
        return Floor(kept=0, needed=needed)  # the window reaches back to the engine's first call
    return Floor(kept=min([needed, *engine.steps_from]), needed=needed)


def floors_of(hive: Hive) -> dict[str, Floor]:
    """Return the floor of every engine that may have calls: one that has none yet must not hold up the others."""
    return {name: floor(engine) for name, engine in hive.engines.items() if engine.newest_call or engine.open}


async def run(bus: Bus, hive: Callable[[], Hive], stored: Callable[[], int], period_s: float = PERIOD_S) -> None:
    """Purge periodically until cancelled.

    `hive` may be ahead of the log. Its floors are used a period later, and only if `stored`, the inbox position up to
    which everything is decided and on the log, has increased: then the append that was in flight is stored.
    """
    purge = Purge(bus)
    while True:
        floors = floors_of(hive())
        position = stored()
        await asyncio.sleep(period_s)
        if stored() == position:
            continue
        try:
            await purge.below(floors)
        except (BusUnavailable, ServerRefused) as error:
            log.warning("the log of calls could not be trimmed: %s", error)


class Purge:
    """Purges calls, and remembers up to where each engine's calls are purged."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._purged: dict[str, int] = {}

    async def below(self, floors: Mapping[str, Floor]) -> None:
        """Purge what is not kept and, while the stream is overfull, the oldest part of what is kept only for replay."""
        if not floors:
            return
        stream = self._bus.subjects.calls_stream
        state = await self._bus.state(stream)
        overfull = state.fill > FILL_FOR_REPLAY
        share = max(SHARE_MIN, 1 - FILL_FOR_REPLAY / state.fill) if overfull else 0.0
        purged = {name: max(self._purged.get(name, 0), state.first_seq) for name in floors}
        targets = {name: _target(floor, purged[name], share, state.last_seq) for name, floor in floors.items()}
        least = min(targets.values())
        if least > state.first_seq:
            await self._bus.purge_below(stream, least)
        self._purged = {name: max(least, position) for name, position in purged.items()}
        if not overfull:
            return
        # Engines share the stream. Purging the calls of one engine costs the server a search: only do it when needed.
        for name, target in targets.items():
            if target > self._purged[name]:
                await self._bus.purge_below(stream, target, self._bus.subjects.calls_of(name))
                self._purged[name] = target


def _target(floor: Floor, purged: int, share: float, last: int) -> int:
    """Return the sequence below which to purge, including `share` of the calls kept only for replay."""
    if floor.needed > last:
        return 0  # the stream has lost its end: what is there now may be new
    return max(floor.kept, purged + ceil(share * max(0, floor.needed - purged)))
