"""The page in the browser, over HTTP."""

import asyncio
import json
import os
import re
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount, Route

from bombus.bus import Bus, EmbeddedServer
from bombus.commands import web
from bombus.config.flags import Parser
from bombus.hive import events as ev
from bombus.hive.events import Event, encode_event, kind_of
from bombus.hive.fold.evolve import evolve
from bombus.hive.state import Hive
from bombus.insight.watch import LogWatch, OpenLog
from bombus.insight.web.access import guarded
from bombus.insight.web.app import create_app, with_headers
from bombus.insight.web.run import binned
from bombus.insight.web.step import GROUPS_SHOWN
from bombus.machine.hive_keys import HiveKeys, KeyRing, NamedKey
from bombus.machine.http_server import http_server
from bombus.machine.process import listen
from bombus.replay.archive import FileSource
from bombus.replay.source import BusSource, Source
from tests.foreign_keys import foreign_keys
from tests.insight.long_log import story_events, write_archive, write_events
from tests.logs.facts import TINY
from tests.patience import until

ADMIN, CLIENT = "admin-key-of-this-hive", "client-key-of-this-hive"


@asynccontextmanager
async def served(
    open_log: OpenLog, keys: HiveKeys | None = None, idle_s: float = 60.0
) -> AsyncIterator[tuple[httpx.AsyncClient, LogWatch]]:
    watch = LogWatch(open_log, idle_s)
    bound = listen("127.0.0.1", 0)
    app = with_headers(guarded(create_app(watch), KeyRing(keys or HiveKeys()), bound))
    async with http_server(app, bound, drain_s=0, cut_off=watch.stop_viewing):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{bound.getsockname()[1]}", timeout=60) as client:
            yield client, watch
        await watch.close()


def archive(path: Path = TINY) -> OpenLog:
    @asynccontextmanager
    async def opened() -> AsyncIterator[Source]:
        with FileSource.open(path) as source:
            yield source

    return opened


async def ready(client: httpx.AsyncClient, watch: LogWatch) -> None:
    assert "Reading the log" in (await client.get("/")).text
    await until(lambda: watch.is_ready)


async def test_an_archive_is_shown_without_any_service_and_at_every_position() -> None:
    async with served(archive()) as (client, watch):
        await ready(client, watch)
        now = await client.get("/")
        assert now.status_code == 200
        assert 'href="/run/main-2"' in now.text
        run = await client.get("/run/main-1")
        assert "Run main-1" in run.text
        for at in range(89):
            earlier = await client.get("/", params={"at": at})
            assert earlier.status_code == 200
            assert f"{at} of 88" in earlier.text
        assert "OFFLINE" not in now.text
        assert (await client.get("/", params={"at": 89})).status_code == 404
        assert (await client.get("/run/main-9")).status_code == 404
        assert (await client.get("/run/main-2", params={"at": 5})).status_code == 404


async def test_the_points_of_a_run_end_at_the_position_and_later_ones_come_alone(tmp_path: Path) -> None:
    write_archive(tmp_path / "run", list(story_events(12)))
    async with served(archive(tmp_path / "run")) as (client, watch):
        await ready(client, watch)
        assert watch.record is not None
        (series,) = watch.record.runs_at(watch.position)
        fifth = series.steps[4].done_seq
        rewards = {}
        for name, query in {"all": {}, "before": {"at": str(fifth)}, "after": {"after": str(fifth)}}.items():
            answer = (await client.get("/runs/points.json", params={"run": "main-1", **query})).json()
            rewards[name] = [(point["x"], point["y"]) for point in answer["points"]["reward"]]
            assert ("reward" in answer["specs"]) == (name != "after")
        assert [x for x, _ in rewards["all"]] == list(range(1, 13))
        assert rewards["before"] == rewards["all"][:5]
        assert rewards["after"] == rewards["all"][5:]
        tokens = (await client.get("/runs/points.json?run=main-1&axis=tokens")).json()
        assert tokens["points"]["reward"][0]["x"] > 100


async def test_the_page_of_a_run_says_what_diagnose_says_and_links_its_rewards_to_their_episodes(
    tmp_path: Path,
) -> None:
    write_archive(tmp_path / "run", list(story_events(12)))
    async with served(archive(tmp_path / "run")) as (client, watch):
        await ready(client, watch)
        page = (await client.get("/run/main-1", params={"step": 3})).text
        assert "Rewards of step 3" in page
        assert '<a href="/run/main-1/step/3?low=' in page


