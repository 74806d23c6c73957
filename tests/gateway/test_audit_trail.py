"""Who did what: the events that operators cause name the sender, as docs/security.md says."""

import asyncio
import re
from pathlib import Path

import pytest

from bombus.bus import Bus
from bombus.cli import main
from bombus.hive import events as ev
from bombus.hive.describe import line_of
from bombus.insight.database import LogDatabase
from bombus.machine.hive_keys import HiveKeys, NamedKey
from bombus.machine.process import operator_name
from bombus.replay.source import BusSource
from tests.gateway.swarm_hive import PlayedHive, played_hive

ADMIN, ALICE, BOB = "an-admin-key-for-tests", "a-key-of-alice-for-tests", "a-key-of-bob-for-tests-1"
NAMED = {"alice": NamedKey(key=ALICE), "bob": NamedKey(key=BOB)}
HERE = "127.0.0.1"
PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text()


async def log_of(played: PlayedHive) -> list[ev.AnyEvent]:
    return [logged.event async for logged in BusSource(played.bus, "the log of this test").events()]


def senders(events: list[ev.AnyEvent]) -> list[tuple[str, str]]:
    return [(ev.kind_of(event), by) for event in events if (by := getattr(event, "by", ""))]


async def test_the_log_says_who_did_what_and_has_no_key(nats_url: str, bus: Bus) -> None:
    async with played_hive(bus, keys=HiveKeys(admin=ADMIN, clients=NAMED)) as played:
        played.http.headers["x-api-key"] = ADMIN
        await played.start()
        claimed = (await played.claim())["episode_uuid"].partition(".")[0]
        await played.post("/stop_episode", {"episode": claimed})
        assert (await played.post("/start_engine")).json()["success"] is False
        assert (await played.post("/stop_engine")).json()["success"]
        assert (await played.post("/start_engine")).json()["success"]
        assert await asyncio.to_thread(main, ["stop", "--nats", nats_url, "--hive", bus.subjects.hive]) == 0
        events = await log_of(played)
        assert senders(events) == [
            ("engine.configured", f"/admin@{HERE}"),
            ("episode.aborted", f"/admin@{HERE}"),
            ("command.answered", f"/admin@{HERE}"),
            ("engine.stopped", f"/admin@{HERE}"),
            ("engine.started", f"/admin@{HERE}"),
            ("engine.stopped", operator_name()),
        ]
        stopped = next(event for event in events if isinstance(event, ev.EngineStopped))
        assert line_of(stopped) == f"run 1 stopped, by /admin@{HERE}"
        assert not any(key in str(events) for key in (ADMIN, ALICE, BOB))
        (query,) = re.findall(r"^```sql\n(SELECT time, engine.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
        with LogDatabase() as database:
            await database.load(BusSource(bus, "the log of this test"), ["events"])
            rows = database.query(query).fetchall()
        assert [(row[2], row[3]) for row in reversed(rows)] == senders(events)


@pytest.mark.parametrize(
    ("keys", "key", "by"),
    [
        (HiveKeys(clients=NAMED), BOB, f"bob@{HERE}"),
        (HiveKeys(client=ALICE), ALICE, f"/client@{HERE}"),
        (HiveKeys(), "", f"/nobody@{HERE}"),
    ],
)
async def test_without_an_admin_key_a_sender_is_named_by_what_it_has(
    bus: Bus, keys: HiveKeys, key: str, by: str
) -> None:
    async with played_hive(bus, keys=keys) as played:
        played.http.headers["x-api-key"] = key
        await played.start()
        assert (await played.post("/stop_engine")).json()["success"]
        assert set(senders(await log_of(played))) == {("engine.configured", by), ("engine.stopped", by)}
