"""Purge calls: the leader removes, for each engine and each holder, the calls that can no longer be needed (R12).

Why this never purges anything that is needed later: a call is stored before it is noted, and an episode's key exists
only once the episode's claim is on the log. So all calls of an episode come after every call that was noted before the
claim. This includes calls that are not reported yet, and parents that the episode's outcome does not list. The lower
bound is the episode's `calls_from`, which the episode keeps in the pool and in its step. The calls of later claims come
after `newest_call`. A floor therefore stays valid for every log that begins with this one: a leader that has been
deposed without knowing it removes nothing that its successor needs, as long as the state that it purges by is on the
log.

After a power cut on a single-replica bus, the stream may end earlier and reuse sequences (R6). For this reason
`newest_call` is the call noted last, not the one with the greatest sequence; a call before its episode's bound lowers
the bound; and a floor beyond the stream's end purges nothing. One gap remains: new calls can be purged if the stream
has grown beyond an earlier floor before any of them is noted. Their episodes then fail, like those whose calls were
lost in the power cut.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from itertools import islice
from math import ceil

import msgspec

from bombus.bus import Bus, ServerRefused
from bombus.errors import BusUnavailable
from bombus.hive.state import EngineState, Hive
from bombus.hive.steps import episodes_of

log = logging.getLogger(__name__)

PERIOD_S = 10.0
FILL_FOR_REPLAY = 0.5  # fill above which calls kept only for replay are purged
SHARE_MIN = 0.125  # least share of those calls to purge, so that the stream does not soon refill


NO_HOLDERS: Mapping[tuple[str, str], "Floor"] = {}


class Floor(msgspec.Struct, frozen=True):
    """The bounds for purging an engine's calls: calls before `needed` will not be trained on, and calls before `kept`
    will not even be replayed."""

    kept: int
    needed: int


def floor(engine: EngineState) -> Floor:
    """Return a floor that is valid for this state and for every state that may follow it."""
    before = sum(step.batch.step < engine.begun for step in engine.steps)  # steps of the run that this one continues
    made = min(engine.steps_needed, engine.step - engine.begun + before)  # other steps are kept only for replay
    held = [engine.newest_call, *engine.steps_from[len(engine.steps_from) - made :]]
    held += [episode.calls_from for episode in engine.open.values()]
    held += [completed.calls_from for completed in engine.pool.values()]
    needed = min(held)
    if len(engine.steps_from) < engine.collection.replay_steps:
        return Floor(kept=0, needed=needed)  # the replay window reaches back to the first call
    return Floor(kept=min([needed, *engine.steps_from]), needed=needed)


def floors_of(hive: Hive) -> dict[str, Floor]:
    """Return the floor of every engine that may have calls. Engines without calls are left out, so that they do not
    keep other engines' calls."""
    return {name: floor(engine) for name, engine in hive.engines.items() if engine.newest_call or engine.open}


def floors_of_holders(hive: Hive) -> dict[tuple[str, str], Floor]:
    """Return the floor of each holder's calls on each engine, so that no holder keeps other holders' calls (pins.py).

    An engine state that was written by an earlier release may not say whose calls are needed. Then the engine's floor
    applies to all of its holders.
    """
    return {
        (name, holder): Floor(kept=min(whole.kept, needed), needed=needed)
        for name, engine in hive.engines.items()
        for whole, is_known in [(floor(engine), _knows_pins(engine))]
        for holder, calls in engine.calls.holders.items()
        for needed in [calls.floor(engine.newest_call) if is_known else whole.needed]
    }


def _knows_pins(engine: EngineState) -> bool:
    pinned = {name for calls in engine.calls.holders.values() for name in calls.pins}
    return pinned.issuperset((*engine.open, *engine.pool, *episodes_of(engine.needed_steps)))


async def run(bus: Bus, hive: Callable[[], Hive], stored: Callable[[], int], period_s: float = PERIOD_S) -> None:
    """Purge periodically until cancelled.

    `hive` may be ahead of the log. So its floors are used a period later, and only if `stored`, the inbox position up
    to which everything is decided and on the log, has increased: the increase shows that the append that was in flight
    has been stored.
    """
    purge = Purge(bus)
    while True:
        floors, of_holders = floors_of(hive()), floors_of_holders(hive())
        position = stored()
        await asyncio.sleep(period_s)
        if stored() == position:
            continue
        try:
            await purge.below(floors, of_holders)
        except (BusUnavailable, ServerRefused) as error:
            log.warning("the log of calls could not be trimmed: %s", error)


class Purge:
    """Purges calls, and remembers how far each engine's and each holder's calls have been purged."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._purged: dict[str, int] = {}  # purged up to here, by subject

    async def below(
        self, floors: Mapping[str, Floor], of_holders: Mapping[tuple[str, str], Floor] = NO_HOLDERS
    ) -> None:
        """Purge the calls before `kept` and, while the stream is overfull, the oldest of the calls kept only for
        replay."""
        if not floors:
            return
        stream = self._bus.subjects.calls_stream
        state = await self._bus.state(stream)
        overfull = state.fill > FILL_FOR_REPLAY
        share = max(SHARE_MIN, 1 - FILL_FOR_REPLAY / state.fill) if overfull else 0.0
        subjects = self._bus.subjects
        parts = {subjects.calls_of(name): floor for name, floor in floors.items()}
        whole = len(parts)
        parts |= {subjects.call(*each): floor for each, floor in of_holders.items()}
        purged = {subject: max(self._purged.get(subject, 0), state.first_seq) for subject in parts}
        targets = {each: _target(floor, purged[each], share, state.last_seq) for each, floor in parts.items()}
        least = min(islice(targets.values(), whole))  # engines' floors suffice: together engines have all calls
        if least > state.first_seq:
            await self._bus.purge_below(stream, least)
        self._purged = {subject: max(least, position) for subject, position in purged.items()}
        if not overfull:
            return
        # Engines share the stream. Purging one engine's calls makes the server search the stream, so do it only if
        # needed.
        for subject, target in targets.items():
            if target > self._purged[subject]:
                await self._bus.purge_below(stream, target, subject)
                self._purged[subject] = target


def _target(floor: Floor, purged: int, share: float, last: int) -> int:
    """Return the sequence below which to purge, including `share` of the calls kept only for replay."""
    if floor.needed > last:
        return 0  # the stream has lost its end: later calls may be new
    return max(floor.kept, purged + ceil(share * max(0, floor.needed - purged)))