async def test_a_running_hive_is_followed_and_the_page_is_told_that_there_is_something_new(bus: Bus) -> None:
    events = list(story_events(2))

    @asynccontextmanager
    async def opened() -> AsyncIterator[Source]:
        yield BusSource(bus, "hive", running=True)

    await write_events(bus, events[:20])
    async with served(opened) as (client, _), client.stream("GET", "/events") as stream:
        told = (json.loads(line[6:]) async for line in stream.aiter_lines() if line.startswith("data: "))
        while not (state := await anext(told))["ready"]:
            pass
        assert state["position"] == 20
        assert f"20 of {20}" in (await client.get("/")).text
        await write_events(bus, events[20:], first=21)
        while (state := await anext(told))["position"] < len(events):
            pass
        page = (await client.get("/")).text
        assert f"{len(events)} of {len(events)}" in page
        assert "run/main-1" in page
        earlier = (await client.get("/", params={"at": 30})).text
        assert f"30 of {len(events)}" in earlier
        assert (await client.get("/run/main-1")).status_code == 200


async def test_an_idle_hive_that_goes_on_at_another_address_is_found_there(
    bus: Bus, crashing: tuple[EmbeddedServer, Bus], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bombus.insight.watch.PAUSE_S", 0.0)
    monkeypatch.setattr("bombus.insight.watch.RETRY_S", 0.0)
    server, before = crashing
    hives = chain([before], repeat(bus))

    @asynccontextmanager
    async def opened() -> AsyncIterator[Source]:
        yield BusSource(next(hives), "hive", running=True)

    events = list(story_events(2))
    await write_events(before, events[:20])
    await write_events(bus, events[:30])
    async with served(opened) as (client, watch):
        await ready(client, watch)
        for _ in range(20):  # meanwhile, the page has looked for new events
            await before.state(before.subjects.events_stream)
        server.stop(timeout_s=2)
        await until(lambda: watch.position == 30)


async def test_while_the_bus_is_dead_pages_show_at_once_what_was_read_and_go_on_once_it_is_back(
    crashing: tuple[EmbeddedServer, Bus], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bombus.insight.watch.RETRY_S", 0.05)
    server, bus = crashing
    events = list(story_events(2))

    @asynccontextmanager
    async def opened() -> AsyncIterator[Source]:
        async with await Bus.connect(server.url, "h", patient=False) as own:
            yield BusSource(own, "hive", running=True)

    async def at_once(path: str) -> httpx.Response:
        async with asyncio.timeout(3):  # a request to a dead bus takes 10 seconds
            return await client.get(path)

    await write_events(bus, events[:-2])
    async with served(opened) as (client, watch):
        await ready(client, watch)
        os.kill(server.pid or 0, signal.SIGKILL)
        assert (await at_once("/")).status_code == 200
        await until(lambda: watch.error != "")
        now = await at_once("/")
        assert now.status_code == 200
        assert "This is what was read last" in now.text
        assert f"{len(events) - 2} of {len(events) - 2}" in now.text
        run = await at_once("/run/main-1")
        assert run.status_code == 200
        assert "This is what was read last" in run.text
        assert (await at_once("/runs/points.json?run=main-1")).json()["points"]["reward"]
        for unread in ("/?at=30", "/run/main-1/step/1", "/episode/main-1-1"):
            assert (await at_once(unread)).status_code == 503
        await asyncio.to_thread(server.start)
        await write_events(bus, events[-2:], first=len(events) - 1)
        await until(lambda: watch.position == len(events))
        assert "This is what was read last" not in (await client.get("/")).text
        assert (await client.get("/run/main-1/step/1")).status_code == 200


async def test_a_burst_of_events_is_read_in_bulk_and_one_of_a_newer_release_is_left_out(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("bombus.bus.reader.BULK_MESSAGES", 100)
    caplog.set_level("INFO")
    events = list(story_events(6))[:600]

    @asynccontextmanager
    async def opened() -> AsyncIterator[Source]:
        yield BusSource(bus, "hive", running=True)

    await write_events(bus, events[:20])
    async with served(opened) as (client, watch):
        await ready(client, watch)
        await write_events(bus, events[20:], first=21)
        unknown = encode_event(events[0]).replace(kind_of(events[0]).encode(), b"x" * len(kind_of(events[0])))
        await bus.publisher.publish(bus.subjects.event("main", "x"), unknown, msg_id="x")
        await until(lambda: watch.position == len(events) + 1)
        assert watch.record is not None
        whole = Hive()
        for event in events:
            evolve(whole, event)
        assert watch.record.live.hive == whole
        assert (await client.get("/")).status_code == 200
    assert "in bulk" in caplog.text
    assert "leaves out such events" in caplog.text


async def test_a_run_says_which_steps_are_kept_where_it_has_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bombus.replay.diagnosis.steps.STEPS_KEPT", 5)
    write_archive(tmp_path / "run", list(story_events(12)))
    async with served(archive(tmp_path / "run")) as (client, watch):
        await ready(client, watch)
        assert "steps 8 to 12" in (await client.get("/run/main-1")).text
        earlier = (await client.get("/run/main-1", params={"at": 300})).text
        assert "none of its steps that are kept, 8 to 12" in earlier
        assert "steps 8 to 12 are kept" in (await client.get("/run/main-1/step/3")).text


async def test_nothing_is_read_until_somebody_looks_and_nothing_is_kept_after_nobody_does() -> None:
    async with served(archive(), idle_s=0.2) as (client, watch):
        assert watch.source is None
        await ready(client, watch)
        await until(lambda: watch.source is None and watch.record is None)
        await ready(client, watch)


async def test_a_log_that_cannot_be_read_is_said_on_the_page(tmp_path: Path) -> None:
    body = TINY.read_bytes()
    (tmp_path / "cut").write_bytes(body[: len(body) // 2])
    async with served(archive(tmp_path / "cut")) as (client, watch):
        await client.get("/")
        await until(lambda: watch.error != "")
        answer = await client.get("/")
        assert answer.status_code == 503
        assert "was cut off before its end" in answer.text


# ---- who may see it -------------------------------------------------------------------------------------------------


async def test_every_answer_forbids_what_is_not_its_own() -> None:
    async with served(archive()) as (client, watch):
        await ready(client, watch)
        for path in ("/", "/run/main-1", "/run/nothing", "/static/page.js", "/nothing"):
            policy = (await client.get(path)).headers["content-security-policy"]
            assert "default-src 'none'; script-src 'self';" in policy
            assert "unsafe-eval" not in policy
        page = (await client.get("/run/main-1")).text
        assert "<script>" not in page
        assert not re.search(r"""(src|href|action)=["']?(https?:|//)""", page)


async def test_the_scripts_that_draw_charts_are_kept_by_browsers_since_their_address_has_their_version() -> None:
    async with served(archive()) as (client, _):
        script = await client.get("/static/vega.js?1")
        assert "immutable" in script.headers["cache-control"]
        assert len(script.content) > 500_000
        assert (await client.get("/static/..%2fapp.py")).status_code == 404


@pytest.mark.parametrize(
    ("keys", "opens", "refused"),
    [
        (HiveKeys(admin=ADMIN, client=CLIENT), ADMIN, CLIENT),
        (HiveKeys(client=CLIENT), CLIENT, ADMIN),
        (HiveKeys(clients={"alice": NamedKey(key=CLIENT)}), CLIENT, ADMIN),
    ],
)
async def test_a_hive_with_keys_shows_itself_to_the_holder_of_the_highest_one(
    keys: HiveKeys, opens: str, refused: str
) -> None:
    async with served(archive(), keys) as (client, watch):
        for headers in ({}, {"x-api-key": refused}, {"cookie": f"bombus-web-{client.base_url.port}={opens}"}):
            answer = await client.get("/", headers=headers)
            assert answer.status_code == 401
            assert answer.headers["content-security-policy"]
        assert (await client.get(f"/k/{refused}/")).status_code == 401
        assert (await client.post("/key", data={"key": refused})).status_code == 401
        assert watch.source is None
        assert (await client.get("/", headers={"authorization": f"Bearer {opens}"})).status_code == 200
        admitted = await client.get(f"/k/{opens}/run/main-1?at=3")
        assert admitted.headers["location"] == "/run/main-1?at=3"
        cookie = admitted.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert opens not in cookie
        assert (await client.get("/")).status_code == 200  # with the cookie
        client.cookies.clear()
        assert (await client.post("/key", data={"key": opens})).status_code == 303
        assert (await client.get("/")).status_code == 200


PAGES = {"/", "/runs", "/runs/points.json", "/episode/{episode}", "/run/{name}", "/run/{name}/step/{step}"}
PARTS = {"/events", "/static", "/static/vega.js"}


def test_every_route_of_the_page_is_one_that_these_tests_try() -> None:
    """A new route has to be added to one of the sets above."""
    app = create_app(LogWatch(archive()))
    assert isinstance(app, Starlette)
    assert {route.path for route in app.routes if isinstance(route, Route | Mount)} == PAGES | PARTS
    assert len(app.routes) == len(PAGES | PARTS)


@pytest.mark.parametrize("right", [ADMIN, CLIENT])
async def test_no_key_of_anybody_else_opens_a_route_of_the_page(bus: Bus, right: str) -> None:
    """Nor does the client key, where there is an admin key, and nor does the cookie of another hive's page."""
    keys = HiveKeys(admin=ADMIN, client=CLIENT) if right == ADMIN else HiveKeys(client=CLIENT)
    async with (
        served(archive(), keys) as (client, watch),
        served(archive(), HiveKeys(admin="the-admin-key-of-a-neighbour")) as (neighbour, _),
    ):
        admitted = await neighbour.get("/k/the-admin-key-of-a-neighbour/")
        cookie = admitted.headers["set-cookie"].partition(";")[0].partition("=")[2]
        name = f"bombus-web-{client.base_url.port}"
        others = {CLIENT} if right == ADMIN else set()
        for path in PAGES | PARTS | {"/static/page.css", "/no-such-page"}:
            for key in {*(await foreign_keys(bus, right)).values(), *others, cookie}:
                for headers in (
                    {"authorization": f"Bearer {key}".strip()},
                    {"x-api-key": key},
                    {"cookie": f"{name}={key}"},
                    {"cookie": f"{name}={right}"},  # the key itself is not the cookie
                ):
                    refused = await client.get(path, headers=headers)
                    assert refused.status_code == 401, (path, headers)
                    assert refused.headers["content-security-policy"]
        assert watch.source is None, "nothing was read for any of them"


async def test_a_key_in_a_link_leads_to_no_other_site() -> None:
    async with served(archive(), HiveKeys(admin=ADMIN)) as (client, _):
        assert (await client.get(f"/k/{ADMIN}//evil.example/")).headers["location"] == "/evil.example/"


async def test_without_keys_other_names_and_pages_of_other_sites_are_refused() -> None:
    async with served(archive()) as (client, _):
        assert (await client.get("/", headers={"host": "evil.example"})).status_code == 421
        foreign = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"}
        assert (await client.get("/events", headers=foreign)).status_code == 401
        link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
        assert (await client.get("/", headers=link)).status_code == 200


def test_beyond_loopback_the_page_does_not_start_without_a_key(run: Callable[..., int], capsys: Any) -> None:
    from bombus.errors import Refused

    with pytest.raises(Refused, match="pass --admin-key-file, or --trusted-network"):
        run("--log", str(TINY), "--host", "0.0.0.0")


def test_a_log_that_does_not_exist_is_said_at_once(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--log", "nowhere") == 1
    assert "bombus web: there is no file nowhere" in capsys.readouterr().err


def test_a_port_that_is_taken_is_said(run: Callable[..., int], caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert run("--log", str(TINY), "--port", str(taken.getsockname()[1])) == 1


@pytest.fixture
def run() -> Callable[..., int]:
    def command(*arguments: str) -> int:
        parser = Parser()
        web.add_arguments(parser)
        return web.run(parser.parse_args(arguments))

    return command


def test_rewards_are_counted_in_bins_that_cover_all_of_them() -> None:
    assert binned([]) == []
    assert binned([1.0, 1.0]) == [(1.0, 1.0, 2)]
    bins = binned([0.0, 0.04, 0.06, 1.0])
    assert len(bins) == 20
    assert [count for _, _, count in bins[:2]] == [2, 1]
    assert bins[-1][0] == pytest.approx(0.95)
    assert bins[-1][2] == 1


def test_each_reward_is_in_one_bin_within_its_bounds_however_large_it_is() -> None:
    for rewards in ([each * 0.05 for each in range(21)], [-1e308, 0.0, 1e308], [0.0, 5e-324], [0.1, 0.3]):
        bins = binned(sorted(rewards))
        assert sum(count for _, _, count in bins) == len(rewards)
        assert bins[-1][1] == max(rewards)
        for low, high, count in bins[:-1]:
            assert count == sum(low <= each < high for each in rewards)


# ---- unusual logs and addresses -------------------------------------------------------------------------------------


def with_batches(events: Iterable[Event], **changes: Any) -> list[Event]:
    return [msgspec.structs.replace(each, **changes) if isinstance(each, ev.BatchReady) else each for each in events]


async def test_numbers_of_any_length_in_an_address_are_not_found() -> None:
    async with served(archive()) as (client, watch):
        await ready(client, watch)
        for path in ("/run/main-1/step/", "/episode/main-1-"):
            answer = await client.get(path + "9" * 5000)
            assert answer.status_code == 404
            assert "9" * 5000 in answer.text
            assert (await client.get(path + "²")).status_code == 404


async def test_an_episode_that_does_not_exist_is_not_said_to_be_compacted(tmp_path: Path) -> None:
    write_archive(tmp_path / "run", list(story_events(3)))
    async with served(archive(tmp_path / "run")) as (client, watch):
        await ready(client, watch)
        answer = await client.get("/episode/main-1-9999")
        assert answer.status_code == 404
        assert "has no episode main-1-9999:" in answer.text


async def test_a_page_that_does_not_exist_at_a_position_shows_that_position() -> None:
    async with served(archive()) as (client, watch):
        await ready(client, watch)
        answer = await client.get("/run/main-2", params={"at": 5})
        assert answer.status_code == 404
        assert "5 of 88" in answer.text
        assert "at event 5" in answer.text


async def test_huge_rewards_are_shown(tmp_path: Path) -> None:
    members = [
        ev.BatchEpisode(episode=f"main-1-{n}", reward=reward, calls=()) for n, reward in enumerate((-1e308, 0.0, 1e308))
    ]
    write_archive(
        tmp_path / "run", with_batches(story_events(2), groups=(ev.BatchGroup(task="t", episodes=tuple(members)),))
    )
    async with served(archive(tmp_path / "run")) as (client, watch):
        await ready(client, watch)
        for path in ("/run/main-1", "/runs/points.json?run=main-1", "/run/main-1/step/1", "/runs?run=main-1"):
            assert (await client.get(path)).status_code == 200


async def test_a_step_whose_rewards_are_not_on_the_log_shows_only_what_is_known(tmp_path: Path) -> None:
    write_archive(tmp_path / "run", with_batches(story_events(2), groups=()))
    async with served(archive(tmp_path / "run")) as (client, watch):
        await ready(client, watch)
        page = (await client.get("/run/main-1/step/1")).text
        assert "other clients collected them" in page
        assert "inf" not in page


async def test_a_step_of_very_many_groups_says_how_many_it_leaves_out(tmp_path: Path) -> None:
    groups = tuple(
        ev.BatchGroup(task=f"task {n}", episodes=(ev.BatchEpisode(episode=f"main-1-{n}", reward=n % 7, calls=()),))
        for n in range(GROUPS_SHOWN + 20)
    )
    write_archive(tmp_path / "run", with_batches(story_events(2), groups=groups))
    async with served(archive(tmp_path / "run")) as (client, watch):
        await ready(client, watch)
        page = (await client.get("/run/main-1/step/1")).text
        assert page.count("class=silent") + page.count("<tr ><th") == GROUPS_SHOWN
        assert f"The first {GROUPS_SHOWN} of {GROUPS_SHOWN + 20} groups" in page
        found = (await client.get("/run/main-1/step/1", params={"task": f"task {GROUPS_SHOWN + 19}"})).text
        assert f"task {GROUPS_SHOWN + 19}</" not in page
        assert f"task {GROUPS_SHOWN + 19}<td>" in found


async def test_a_viewer_does_not_start_the_reading_anew_while_the_server_stops() -> None:
    async with served(archive()) as (client, watch):
        async with client.stream("GET", "/events") as stream:
            told = (line async for line in stream.aiter_lines() if line.startswith("data: "))
            while '"ready":true' not in await anext(told):
                pass
            watch.stop_viewing()
            assert [line async for line in told] == []
        await watch.close()
        watch.touch()
        assert watch.source is None
