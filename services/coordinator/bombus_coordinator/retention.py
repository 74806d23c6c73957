"""Which calls may go: the leader purges, for each engine, what nobody can need any more (R12).

Why nothing goes that is needed later: a call is stored before it is noted, and an episode's key exists only once its
claim is on the log. So all calls of an episode lie behind every call that was noted before its claim: also those that
nobody has told of yet, and parents that its outcome does not list. That bound is its `calls_from`, which goes with it
into the pool and into its step; what is claimed later lies behind `newest_call`. A floor is thus one of every log that
begins with this one: a leader that is deposed and does not know it takes nothing from its successor, as long as what
it purges by is on the log.

After a power cut on one replica the stream may end earlier, and sequences come again (R6). So `newest_call` is what was
noted last and not the greatest, a call that lies before its episode's bound lowers it, and a floor beyond the stream's
end purges nothing. New calls could still go while the stream has grown beyond a floor of before and none of them is
noted yet; their episodes would fail as those do whose calls the power cut took.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from math import ceil

import msgspec

from bombus.bus import Bus, ServerRefused
from bombus.errors import BusUnavailable
from bombus.hive.state import STEPS_NEEDED, EngineState, Hive

log = logging.getLogger(__name__)

PERIOD_S = 10.0
FILL_FOR_REPLAY = 0.5  # of the stream: beyond it, calls that only replay wants go
SHARE_MIN = 0.125  # of these at once, so that it is not over this mark again soon


class Floor(msgspec.Struct, frozen=True):
    """Sequences of an engine's calls: nobody trains what lies before `needed`, nor replays what lies before `kept`."""

    kept: int
    needed: int


def floor(engine: EngineState) -> Floor:
    """Of this state, and of every state that may follow it."""
    held = [engine.newest_call, *engine.steps_from[-STEPS_NEEDED:]]
    held += [episode.calls_from for episode in engine.open.values()]
    held += [completed.calls_from for completed in engine.pool.values()]
    needed = min(held)
    if len(engine.steps_from) < engine.collection.replay_steps:
        return Floor(kept=0, needed=needed)  # the window reaches back to the engine's first call
    return Floor(kept=min([needed, *engine.steps_from]), needed=needed)


def floors_of(hive: Hive) -> dict[str, Floor]:
    """Of every engine that may have calls: one that has none yet must not hold up the others."""
    return {name: floor(engine) for name, engine in hive.engines.items() if engine.newest_call or engine.open}


async def run(bus: Bus, hive: Callable[[], Hive], landed: Callable[[], int], period_s: float = PERIOD_S) -> None:
    """Purge from time to time, until cancelled.

    `hive` may be ahead of the log. What it says is used a period later, and only if `landed`, the inbox position up to
    which everything is decided and on the log, has moved on: then the flight that was in the air has landed.
    """
    purge = Purge(bus)
    while True:
        floors = floors_of(hive())
        position = landed()
        await asyncio.sleep(period_s)
        if landed() == position:
            continue
        try:
            await purge.below(floors)
        except (BusUnavailable, ServerRefused) as error:
            log.warning("the log of calls could not be trimmed: %s", error)


class Purge:
    """Remembers how far each engine's calls are gone."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._gone: dict[str, int] = {}

    async def below(self, floors: Mapping[str, Floor]) -> None:
        """Purge what is not kept, and of what is kept for replay alone the oldest part while the stream is overfull."""
        if not floors:
            return
        stream = self._bus.subjects.calls_stream
        state = await self._bus.state(stream)
        overfull = state.fill > FILL_FOR_REPLAY
        share = max(SHARE_MIN, 1 - FILL_FOR_REPLAY / state.fill) if overfull else 0.0
        gone = {name: max(self._gone.get(name, 0), state.first_seq) for name in floors}
        targets = {name: _target(floor, gone[name], share, state.last_seq) for name, floor in floors.items()}
        least = min(targets.values())
        if least > state.first_seq:
            await self._bus.purge_below(stream, least)
        self._gone = {name: max(least, position) for name, position in gone.items()}
        if not overfull:
            return
        # Engines share the stream. To purge one's calls alone costs the server a search, so only when it is worth it.
        for name, target in targets.items():
            if target > self._gone[name]:
                await self._bus.purge_below(stream, target, self._bus.subjects.calls_of(name))
                self._gone[name] = target


def _target(floor: Floor, gone: int, share: float, last: int) -> int:
    """Below which sequence to purge: `share` of what only replay wants goes too."""
    if floor.needed > last:
        return 0  # the stream has lost its end: what is there now may be new
    return max(floor.kept, gone + ceil(share * max(0, floor.needed - gone)))
