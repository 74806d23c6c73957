"""Tests that the log says how gateways read the model of a run, once for each way, and that the status shows it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bombus.bus import Bus
from bombus.hive import inbox
from bombus.hive.events import ConversationFormat
from bombus.hive.status.text import render_status
from bombus_coordinator.shell import Coordinator
from bombus_gateway import service
from bombus_gateway.call.models import EngineModels
from bombus_gateway.formats import FormatReports
from bombus_gateway.settings import GatewaySettings
from tests.gateway.openai_hive import ENGINE, FILES, TEXT, GatewayHive, gateway_hive, new_id


async def sends(hive: GatewayHive, reports: FormatReports) -> bool:
    """Let a gateway check once; return whether the inbox has a new report after that."""
    subjects = hive.bus.subjects
    stream, subject = subjects.inbox_stream, subjects.inbox("model.read")
    before = await hive.bus.last(stream, subject)
    await reports.check()
    after = await hive.bus.last(stream, subject)
    return after is not None and (before is None or after.seq > before.seq)


def reporter(hive: GatewayHive) -> FormatReports:
    """Return what a gateway of this hive reports with, as a process of its own would have it."""
    assert hive.gateway is not None
    return FormatReports(hive.gateway, EngineModels(hive.bus))


@asynccontextmanager
async def another_coordinator(bus: Bus) -> AsyncIterator[None]:
    leading = asyncio.create_task(Coordinator(bus).lead())
    try:
        yield
    finally:
        leading.cancel()
        await asyncio.gather(leading, return_exceptions=True)


async def test_the_status_of_a_started_job_shows_how_its_model_is_read(bus: Bus, nats_url: str) -> None:
    settings = GatewaySettings(hive=bus.subjects.hive, bus_url=nats_url)
    async with gateway_hive(bus) as hive, service.running(settings):
        await hive.until(lambda engine: bool(engine.formats))
        assert [each.format for each in hive.engine.formats] == [TEXT.format]
        shown = f"\n  template {TEXT.format.template}, tool calls: hermes, reasoning: text\n"
        assert shown in render_status(hive.follower.hive)


async def test_a_gateway_reports_nothing_that_another_has_reported(bus: Bus) -> None:
    async with gateway_hive(bus) as hive:
        assert await sends(hive, reporter(hive))
        await hive.until(lambda engine: bool(engine.formats))
        assert not await sends(hive, reporter(hive))


async def test_gateways_that_disagree_are_named_and_do_not_report_again(bus: Bus) -> None:
    other = ConversationFormat(template="77d0ab12", tool_calls="text", reasoning="text")
    async with gateway_hive(bus) as hive:
        ours = reporter(hive)
        await ours.check()
        run = hive.engine.run
        theirs = inbox.ModelReadFact(id=new_id(), engine=ENGINE, run=run, gateway="of another version", format=other)
        await bus.inbox.send(theirs)
        await hive.until(lambda engine: len(engine.formats) == 2)
        assert not await sends(hive, ours)
        assert not await sends(hive, reporter(hive))
        assert "of another version has template 77d0ab12" in render_status(hive.follower.hive)


async def test_a_report_is_sent_until_a_coordinator_has_written_it(bus: Bus) -> None:
    async with gateway_hive(bus) as hive:
        await hive.stop_coordinator()
        before, after = reporter(hive), reporter(hive)
        assert await sends(hive, before)
        assert not await sends(hive, before), "the bus keeps one of them"
        assert await sends(hive, after), "the gateway was killed, and is another process now"
        async with another_coordinator(bus):
            await hive.until(lambda engine: bool(engine.formats))
            await hive.claim()  # an answer comes after all that was sent before
            assert len(hive.engine.formats) == 1


async def test_a_model_that_was_read_for_a_call_is_reported_too(bus: Bus) -> None:
    async with gateway_hive(bus, engines=("another",)) as hive:
        assert hive.gateway is not None
        models = EngineModels(bus)
        reports = FormatReports(hive.gateway, models)
        assert not await sends(hive, reports), "its APIs are for another engine"
        await models.text_model(hive.engine)
        await reports.check()
        await hive.until(lambda engine: bool(engine.formats))


async def test_a_gateway_that_cannot_read_a_model_goes_on(bus: Bus) -> None:
    async with gateway_hive(bus, files={**FILES, "tokenizer.json": b"{"}) as hive:
        reports = reporter(hive)
        assert not await sends(hive, reports)
        assert not await sends(hive, reports)
