"""Rollouts against a whole hive: a real bus, coordinator and gateway, a replica with scripts, and real agents."""

import asyncio
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from bombus import AsyncSwarmClient
from bombus.bus import Bus, Reader
from bombus.hive import inbox
from bombus.hive.events import AbortReason, EpisodeAborted, EpisodeEnded, EpisodeType, Weights, decode_event
from bombus.hive.generation import Generate
from bombus.hive.state import Phase
from bombus.rollout import episode, run
from bombus.rollout.episode import Pointless
from bombus.rollout.process import StopReason
from bombus.rollout.records import LossReason, LostEpisode, PlayedEpisode
from bombus.sdk.errors import EngineOffline
from bombus.sdk.types import Task, WorkflowOutput
from tests.gateway.openai_hive import ENGINE, GatewayHive, Send, new_id, says
from tests.gateway.swarm_hive import played_hive
from tests.patience import PATIENCE_S, until
from tests.rollout.hive import AGENT, Rolled, repository, write_tasks

T = TypeVar("T")


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Go on soon after an infrastructure failure."""
    monkeypatch.setattr(run, "FAILURE_PAUSE_S", 0.1)


@pytest.fixture
def one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait two seconds for the calls of an agent that makes none, not eight."""
    monkeypatch.setattr(episode, "LOOKS_FOR_CALLS", 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a folder with two tasks and a workspace."""
    write_tasks(tmp_path, {"prompt": "the quick", "task_id": "a"}, {"prompt": "brown fox", "task_id": "b"})
    repository(tmp_path)
    return tmp_path


async def events(bus: Bus, kind: type[T], count: int = 1) -> list[T]:
    """Return the first `count` events of a kind, once there are so many."""
    found: list[T] = []
    async with asyncio.timeout(PATIENCE_S), Reader(bus, bus.subjects.events_stream, start_seq=1) as reader:
        while len(found) < count:
            found += [event for stored in await reader.read() if isinstance(event := decode_event(stored.data), kind)]
    return found


async def called(served: GatewayHive, count: int) -> None:
    """Wait until the replica has had so many calls."""
    await until(lambda: len(served.replica.requests) >= count)


async def hangs(request: Generate, send: Send) -> None:
    """Never answer a call."""
    await asyncio.Event().wait()


async def test_every_task_is_played_in_copies_of_the_workspace_and_rewarded(
    served: GatewayHive, client: AsyncSwarmClient, folder: Path
) -> None:
    rolled = Rolled(folder, client, repeat=2)
    tally = await rolled.run()
    assert tally.rewards == [0.75] * 4
    assert [record["calls"] for record in rolled.records()] == [1] * 4
    await served.until(lambda engine: engine.batch is not None)
    batch = served.engine.batch
    assert batch is not None
    assert sorted((group.task, len(group.episodes)) for group in batch.groups) == [("a", 2), ("b", 2)]
    assert [path.name for path in (folder / "repo").iterdir()] == ["check.sh"], "the original is left alone"
    assert not list(rolled.left_over())


async def test_an_episode_ends_with_what_is_to_know_of_it_and_its_output_is_kept(
    bus: Bus, client: AsyncSwarmClient, folder: Path
) -> None:
    write_tasks(folder, {"prompt": "the quick", "task_id": "a"})
    rolled = Rolled(folder, client, eval=True)
    await rolled.run()
    (ended,) = await events(bus, EpisodeEnded)
    assert ended.type == EpisodeType.EVAL
    (outcome,) = ended.outcomes
    assert outcome.task == "a"
    assert {name: outcome.metadata[name] for name in ("exit_code", "calls", "truncated", "stopped", "output")} == {
        "exit_code": 0,
        "calls": 1,
        "truncated": False,
        "stopped": "",
        "output": "ok\n",
    }
    assert outcome.log_metrics.keys() == {"agent_s", "agent_failed", "truncated"}
    (record,) = rolled.records()
    assert Path(record["output"]).read_text() == "ok\n"
    assert record["completion_tokens"] > 0


async def test_the_reward_command_sees_the_task_and_the_output_but_no_key(
    client: AsyncSwarmClient, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ANTHROPIC_API_KEY", "BOMBUS_ADMIN_KEY", "CODEX_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "sk-of-the-user")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.setenv("GIT_DIR", "/elsewhere/.git")
    (folder / "repo" / "check.sh").write_text(
        """#!/bin/sh
        env | grep -q sk-of-the-user && exit 1
        test "$LC_ALL$LC_NUMERIC$GIT_DIR" = C || exit 4
        test "$TMPDIR" = "$(dirname $(dirname $PWD))/tmp" || exit 5
        test "$BOMBUS_ENDED/$BOMBUS_EXIT_CODE/$1/$BOMBUS_PROMPT" = "exited/3/17/the quick" || exit 2
        test "$BOMBUS_WORKSPACE" = "$(pwd)" || exit 3
        grep -q ok "$BOMBUS_OUTPUT" && echo "$BOMBUS_TASK" | grep -q '"issue":17' && echo 5
        """
    )
    write_tasks(folder, {"prompt": "the quick", "issue": 17})
    rolled = Rolled(
        folder, client, agent=f"sh -c '{AGENT} \"$BOMBUS_PROMPT\" 1; exit 3'", reward="./check.sh {issue}", out=None
    )
    assert (await rolled.run()).rewards == [5.0], "an agent that fails is rewarded for what it did"


async def test_a_sandbox_is_put_before_both_commands(client: AsyncSwarmClient, folder: Path) -> None:
    (folder / "repo" / "check.sh").write_text('#!/bin/sh\ntest "$BOX" = "$(pwd)" && cat inside\n')
    write_tasks(folder, {"prompt": "the quick"})
    agent = f'sh -c \'echo 2 > inside; test "$BOX" = "$PWD" && {AGENT} x 1\''
    rolled = Rolled(folder, client, agent=agent, sandbox="env BOX={workspace}")
    assert (await rolled.run()).rewards == [2.0]


async def test_several_agents_run_at_once(served: GatewayHive, client: AsyncSwarmClient, folder: Path) -> None:
    together = asyncio.Barrier(3)

    async def waits(request: Generate, send: Send) -> None:
        await together.wait()
        await says("ok")(request, send)

    served.replica.scripts.extend([waits] * 3)
    write_tasks(folder, {"prompt": "the quick"})
    assert (await Rolled(folder, client, repeat=3, concurrency=3).run()).rewards == [0.75] * 3


# ---- limits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        ({"turns_max": 2}, StopReason.TURNS),
        ({"tokens_max": 2}, StopReason.TOKENS),
        ({"timeout_s": 3.0}, StopReason.TIMEOUT),
    ],
)
async def test_an_agent_over_a_limit_is_stopped_and_rewarded_all_the_same(
    served: GatewayHive, client: AsyncSwarmClient, folder: Path, limit: dict[str, Any], reason: StopReason
) -> None:
    served.replica.scripts.extend([says("ok"), says("ok"), hangs])
    (folder / "repo" / "check.sh").write_text("#!/bin/sh\necho $BOMBUS_ENDED; exit 1\n")
    write_tasks(folder, {"prompt": "the quick"})
    rolled = Rolled(folder, client, agent=f"{AGENT} {{prompt}} 9", **limit)
    tally = await rolled.run()
    assert tally.rewards == [0.0]
    assert tally.stopped == {reason: 1}
    (outcome,) = (await events(served.bus, EpisodeEnded))[0].outcomes
    assert outcome.metadata["truncated"]
    assert outcome.metadata["stopped"] == reason
    assert outcome.metadata["calls"] >= 2, "the one that was cut off is recorded too"


async def test_an_agent_over_a_limit_may_be_aborted_instead(
    served: GatewayHive, client: AsyncSwarmClient, folder: Path
) -> None:
    served.replica.scripts.extend([says("ok"), hangs])
    write_tasks(folder, {"prompt": "the quick"})
    rolled = Rolled(folder, client, agent=f"{AGENT} {{prompt}} 9", turns_max=1, on_limit="abort")
    tally = await rolled.run()
    assert tally.rewards == []
    assert tally.lost == {"over a limit: turns": 1}
    (aborted,) = await events(served.bus, EpisodeAborted)
    assert (aborted.reason, aborted.detail) == (AbortReason.CLIENT, "turns")


# ---- what fails -----------------------------------------------------------------------------------------------------


async def test_an_episode_whose_reward_command_fails_is_aborted_and_played_again(
    bus: Bus, client: AsyncSwarmClient, folder: Path
) -> None:
    (folder / "repo" / "check.sh").write_text(
        f"#!/bin/sh\ntest -e {folder}/seen && echo 1 && exit\ntouch {folder}/seen\necho no judge >&2\nexit 127\n"
    )
    write_tasks(folder, {"prompt": "the quick"})
    rolled = Rolled(folder, client)
    tally = await rolled.run()
    assert tally.rewards == [1.0]
    assert not tally.lost
    (aborted,) = await events(bus, EpisodeAborted)
    assert aborted.reason == AbortReason.INFRA
    assert aborted.detail == "the reward command could not start (exit code 127): no judge"
    assert [record["reward"] for record in rolled.records()] == [None, 1.0]


@pytest.mark.parametrize(
    ("check", "limit_s", "why"),
    [("sleep 1000", 0.5, "the reward command took longer than 0.5 s"), ("kill -9 $$", PATIENCE_S, "ended by signal 9")],
)
async def test_an_episode_whose_reward_command_goes_on_failing_is_lost(
    client: AsyncSwarmClient, folder: Path, check: str, limit_s: float, why: str
) -> None:
    (folder / "repo" / "check.sh").write_text(f"#!/bin/sh\n{check}\n")
    write_tasks(folder, {"prompt": "the quick"})
    tally = await Rolled(folder, client, retries=1, reward_timeout_s=limit_s).run()
    assert tally.rewards == []
    ((lost, count),) = tally.lost.items()
    assert why in lost
    assert count == 1


async def test_an_agent_that_removes_its_own_folder_cannot_be_judged(client: AsyncSwarmClient, folder: Path) -> None:
    write_tasks(folder, {"prompt": "the quick"})
    rolled = Rolled(folder, client, agent=f"sh -c '{AGENT} x 1; rm -r {{folder}}'", retries=0, out=None)
    tally = await rolled.run()
    assert tally.rewards == []
    assert tally.lost == {
        "infrastructure failure: --reward: ./check.sh cannot be started: No such file or directory": 1
    }


@pytest.mark.parametrize("left", ["ln -s ../../victim", "mkfifo"])
async def test_an_agent_cannot_make_bombus_write_or_wait_at_a_name_in_its_folder(
    client: AsyncSwarmClient, folder: Path, left: str
) -> None:
    victim = folder / "victim"
    victim.write_text("dear")
    write_tasks(folder, {"prompt": "the quick"})
    script = f"{AGENT} x 1; for name in agent reward reward-errors; do rm -f ../$name.txt; {left} ../$name.txt; done"
    tally = await asyncio.wait_for(Rolled(folder, client, agent=f"sh -c '{script}'", out=None).run(), PATIENCE_S)
    assert tally.rewards == [0.75]
    assert victim.read_text() == "dear"


async def test_what_outlives_an_episode_in_its_folder_is_in_no_other_episodes_way(
    client: AsyncSwarmClient, folder: Path
) -> None:
    daemon = "for _ in $(seq 50); do mkdir -p $BOMBUS_WORKSPACE; echo x > $BOMBUS_WORKSPACE/left; sleep 0.05; done"
    (folder / "repo" / "daemon.sh").write_text(daemon)
    agent = f"sh -c 'test ! -e left && {AGENT} x 1; setsid sh daemon.sh > /dev/null 2>&1 & sleep 0.3'"
    tally = await Rolled(folder, client, agent=agent, repeat=2, concurrency=1).run()
    assert tally.rewards == [0.75] * 4
    assert not tally.lost


async def test_a_task_that_always_fails_does_not_end_the_episodes_of_others(
    client: AsyncSwarmClient, folder: Path
) -> None:
    (folder / "repo" / "check.sh").write_text('#!/bin/sh\ncase "$BOMBUS_TASK" in *quick*) exit 127;; esac; echo 1\n')
    tally = await Rolled(folder, client, repeat=4, retries=1, concurrency=8).run()
    assert tally.rewards == [1.0] * 4
    assert tally.lost.total() == 4


@pytest.mark.usefixtures("one_look")
async def test_an_agent_that_makes_no_call_ends_the_rollout_with_its_last_words(
    served: GatewayHive, client: AsyncSwarmClient, folder: Path
) -> None:
    rolled = Rolled(folder, client, repeat=50, agent="sh -c 'echo no such model >&2; exit 2'", concurrency=2)
    with pytest.raises(
        Pointless, match=r"(?s)exit code 2 .* none of its model calls was answered.*ends with:\nno such model"
    ):
        await rolled.run()
    await served.until(lambda engine: not engine.open)
    assert served.engine.next_episode <= 5
    assert not list(rolled.left_over())


@pytest.mark.usefixtures("one_look")
async def test_one_agent_among_others_that_makes_no_call_is_an_infrastructure_failure(
    client: AsyncSwarmClient, folder: Path
) -> None:
    agent = f"sh -c 'test {{task_id}} = b || {AGENT} x 1'"
    tally = await Rolled(folder, client, agent=agent, concurrency=1, retries=0).run()
    assert tally.rewards == [0.75]
    assert tally.lost == {"infrastructure failure: the agent made no model call (exit code 0)": 1}


@pytest.mark.usefixtures("one_look")
async def test_an_agent_that_ends_before_the_others_have_called_does_not_end_them(
    served: GatewayHive, client: AsyncSwarmClient, folder: Path
) -> None:
    agent = f"sh -c 'test {{task_id}} = b || ( sleep 0.5; {AGENT} x 1; sleep 1 )'"
    tally = await Rolled(folder, client, agent=agent, concurrency=2, retries=0).run()
    assert tally.rewards == [0.75]
    assert tally.lost == {"infrastructure failure: the agent made no model call (exit code 0)": 1}


@pytest.mark.usefixtures("one_look")
async def test_an_agent_that_fails_while_no_replica_serves_is_played_again(
    served: GatewayHive, client: AsyncSwarmClient, folder: Path
) -> None:
    write_tasks(folder, {"prompt": "the quick"})
    await served.replica_leaves("replica-1")
    rolled = Rolled(folder, client, agent=f"sh -c 'test -e {folder}/back && {AGENT} x 1'")
    running = asyncio.create_task(rolled.run())
    await until(lambda: rolled.heard.results)
    await served.alive("replica-1", served.replica)
    (folder / "back").touch()
    tally = await running
    assert tally.rewards == [0.75]
    lost = [result.why for result in rolled.heard.results if isinstance(result, LostEpisode)]
    assert lost
    assert set(lost) == {"no replica serves the model, and the agent failed (exit code 1)"}


@pytest.mark.parametrize(("exit_code", "lost"), [(1, 1), (0, 0)])
async def test_an_agent_that_failed_while_the_hive_was_away_is_not_rewarded(
    served: GatewayHive, folder: Path, exit_code: int, lost: int
) -> None:
    api = Outage()
    write_tasks(folder, {"prompt": "the quick"})
    agent = f"sh -c '{AGENT} x 1; touch {folder}/has_called; sleep 3; exit {exit_code}'"
    async with AsyncSwarmClient(served.base_url, verbose=False, transport_=api) as client:
        rolled = Rolled(folder, client, agent=agent, retries=0)
        running = asyncio.create_task(rolled.run())
        await called(served, 1)
        await until((folder / "has_called").exists)
        api.is_shut = True
        await api.was_tried.wait()
        api.is_shut = False
        tally = await running
    assert tally.lost.total() == lost
    if lost:
        assert "the hive was unreachable while the agent ran, and the agent failed (exit code 1)" in str(tally.lost)


class Outage(httpx.AsyncHTTPTransport):
    """The way to a hive, which can be shut."""

    def __init__(self) -> None:
        super().__init__()
        self.is_shut = False
        self.was_tried = asyncio.Event()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self.is_shut:
            self.was_tried.set()
            raise httpx.ConnectError("the API is shut", request=request)
        return await super().handle_async_request(request)


async def test_infrastructure_that_always_fails_ends_the_rollout(client: AsyncSwarmClient, folder: Path) -> None:
    (folder / "repo" / "check.sh").write_text("#!/bin/sh\nexit 126\n")
    write_tasks(folder, *({"prompt": "the quick", "task_id": str(number)} for number in range(40)))
    with pytest.raises(Pointless, match="16 infrastructure failures in a row, the last: the reward command could not"):
        await Rolled(folder, client).run()


async def test_an_episode_that_the_hive_takes_back_is_stopped_and_played_again_without_a_retry(
    served: GatewayHive, client: AsyncSwarmClient, folder: Path
) -> None:
    served.replica.scripts.append(hangs)
    write_tasks(folder, {"prompt": "the quick"})
    rolled = Rolled(folder, client, retries=0)
    running = asyncio.create_task(rolled.run())
    await called(served, 1)
    (episode,) = served.engine.open
    abort = inbox.Abort(id=new_id(), engine=ENGINE, client=client.client_uuid, episodes=(episode,))
    await served.bus.inbox.request(abort)
    assert (await running).rewards == [0.75]
    lost, played = rolled.heard.results
    assert isinstance(lost, LostEpisode)
    assert (lost.loss, lost.episode) == (LossReason.TAKEN_BACK, episode)
    assert isinstance(played, PlayedEpisode)


async def test_a_rollout_that_is_cancelled_aborts_what_is_open_and_removes_its_folders(
    served: GatewayHive, client: AsyncSwarmClient, folder: Path
) -> None:
    served.replica.scripts.extend([hangs, hangs])
    rolled = Rolled(folder, client)
    running = asyncio.create_task(rolled.run())
    await called(served, 2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await served.until(lambda engine: not engine.open)
    (aborted,) = await events(served.bus, EpisodeAborted)
    assert len(aborted.episodes) == 2
    assert aborted.detail == "the rollout was stopped"
    assert not list(rolled.left_over())


async def test_without_a_job_there_is_nothing_to_play(bus: Bus, folder: Path) -> None:
    async with played_hive(bus) as played, played.served() as url, AsyncSwarmClient(url, verbose=False) as client:
        with pytest.raises(EngineOffline):
            await Rolled(folder, client).run()


# ---- steps ----------------------------------------------------------------------------------------------------------


async def test_a_rollout_goes_on_until_the_trainer_has_made_its_steps(
    served: GatewayHive, client: AsyncSwarmClient, folder: Path
) -> None:
    rolled = Rolled(folder, client, repeat=2, steps=2, concurrency=4)
    running = asyncio.create_task(rolled.run())
    for _ in range(2):
        await served.until(lambda engine: engine.phase == Phase.WEIGHT_SYNCING)
        await train(served)
    tally = await asyncio.wait_for(running, PATIENCE_S)
    assert tally.steps == 2
    assert len(tally.rewards) >= 8
    await served.until(lambda engine: not engine.open)


class LateAnswers(AsyncSwarmClient):
    """A client to whom the answers to its ends come only once they are let through."""

    def __init__(self, url: str) -> None:
        super().__init__(url, verbose=False)
        self.let_through = asyncio.Event()

    async def end_episode(self, task: Task, episode_uuid: str, workflow_output: WorkflowOutput) -> None:
        await super().end_episode(task, episode_uuid, workflow_output)
        await self.let_through.wait()


async def test_a_reward_whose_answer_comes_after_the_last_step_is_counted(served: GatewayHive, folder: Path) -> None:
    async with LateAnswers(served.base_url) as client:
        rolled = Rolled(folder, client, repeat=2, steps=1, concurrency=4)
        running = asyncio.create_task(rolled.run())
        await served.until(lambda engine: engine.phase == Phase.WEIGHT_SYNCING)
        await train(served)
        await until(lambda: rolled.rollout.tally.steps == 1)
        client.let_through.set()
        tally = await asyncio.wait_for(running, PATIENCE_S)
    assert len(tally.rewards) == 4


async def train(served: GatewayHive) -> None:
    """Do the trainer's part of a step, and load the weights."""
    batch = served.engine.batch
    assert batch is not None
    run, step = batch.run, batch.step
    done = inbox.StepDone(
        id=new_id(),
        engine=ENGINE,
        run=run,
        step=step,
        trainer_epoch=served.epoch,
        checkpoint="nowhere",
        checkpoint_digest="0",
    )
    await served.bus.inbox.send(done)
    weights = Weights(where="nowhere", tokenizer="tokenizer-1")
    saved = inbox.WeightsSaved(
        id=new_id(), engine=ENGINE, run=run, step=step, trainer_epoch=served.epoch, weights=weights
    )
    await served.bus.inbox.send(saved)
    await served.alive("replica-1", served.replica, step)
    await served.until(lambda engine: engine.phase == Phase.ROLLING)
