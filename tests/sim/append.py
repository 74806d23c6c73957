"""bus/append.py over the simulated bus: the same fences, steps and check of the last event after a failure."""

from collections.abc import Sequence

from bombus.bus.append import Outgoing, plan_steps
from bombus.bus.headers import EPOCH
from bombus.errors import BombusError, BusUnavailable, Deposed, LogCorrupted
from tests.sim.link import Link
from tests.sim.server import EPOCH_OPENED, EVENTS_STREAM
from tests.sim.variants import Variant

APPEND_S = 10.0
PAUSE_S = 0.2

Write = Sequence[Outgoing]


async def append(link: Link, decisions: Sequence[Write], last: int, variant: Variant | None) -> int:
    """Append after `last` and return the new last sequence. Raises `Deposed`, `BusUnavailable`."""
    rest = list(decisions)
    deadline_s = link.net.loop.now_s + APPEND_S
    while rest:
        failure = await _attempt(link, rest, last, variant)
        if failure is None:
            return last + sum(map(len, rest))
        link.epoch_fence = None
        stored = await _count_stored(link, rest, last)
        last += sum(map(len, rest[:stored]))
        rest = rest[stored:]
        if rest:
            if link.net.loop.now_s > deadline_s:
                raise BusUnavailable(str(failure))
            await link.process.sleep(PAUSE_S)
    return last


async def _attempt(link: Link, decisions: Sequence[Write], last: int, variant: Variant | None) -> BombusError | None:
    if len(decisions) == 1:
        return await _append_step(link, [decisions[0]], last, None)
    try:
        fence = await _epoch_fence(link, int(decisions[0][0].headers[EPOCH]))
    except BusUnavailable as error:
        return error
    for step in plan_steps(decisions, chained=link.server.replicas == 1):
        failure = await _append_step(link, step, last, None if variant == Variant.NO_EPOCH_FENCE else fence)
        if failure is not None:
            return failure
        last += sum(map(len, step))
    return None


async def _append_step(link: Link, step: Sequence[Write], last: int, opened: int | None) -> BombusError | None:
    """Send all writes without waiting, then wait for all of them."""
    acks = []
    for write in step:
        acks.append(link.submit(EVENTS_STREAM, write, last, opened))
        last += len(write)
    expected = last - sum(map(len, step))
    failure: BombusError | None = None
    for write, ack in zip(step, acks):
        expected += len(write)
        try:
            stored = await ack
        except BombusError as error:
            failure = failure or error
            continue
        if stored.duplicate or stored.seq != expected:
            failure = failure or BusUnavailable(f"event {expected} was stored before")
    return failure


async def _count_stored(link: Link, decisions: Sequence[Write], last: int) -> int:
    """Return how many of these decisions are on the log after `last`."""
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


async def _epoch_fence(link: Link, epoch: int) -> int:
    """Return where this epoch was opened. Read once per epoch and after failures."""
    if link.epoch_fence is None or link.epoch_fence[0] != epoch:
        opened = await link.last(EVENTS_STREAM, EPOCH_OPENED)
        if opened is not None and int(opened.headers[EPOCH]) > epoch:
            raise Deposed(f"epoch {opened.headers[EPOCH]} is open")
        link.epoch_fence = epoch, 0 if opened is None else opened.seq
    return link.epoch_fence[1]
