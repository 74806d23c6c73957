"""Steps per minute of one small hive when it trains in step and when rolling goes on (`max_staleness` 0, 1, 2).

The tiny one-turn task, 16 letters x 8 episodes a step; after each reply the environment takes its time, as a tool or a
test suite would. In step the clients play one batch after the other. Otherwise each begins a new group when one has
ended, and there are as many as the bound lets be under way: a batch, and one more for each version of staleness.

python -m bench.asynchronous [--seconds 60] [--tool-s 1.0] [--staleness 0 1 2]
"""

import argparse
import asyncio
import contextlib
import itertools
import random
import tempfile
from pathlib import Path

import msgspec

from bombus import AsyncSwarmClient, Job
from bombus.bus import Bus
from bombus.bus.follow import Follower
from bombus.demo import hive
from bombus.demo.games import GameModel, GameTask, Letters, Played
from bombus.demo.player import Player
from bombus.hive import events as ev
from bombus.hive.events import AnyEvent, DropReason

TASKS, REPEAT = 16, 8
WARM_STEPS = 5
RATE = 3e-3
ENGINE = "main"


class SlowLetters(Letters):
    """An environment that makes each episode wait, for half to one and a half times `tool_s`."""

    def __init__(self, tool_s: float) -> None:
        super().__init__()
        self._tool_s = tool_s
        self._random = random.Random(0)

    async def play(self, model: GameModel, task: GameTask) -> Played:
        played = await super().play(model, task)
        await asyncio.sleep(self._tool_s * self._random.uniform(0.5, 1.5))
        return played


class Seen:
    """What the log has of the newest run."""

    steps: list[ev.StepCompleted]
    dropped: int

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.steps, self.dropped = [], 0

    def take(self, _position: int, event: AnyEvent) -> None:
        match event:
            case ev.EngineStarted():
                self._begin()
            case ev.StepCompleted():
                self.steps.append(event)
            case ev.GroupDropped() if event.reason == DropReason.STALE:
                self.dropped += len(event.episodes)
            case _:
                pass


def job_of(max_staleness: int) -> Job:
    return Job(
        model="tiny",
        batch_size=TASKS,
        num_repeat=REPEAT,
        max_prompt_length=256,
        max_response_length=200,
        max_response_length_in_one_turn=64,
        max_model_len=512,
        lr=RATE,
        bombus={
            "rollout": {"max_env_worker": 1024},
            "collection": {"max_staleness": max_staleness},
            "trainer": {"weight_decay": 0.0, "loss_aggregation": "token", "resume": "never"},
        },
    )


async def measure(client: AsyncSwarmClient, seen: Seen, max_staleness: int, seconds: float, tool_s: float) -> str:
    await client.auto_sync_train_config_and_start_engine(job_of(max_staleness))
    game = SlowLetters(tool_s)
    player, numbers = Player(client, game), itertools.count()

    rng = random.Random(0)

    async def play_group() -> None:
        drawn = game.training(rng)
        question = msgspec.structs.replace(drawn, id=f"{drawn.id}-{next(numbers)}")
        await player.play(await player.claim(REPEAT), [question] * REPEAT)

    async def in_step() -> None:
        """Play one batch after the other: what is sampled is trained by the version that sampled it."""
        while True:
            await asyncio.gather(*(play_group() for _ in range(TASKS)))

    async def on_and_on() -> None:
        while True:
            await play_group()

    players = [on_and_on() for _ in range(TASKS * (max_staleness + 1))] if max_staleness else [in_step()]
    playing = [asyncio.create_task(each) for each in players]
    try:
        while len(seen.steps) <= WARM_STEPS or seen.steps[-1].at_ns - seen.steps[WARM_STEPS].at_ns < seconds * 1e9:
            done, _ = await asyncio.wait(playing, timeout=0.2, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
    finally:
        for task in playing:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*playing)
        await player.close()
        await client.stop_engine()
    return row(max_staleness, seen)


def row(max_staleness: int, seen: Seen) -> str:
    steps = seen.steps[WARM_STEPS:]
    minutes = (steps[-1].at_ns - steps[0].at_ns) / 60e9
    counted = steps[1:]

    def mean(name: str) -> float:
        return sum(step.metrics[name] for step in counted) / len(counted)

    oldest = max(step.metrics["staleness_max"] for step in counted)
    share = seen.dropped / (len(seen.steps) * TASKS * REPEAT)
    return (
        f"{max_staleness:13} {len(counted) / minutes:10.1f} {mean('staleness_mean'):8.2f} {oldest:5.0f} "
        f"{mean('stale_share'):7.0%} {share:8.1%} {mean('seconds_waited'):9.2f} {mean('reward_mean'):7.2f}"
    )


async def main(seconds: float, tool_s: float, bounds: list[int]) -> None:
    seen = Seen()
    print("max_staleness  steps/min  age mean   max   stale  dropped  waited s  reward", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        async with hive.running(Path(folder), threads=1) as url, AsyncSwarmClient(url) as client:
            nats = (Path(folder) / "hive/nats-url").read_text().strip()
            async with await Bus.connect(nats, "main") as bus:
                following = asyncio.create_task(Follower(bus, seen.take, lambda *_: None).run())
                for max_staleness in bounds:
                    print(await measure(client, seen, max_staleness, seconds, tool_s), flush=True)
                following.cancel()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each bound, after the first steps")
    parser.add_argument("--tool-s", type=float, default=1.0, help="seconds that an environment takes on average")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2])
    given = parser.parse_args()
    asyncio.run(main(given.seconds, given.tool_s, given.staleness))
