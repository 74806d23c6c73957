"""The pages of steps, episodes and runs side by side, from recorded logs, as a browser gets them."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from bombus.hive import events as ev
from bombus.insight.watch import LogWatch
from bombus.insight.web.app import create_app
from bombus.replay.archive import FileSource
from bombus.replay.episode.story import read_story
from bombus.replay.source import Source, state_at
from tests.logs.facts import FOLDER, TINY

ARCHIVES = pytest.mark.parametrize("archive", [TINY, FOLDER / "0.1.0-rooms.bombuslog"], ids=["tiny", "rooms"])


async def pages(archive: Path, *paths: str) -> list[httpx.Response]:
    """Get pages of a log, after it was read."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[Source]:
        with FileSource.open(archive) as source:
            yield source

    watch = LogWatch(opened)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(create_app(watch)), base_url="http://127.0.0.1"
    ) as client:
        with watch.viewing():
            async with asyncio.timeout(30):
                while not watch.is_ready:
                    await asyncio.sleep(0.01)
            found = [await client.get(path) for path in paths]
    await watch.close()
    return found


async def events(archive: Path) -> list[tuple[int, ev.AnyEvent]]:
    with FileSource.open(archive) as source:
        return [(entry.seq, entry.event) async for entry in source.events()]


async def test_a_steps_page_has_a_cell_for_each_episode_with_its_reward_and_a_way_to_it() -> None:
    batch = next(event for _, event in await events(TINY) if isinstance(event, ev.BatchReady))
    (page,) = await pages(TINY, f"/run/main-{batch.run}/step/{batch.step}")
    cells = re.findall(r'href="/episode/([^"]+)" title="[^"]*">([^<]+)</a>', page.text)
    expected = [(each.episode, f"{each.reward:.4g}") for group in batch.groups for each in group.episodes]
    assert cells == expected
    assert len(expected) > 2


async def test_cells_outside_the_asked_range_of_rewards_are_dimmed_and_groups_without_one_are_left_out() -> None:
    path = "/run/main-1/step/1"
    everything, some, none = await pages(TINY, path, f"{path}?low=0.9", f"{path}?low=7")
    assert 0 < some.text.count('class="cell"') < everything.text.count('class="cell"')
    assert "No group matches." in none.text


@ARCHIVES
async def test_every_episode_has_a_page_that_says_what_the_whole_log_says_of_it(archive: Path) -> None:
    claimed = [
        name for _, event in await events(archive) if isinstance(event, ev.EpisodeClaimed) for name in event.episodes
    ]
    assert claimed
    found = await pages(archive, *(f"/episode/{name}" for name in claimed))
    with FileSource.open(archive) as source:
        for name, page in zip(claimed, found, strict=True):
            story = await read_story(source, name)
            assert page.status_code == 200
            assert f"<h1>episode {name}</h1>" in page.text
            assert page.text.count('<section id="call-') == len(story.calls)
            if story.fate.startswith("trained"):
                assert story.fate in page.text


@ARCHIVES
async def test_a_story_that_is_read_from_before_its_claim_is_the_whole_story(archive: Path) -> None:
    with FileSource.open(archive) as source:
        async for entry in source.events():
            if isinstance(entry.event, ev.EpisodeClaimed):
                for name in entry.event.episodes:
                    start = await state_at(source, entry.seq - 1)
                    assert await read_story(source, name, (start, entry.seq - 1)) == await read_story(source, name)


async def test_an_earlier_position_shows_the_episode_as_it_was_then() -> None:
    claim, name = next(
        (seq, event.episodes[0]) for seq, event in await events(TINY) if isinstance(event, ev.EpisodeClaimed)
    )
    before, then = await pages(TINY, f"/episode/{name}?at={claim - 1}", f"/episode/{name}?at={claim}")
    assert (before.status_code, then.status_code) == (404, 200)
    assert "trained in" not in then.text


async def test_runs_are_compared_in_charts_whose_points_have_the_run() -> None:
    page, points = await pages(TINY, "/runs", "/runs/points.json?run=main-1&run=main-2")
    assert "main-2 compared with main-1" in page.text
    found = json.loads(points.text)["points"]["reward"]
    assert {point["run"] for point in found} == {"main-1", "main-2"}


@pytest.mark.parametrize("path", ["/run/main-1/step/99", "/run/main-9/step/1", "/episode/main-1-99999", "/episode/x"])
async def test_what_is_not_on_the_log_is_a_sentence(path: str) -> None:
    (page,) = await pages(TINY, path)
    assert page.status_code == 404
    assert "main-" in page.text
