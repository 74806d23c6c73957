"""bus/flight.py over the simulated bus: the same fences, legs and look at the last event after a failure."""

from collections.abc import Sequence

from bombus.bus.flight import Outgoing, legs
from bombus.bus.headers import EPOCH
from bombus.errors import BombusError, BusUnavailable, Deposed, LogCorrupted
from tests.sim.link import Link
from tests.sim.server import EPOCH_OPENED, EVENTS_STREAM
from tests.sim.variants import Variant

FLIGHT_S = 10.0
PAUSE_S = 0.2

Landing = Sequence[Outgoing]


async def fly(link: Link, decisions: Sequence[Landing], last: int, variant: Variant | None) -> int:
    """Append behind `last` and return the new last sequence. Raises `Deposed`, `BusUnavailable`."""
    rest = list(decisions)
    deadline_s = link.net.loop.now_s + FLIGHT_S
    while rest:
        failure = await _attempt(link, rest, last, variant)
        if failure is None:
            return last + sum(map(len, rest))
        link.ground = None
        landed = await _landed(link, rest, last)
        last += sum(map(len, rest[:landed]))
        rest = rest[landed:]
        if rest:
            if link.net.loop.now_s > deadline_s:
                raise BusUnavailable(str(failure))
            await link.process.sleep(PAUSE_S)
    return last


async def _attempt(link: Link, decisions: Sequence[Landing], last: int, variant: Variant | None) -> BombusError | None:
    if len(decisions) == 1:
        return await _fly_leg(link, [decisions[0]], last, None)
    try:
        fence = await _ground(link, int(decisions[0][0].headers[EPOCH]))
    except BusUnavailable as error:
        return error
    for leg in legs(decisions, chained=link.server.replicas == 1):
        failure = await _fly_leg(link, leg, last, None if variant == Variant.NO_EPOCH_FENCE else fence)
        if failure is not None:
            return failure
        last += sum(map(len, leg))
    return None


async def _fly_leg(link: Link, leg: Sequence[Landing], last: int, opened: int | None) -> BombusError | None:
    """Send all without waiting, then wait for all."""
    acks = []
    for item in leg:
        acks.append(link.submit(EVENTS_STREAM, item, last, opened))
        last += len(item)
    expected = last - sum(map(len, leg))
    failure: BombusError | None = None
    for item, ack in zip(leg, acks):
        expected += len(item)
        try:
            stored = await ack
        except BombusError as error:
            failure = failure or error
            continue
        if stored.duplicate or stored.seq != expected:
            failure = failure or BusUnavailable(f"event {expected} was stored before")
    return failure


async def _landed(link: Link, decisions: Sequence[Landing], last: int) -> int:
    """How many of these decisions are on the log behind `last`."""
    stored = await link.last(EVENTS_STREAM)
    end = 0 if stored is None else stored.seq
    if end < last:
        raise LogCorrupted(f"the log ends at {end}, {last} was acknowledged")
    if stored is not None and int(stored.headers[EPOCH]) > int(decisions[0][0].headers[EPOCH]):
        raise Deposed(f"epoch {stored.headers[EPOCH]} is open")
    if stored is None or end == last:
        return 0
    position = last
    for number, decision in enumerate(decisions, start=1):
        position += len(decision)
        if position == end and stored.msg_id == decision[-1].msg_id and stored.body == decision[-1].body:
            return number
    raise Deposed(f"event {end} is not ours")


async def _ground(link: Link, epoch: int) -> int:
    """Where this epoch was opened; read once for an epoch and after failures."""
    if link.ground is None or link.ground[0] != epoch:
        opened = await link.last(EVENTS_STREAM, EPOCH_OPENED)
        if opened is not None and int(opened.headers[EPOCH]) > epoch:
            raise Deposed(f"epoch {opened.headers[EPOCH]} is open")
        link.ground = epoch, 0 if opened is None else opened.seq
    return link.ground[1]
