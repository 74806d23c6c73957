"""An hour of what `python -m tests.sim.week` simulates for a week, with streams that it fills many times."""

import asyncio

from bombus.bus import Bus
from bombus.bus.headers import MSG_ID, header_bytes
from tests.sim.week import Limits, Load, Week, check_streams, stored_bytes


def test_for_an_hour_streams_and_snapshots_stay_within_their_bounds() -> None:
    limits = Limits(events=2 << 20, calls=32 << 20, snapshot_events=500)
    week = Week(Load(rate=10.0, batch_size=8, num_repeat=8), limits)
    samples = asyncio.run(week.run(3600, every_s=600))
    check_streams(samples)
    assert week.events.last > 3 * week.events.state.messages
    assert week.calls.first > 1
    assert week.core.hive.engine("main").counters.trained > 0.9 * week.core.hive.engine("main").counters.ended


async def test_the_simulation_counts_bytes_as_the_server_does(bus: Bus) -> None:
    subject, body = bus.subjects.event("main", "calls.noted"), b"x" * 100
    before = await bus.state(bus.subjects.events_stream)
    await bus.publisher.publish(subject, body, msg_id="some-id")
    after = await bus.state(bus.subjects.events_stream)
    headers = header_bytes({MSG_ID: "some-id"})
    assert after.bytes - before.bytes == stored_bytes(len(subject), headers, len(body))
