"""The screen beside a whole hive, which it reaches through a gateway alone."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from openai import OpenAI
from textual.pilot import Pilot

from bombus import Job, SwarmClient, Task, WorkflowOutput
from bombus.hive.state import Phase
from bombus.insight.watch import LogWatch
from bombus.sdk.errors import SwarmError
from bombus_overwatch.app import Overwatch
from bombus_overwatch.model import HiveView
from bombus_overwatch.screen import Link, screen_data
from bombus_overwatch.service import BusLink, GatewayLink
from tests.overwatch.test_app import WIDE, shows
from tests.patience import PATIENCE_S
from tests.system.test_up import FRESH, Up

ADMIN, CLIENT = "an-admin-key-for-tests", "a-client-key-for-tests"


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    for name, key in (("admin", ADMIN), ("client", CLIENT)):
        (tmp_path / name).write_text(key)
    keys = ("--admin-key-file", str(tmp_path / "admin"), "--client-key-file", str(tmp_path / "client"))
    running = Up(tmp_path, *keys)
    yield running
    assert running.interrupt() == []


def play_a_step(client: SwarmClient) -> str:
    """Have the hive make one step. Return the id of an episode that was played."""
    client.auto_sync_train_config_and_start_engine(Job(model="tiny", batch_size=1, num_repeat=2, bombus=FRESH))
    names: list[str] = []
    for reward in (0.25, 0.75):
        episode, credentials = client.begin_episode()
        model = OpenAI(base_url=credentials.base_url, api_key=credentials.api_key)
        model.chat.completions.create(model="any", messages=[{"role": "user", "content": "a="}], max_tokens=4)
        client.end_episode(Task(task_id="adding", main_query="a="), episode, WorkflowOutput(reward=reward))
        names.append(episode.partition(".")[0])
    return names[0]


async def until(pilot: Pilot[None], holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await pilot.pause(0.05)


async def test_over_a_gateway_a_person_sees_a_step_aborts_an_episode_and_stops_the_job(up: Up) -> None:
    with pytest.raises(SwarmError, match="needs the hive's admin key"):
        async with GatewayLink(f"{up.url}/k/{CLIENT}").open():
            pass

    link = GatewayLink(f"{up.url}/k/{ADMIN}")
    watch = LogWatch(link.open, moment=HiveView)
    app = Overwatch("a hive", watch, operator=link)
    with SwarmClient(up.url, api_key=ADMIN) as client:
        async with app.run_test(size=WIDE, notifications=True) as pilot:
            watch.touch()
            played = await asyncio.to_thread(play_a_step, client)
            await until(pilot, lambda: app.engine == "main" and app.live.hive.engine("main").version == 1)
            data = screen_data(app.record, app.live, 0, "main")
            assert (data.training.last_step, data.rewards.train) == (1, ((1, 0.5),))
            await until(pilot, lambda: app.link[0] == Link.LIVE)
            await shows(app, pilot, "step 1 is done")

            episode, _ = await asyncio.to_thread(client.begin_episode, episode_type="train")
            name = episode.partition(".")[0]
            await until(pilot, lambda: name in app.live.hive.engine("main").open)
            await pilot.press("enter", "enter", "a")
            await shows(app, pilot, f"Abort episode {name}")
            await pilot.press("y")
            await shows(app, pilot, f"episode {name} is aborted")
            await shows(app, pilot, "aborted: client (by an operator)")
            assert not await asyncio.to_thread(client.can_continue_episode, episode)
            await pilot.press("escape", "down", "enter", "enter")
            await shows(app, pilot, f"› step 1 adding › {played}")
            await shows(app, pilot, "user      a=")

            await pilot.press("s", "y")
            await until(pilot, lambda: app.live.hive.engine("main").phase == Phase.OFFLINE)
            await watch.close()

    on_bus = BusLink(up.nats, "main")
    watch = LogWatch(on_bus.open, moment=HiveView)
    app = Overwatch("a hive", watch, operator=on_bus)
    async with app.run_test(size=WIDE) as pilot:
        watch.touch()
        await until(pilot, lambda: app.link[0] == Link.LIVE and app.engine == "main")
        await pilot.press("enter", "down", "enter", "enter")
        await shows(app, pilot, "user      a=")
        await watch.close()
