"""A fold of the log goes on where a newer release has written what this one does not know, and says what to upgrade."""

import asyncio
import logging

import msgspec
import pytest

from bombus.bus import EPOCH, INBOX, Bus, Outgoing, append
from bombus.bus.follow import Follower
from bombus.errors import LogCorrupted, NewerEvent
from bombus.hive import events as ev
from tests.patience import PATIENCE_S

HEADERS = {EPOCH: "1", INBOX: "0"}
KNOWN = ev.EngineConfigured(engine="main", config="{}", config_digest="d", collection=ev.Collection(), model="tiny")
ABORTED = ev.EpisodeAborted(engine="main", run=1, episodes=("main-1-1",), reason=ev.AbortReason.IDLE)
NEWER = {
    "a kind": {"type": "engine.dreamt", "at_ns": 1, "engine": "main"},
    "a value": {**msgspec.msgpack.decode(ev.encode_event(ABORTED)), "reason": "bored"},
}


async def write(bus: Bus, body: bytes, last: int) -> None:
    subject = bus.subjects.event("main", "engine.dreamt")
    await append(bus, [[Outgoing(subject=subject, body=body, msg_id=f"1.{last + 1}", headers=HEADERS)]], last)


@pytest.mark.parametrize("what", NEWER)
async def test_what_only_a_newer_release_knows_is_left_out_with_a_warning(
    bus: Bus, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    for number, event in enumerate((NEWER[what], NEWER[what], KNOWN)):
        body = ev.encode_event(event) if isinstance(event, ev.Event) else msgspec.msgpack.encode(event)
        await write(bus, body, number)
    seen: list[int] = []
    follower = Follower(bus, lambda position, _: seen.append(position))
    following = asyncio.create_task(follower.run())
    with caplog.at_level(logging.WARNING):
        await follower.wait_position(3, PATIENCE_S)
    following.cancel()
    assert follower.hive.engine("main").configured is not None
    assert seen == [3]
    (said,) = [record.getMessage() for record in caplog.records if "newer release than bombus" in record.getMessage()]
    assert "event 1 on" in said
    assert "upgrade bombus here" in said
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(NewerEvent, match="upgrade bombus here"):
            await Follower(bus, strict=True).run()


async def test_an_event_that_is_damaged_is_left_out_by_nobody(bus: Bus) -> None:
    await write(bus, b"\xc1\xff", 0)
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(LogCorrupted, match=r"event 1 on .* is damaged") as found:
            await Follower(bus).run()
    assert not isinstance(found.value, NewerEvent)
