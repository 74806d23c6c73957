"""Record this version's golden log: `python -m tests.logs.record` (half a minute) writes `<version>.bombuslog`
and the facts that every later version must find in it. Run it once before a release; never overwrite an old one.

A real hive plays a little of everything: two clients, several turns, a branch, two replies to one call, rewards for
calls, a group without signal, an evaluation, aborts of three kinds, a leader that hangs and is deposed, a second run.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from itertools import count
from pathlib import Path

import psutil
from openai import OpenAI

from bombus import Credentials, Job, SwarmClient, Task, WorkflowOutput
from bombus.bus import Bus
from bombus.bus.follow import Follower
from bombus.hive.events import AnyEvent, EpochOpened
from bombus.hive.failures import FailureKind
from bombus.machine.process import free_port
from bombus.replay.archive import FileSource
from tests.logs.facts import FOLDER, facts_of

NUM_REPEAT = 2
JOB = Job(
    model="tiny",
    batch_size=2,
    num_repeat=NUM_REPEAT,
    lr=1e-3,
    max_prompt_length=128,
    max_response_length=64,
    max_response_length_in_one_turn=16,
    max_model_len=192,
    swarm_mode_sample_collection_method="rollout_until_finish_enough_non_dummy_tasks",
)
OPENAI = OpenAI(api_key="each episode has its own")
TAKEOVER_S = 20.0


@contextmanager
def hive(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    command = [sys.executable, "-m", "bombus", "up", "--port", str(free_port()), "--data-dir", str(folder)]
    with (folder.parent / "up.log").open("wb") as log:
        up = subprocess.Popen(
            [*command, "--coordinators", "2", "--threads", "1"], stdout=subprocess.PIPE, stderr=log, text=True
        )
    try:
        assert up.stdout is not None
        ready = next(line for line in up.stdout if line.startswith("ready "))
        yield ready.split()[1], psutil.Process(up.pid)
    finally:
        up.send_signal(signal.SIGINT)
        up.wait(60)


def chat(credentials: Credentials, messages: list[dict[str, str]], **more: object) -> str:
    model = OPENAI.with_options(base_url=credentials.base_url, api_key=credentials.api_key)
    reply = model.chat.completions.create(model=credentials.model, messages=messages, max_tokens=6, **more)  # type: ignore[call-overload]
    return reply.choices[0].message.content or ""


class Player:
    """A player that gives rewards in turn: it only matters whether those of a group are equal or different."""

    def __init__(self, *rewards: float | list[float]) -> None:
        self._rewards = rewards
        self._turn = count()

    def _outcome(self) -> WorkflowOutput:
        turn = next(self._turn)
        return WorkflowOutput(reward=self._rewards[turn % len(self._rewards)], metadata={"turn": turn})

    def one_turn(self, task: Task, credentials: Credentials) -> WorkflowOutput:
        chat(credentials, [{"role": "user", "content": task.main_query}], n=2)
        return self._outcome()

    def branching(self, task: Task, credentials: Credentials) -> WorkflowOutput:
        """Play two turns, and then one on a rewritten history."""
        question = {"role": "user", "content": task.main_query}
        answer = chat(credentials, [question])
        more = {"role": "user", "content": "and b="}
        chat(credentials, [question, {"role": "assistant", "content": answer}, more])
        chat(credentials, [question, {"role": "assistant", "content": "z"}, more])
        return self._outcome()


def play(url: str, nats: str, up: psutil.Process) -> None:
    with SwarmClient(url, verbose=False) as first, SwarmClient(url, verbose=False) as second:
        first.auto_sync_train_config_and_start_engine(JOB)
        first.run_group(Task(task_id="equal", main_query="c="), Player(0.5).one_turn, NUM_REPEAT)
        first.run_group(Task(task_id="a", main_query="a="), Player(0.0, 1.0).one_turn, NUM_REPEAT)
        second.run_group(Task(task_id="tree", main_query="b="), Player(0.25, 0.75).branching, NUM_REPEAT)
        given_up, lost = (each.episode_uuid for each in second.begin_episodes(2))
        second.abort_episode(given_up, detail="not needed")
        second.abort_episode(lost, failure=FailureKind.ENVIRONMENT, detail="the tool's server was away")
        episode, credentials = first.begin_episode(episode_type="eval")
        chat(credentials, [{"role": "user", "content": "a="}], temperature=0.0)
        first.end_episode(Task(task_id="held-out"), episode, WorkflowOutput(reward=0.5, is_success=True))
        asyncio.run(depose_the_leader(nats, up))
        first.run_group(Task(task_id="a", main_query="a="), Player(1.0, 0.0).one_turn, NUM_REPEAT)
        each_call: list[float] = [0.0, 0.5, 1.0]
        second.run_group(Task(task_id="tree", main_query="b="), Player(each_call, [0.0] * 3).branching, NUM_REPEAT)
        first.wait_for_status("ENGINE.ROLLING")
        second.begin_episode()  # open when its engine is stopped
        first.stop_engine()
        first.auto_sync_train_config_and_start_engine(JOB)
        first.run_group(Task(task_id="a", main_query="a="), Player(0.0, 1.0).one_turn, NUM_REPEAT)
        second.run_group(Task(task_id="d", main_query="d="), Player(1.0, 0.0).one_turn, NUM_REPEAT)
        first.wait_for_status("ENGINE.ROLLING")
        second.run_group(Task(task_id="pool", main_query="e="), Player(1.0).one_turn, 1)


async def depose_the_leader(nats: str, up: psutil.Process) -> None:
    """Suspend the leader until the other coordinator has opened its epoch, then resume it: it is deposed."""
    leaders: list[str] = []

    def note(_: int, event: AnyEvent) -> None:
        if isinstance(event, EpochOpened):
            leaders.append(event.leader)

    async with await Bus.connect(nats, "main") as bus:
        follower = Follower(bus, note, lambda *_: None)
        following = asyncio.create_task(follower.run())
        await follower.caught_up()
        epoch = follower.hive.epoch
        (leading,) = [child for child in up.children() if leaders[-1] in child.cmdline()]
        leading.suspend()
        try:
            await follower.wait_for(lambda state: state.epoch > epoch, TAKEOVER_S)
        finally:
            leading.resume()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default=version("bombus"), help="of the log (default: %(default)s)")
    path = FOLDER / f"{parser.parse_args().name}.bombuslog"
    if path.exists():
        sys.exit(f"{path} is recorded already, and stays as it is")
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        with hive(data) as (url, up):
            play(url, (data / "nats-url").read_text().strip(), up)
        exporting = [sys.executable, "-m", "bombus", "log", "export", str(path), "--data", str(data)]
        subprocess.run(exporting, check=True, env=os.environ)
    with FileSource.open(path) as source:
        facts = asyncio.run(facts_of(source))
    path.with_suffix(".json").write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
