"""A trainer's facts reach the log, also where the bus has lost them after it had acknowledged them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from bombus.bus import Bus
from bombus.hive import inbox
from bombus.hive.events import Collection, Weights
from bombus_trainer.options import TrainerOptions
from bombus_trainer.ownership import RunOwnership
from tests.conftest import SMALL_STREAMS
from tests.coordinator.test_lost_ends import Store, restarted
from tests.coordinator.test_shell import ENGINE, leading
from tests.patience import PATIENCE_S


@asynccontextmanager
async def opened(bus: Bus) -> AsyncIterator[RunOwnership]:
    """Hold a run that boots as its trainer, under a leader that is gone then."""
    configure = inbox.Configure(
        id="configure", engine=ENGINE, config="{}", config_digest="d", collection=Collection(), model="tiny"
    )
    ownership = RunOwnership(bus, TrainerOptions(engine=ENGINE), "t")
    following = asyncio.create_task(ownership.follow())
    async with leading(bus):
        await bus.inbox.request(configure)
        await bus.inbox.request(inbox.Start(id="start", engine=ENGINE))
        await ownership.next_run()
        await ownership.open()
    try:
        yield ownership
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def check_said_again(store: Store, bus: Bus, ownership: RunOwnership) -> None:
    stream, subject = bus.subjects.inbox_stream, bus.subjects.inbox("weights.saved")
    await restarted(bus, lambda: store.copy(stream))
    saved = inbox.WeightsSaved(
        id=ownership.id("weights-0"),
        engine=ENGINE,
        run=ownership.run,
        step=0,
        trainer_epoch=ownership.epoch,
        weights=Weights(where="/w/0"),
    )
    saying = asyncio.create_task(ownership.say(saved, lambda engine: engine.version == 0))
    async with asyncio.timeout(PATIENCE_S):
        while await bus.last(stream, subject) is None:
            await asyncio.sleep(0.01)
    await restarted(bus, lambda: store.put_back(stream))
    async with leading(bus), asyncio.timeout(PATIENCE_S):
        await saying


async def test_r6_a_fact_that_the_inbox_lost_after_it_was_acknowledged_is_sent_again(tmp_path: Path) -> None:
    """Nobody would send it again otherwise: the run waited for the trainer, and the trainer for the log."""
    store = Store(tmp_path)
    try:
        async with await Bus.connect(store.server.url, "h") as bus:
            await bus.ensure_streams(SMALL_STREAMS)
            async with opened(bus) as ownership:
                await check_said_again(store, bus, ownership)
    finally:
        await asyncio.to_thread(store.server.stop, 2)
