"""`bombus why` on archives and on a running hive: positions, times, names and JSON."""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence

import pytest

from bombus.bus import Bus, Stored
from bombus.cli import main
from bombus.commands.why import moment_of
from bombus.hive.events import AnyEvent, Collection, EngineConfigured, EpochOpened, LeadingPaused
from bombus.hive.pauses import LATE_NS, TICK_NS
from bombus.hive.state import Hive
from bombus.hive.why.chains import chain
from bombus.replay.source import BusSource, LogEnd, Logged, Source
from tests.coordinator.core_in_memory import SECOND
from tests.coordinator.test_shell import ENGINE, boot, leading
from tests.logs.facts import TINY, recorded

Capture = pytest.CaptureFixture[str]
FACTS = recorded(TINY)


def output(capsys: Capture, *words: str, code: int = 0) -> str:
    assert main(["why", *words, "--log", str(TINY)]) == code
    told = capsys.readouterr()
    return told.err if code else told.out


def test_every_engine_that_waits_for_something_is_shown_with_who_can_end_it(capsys: Capture) -> None:
    lines = output(capsys).splitlines()
    assert lines[0].startswith(f"after event {FACTS['events']}, ")
    assert lines[0].endswith(": the log's end, as no hive is running on it")
    assert "no hive is running" not in output(capsys, "--at", str(FACTS["events"]))
    assert lines[2].startswith("engine main is rolling: the batch of step ")
    assert lines[-1].startswith("  who can end this: ")


def test_a_chain_is_data_too(capsys: Capture) -> None:
    found = json.loads(output(capsys, ENGINE, "--json"))
    assert (found["seq"], list(found["chains"])) == (FACTS["events"], [ENGINE])
    assert found["chains"][ENGINE][0].keys() == {"what", "who", "since_ns", "until_ns"}
    assert found["chains"][ENGINE][0]["since_ns"] <= found["at_ns"]


def test_a_position_and_a_time_after_the_fact_are_read_as_the_hive_was_then(capsys: Capture) -> None:
    assert "no engine yet" in output(capsys, "--at", "1")
    begun, then = (json.loads(output(capsys, "--at", seq, "--json")) for seq in ("1", "20"))
    seconds = (then["at_ns"] - begun["at_ns"]) / 1e9 + 0.1
    later = json.loads(output(capsys, "--at", f"+{seconds:.3f}s", "--json"))
    assert 20 <= later["seq"] < FACTS["events"]
    assert later["at_ns"] > then["at_ns"]


def test_what_does_not_exist_is_refused_in_one_sentence(capsys: Capture) -> None:
    why = output(capsys, "other", code=1)
    assert (
        why
        == f"bombus why: there is no engine, run or episode other at event {FACTS['events']}; the engines are: main\n"
    )
    assert "there is no engine, run or episode main-9" in output(capsys, "main-9", code=1)
    assert f"there is no event 9999: {TINY} ends at {FACTS['events']}" in output(capsys, "--at", "9999", code=1)
    assert f"{TINY} does not cover this time" in output(capsys, "--at", "+9d", code=1)
    assert "'soon' is not a time" in output(capsys, "--at", "soon", code=2)


def test_an_episode_can_be_named_by_the_id_that_its_client_got(capsys: Capture) -> None:
    alone, claimed = (json.loads(output(capsys, f"main-1-1{secret}", "--json")) for secret in ("", ".tKM_NByggUhij3"))
    assert list(claimed["chains"]) == ["main-1-1"]
    assert claimed == alone


async def test_a_running_hive_is_led_as_long_as_its_leader_puts_ticks_into_the_inbox(bus: Bus) -> None:
    source = BusSource(bus, "the bus")
    async with leading(bus):
        await boot(bus)
        while not await source.led_ns():
            await asyncio.sleep(0)
        at, led_ns = await moment_of(source, "")
    assert led_ns <= at.now_ns
    led = chain(at.hive, led_ns, at.last, ENGINE, led_ns)
    left = chain(at.hive, led_ns + LATE_NS + TICK_NS + 1, at.last, ENGINE, led_ns)
    assert led is not None
    assert left is not None
    assert (led[-1].who == "a coordinator", left[-1].who) == (False, "a coordinator")


class Told(Source):
    """A log of these events, each stored at its time."""

    title, hive = "the events", "main"

    def __init__(self, *events: AnyEvent) -> None:
        self._entries = [Logged(seq, event.at_ns, event, 1, 0) for seq, event in enumerate(events, 1)]

    async def base(self) -> tuple[Hive, int]:
        return Hive(), 0

    async def end(self) -> LogEnd:
        return LogEnd(len(self._entries), self._entries[-1].time_ns)

    async def events(self, after: int = 0, until: int | None = None) -> AsyncGenerator[Logged, None]:
        for entry in self._entries[after:until]:
            yield entry

    def stored(self, after: int = 0, until: int | None = None) -> AsyncGenerator[Stored, None]:
        raise NotImplementedError

    async def messages(self, stream: str, seqs: Sequence[int]) -> list[bytes | None]:
        raise NotImplementedError

    async def blob(self, name: str) -> bytes:
        raise NotImplementedError


async def test_a_time_at_which_nobody_led_is_known_from_the_pause_that_follows() -> None:
    """The next leader notes the pause at its first tick, after which others may already be decided."""
    opened = EpochOpened(at_ns=100 * SECOND, epoch=1, leader="first")
    configured = EngineConfigured(
        at_ns=110 * SECOND, engine=ENGINE, config="{}", config_digest="d", collection=Collection(), model="tiny"
    )
    again = EpochOpened(at_ns=200 * SECOND, epoch=2, leader="second")
    paused = LeadingPaused(at_ns=201 * SECOND, since_ns=121 * SECOND)
    source = Told(opened, configured, again, paused)
    for text, led_ns in (("+50s", 121 * SECOND), ("+15s", 0)):
        at, found_ns = await moment_of(source, text)
        assert (at.position, found_ns) == (2, led_ns)
        found = chain(at.hive, at.now_ns, at.last, ENGINE, led_ns)
        assert found is not None
        assert (found[-1].what.startswith("no coordinator has led for 29 s")) == (led_ns > 0)
