"""Evaluation on a whole hive: a real bus, coordinator and gateway, and a scripted replica."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from bombus import AsyncSwarmClient, Credentials, Task
from bombus.bus import Bus
from bombus.cli import main
from bombus.environments.rollout import Rollout
from bombus.hive.events import AbortReason, EpisodeEnded
from bombus.hive.generation import Finished, Generate
from bombus.hive.state import Phase
from bombus.hive.status.text import render_status
from bombus.sdk.errors import SwarmError
from bombus.tasks.evaluating import NOT_BEGUN, EvalSchedule, EvalScore, EvalSet, Evaluation, wait_until_due
from bombus.tasks.playing import FAILURES_IN_A_ROW_MAX, ServerFailed
from tests.environments.small_environments import Counter
from tests.gateway.openai_hive import GatewayHive, Send, frame_of, gateway_hive, says, tokens_of
from tests.rollout.test_cli import bombus, ended
from tests.rollout.test_rollout import events, train

JOB: dict[str, Any] = {
    "bombus": {
        "model": {"path": "models/bumble", "tools": "hermes"},
        "rollout": {
            "num_repeat": 2,
            "max_prompt_length": 1200,
            "max_response_length": 800,
            "max_response_length_in_one_turn": 200,
        },
        "collection": {"batch_size": 1},
    }
}
WORLDS = """
from pathlib import Path

from bombus import Task
from bombus.environments.plain.marks import reward


class Echo:
    def reset(self, task: Task) -> str:
        return task.main_query

    @reward(weight=1.0)
    def length(self, task: Task) -> float:
        return float(len(task.main_query))


class Fragile(Echo):
    def reset(self, task: Task) -> str:
        if Path("broken").exists():
            raise OSError("the simulator did not start")
        return super().reset(task)
"""


@pytest.fixture
async def served(bus: Bus) -> AsyncIterator[GatewayHive]:
    async with gateway_hive(bus, JOB) as served:
        served.replica.otherwise = newest(served)
        yield served


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "worlds_of_eval.py").write_text(WORLDS)
    (tmp_path / "tmp").mkdir()
    lines = [{"prompt": "ab", "task_id": "h1"}, {"prompt": "abcd", "task_id": "h2"}]
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def counting(name: str, goals: int = 2) -> EvalSet:
    tasks = [Task(task_id=f"{name}/{goal}", metadata={"goal": goal}) for goal in range(goals)]
    return EvalSet(name=name, tasks=tasks, rollout=Rollout(Counter))


def newest(served: GatewayHive) -> Callable[[Generate, Send], Any]:
    """Return a script that answers with the engine's newest policy version."""

    async def script(request: Generate, send: Send) -> None:
        await says("done", version=served.engine.version)(request, send)

    return script


async def changes_meanwhile(request: Generate, send: Send) -> None:
    """Answer as a replica does that loads version 1 in the middle of an answer."""
    first, *rest = tokens_of("done")
    await send(frame_of([first], version=0))
    await send(frame_of(rest, version=1))
    await send(Finished(choice=0, reason="stop"))


def held(asked: asyncio.Event, go: asyncio.Event) -> Callable[[Generate, Send], Any]:
    """Return a script that says that it was asked, and answers when it may."""

    async def script(request: Generate, send: Send) -> None:
        asked.set()
        await go.wait()
        await says("done")(request, send)  # of version 0

    return script


async def one(task: Task, credentials: Credentials) -> float:
    return float(credentials.episode[-1] in "02468")


async def fills_the_batch(client: AsyncSwarmClient) -> None:
    await client.run_group(Task(task_id="t1"), one, 2)


async def test_data_sets_are_played_as_episodes_that_are_not_trained_on_and_are_counted_by_the_version(
    served: GatewayHive, client: AsyncSwarmClient
) -> None:
    told: list[EvalScore] = []
    evaluation = Evaluation(client, told.append)
    await evaluation.play([counting("one"), counting("two", goals=1)], repeat=2)
    await served.until(lambda engine: 0 in engine.evals and engine.evals[0].episodes == 6)
    stats = served.engine.evals[0]
    # A count of nothing reaches the goal 0, for 2, less 0.5 for having written.
    assert {name: (each.episodes, each.mean) for name, each in stats.data_sets.items()} == {
        "one": (4, 0.5),
        "two": (2, 1.5),
    }
    assert (served.engine.pool, served.engine.open) == ({}, {})
    assert evaluation.versions == [0]
    assert sorted((score.tasks, score.task_id, score.number, score.reward, score.version) for score in told) == [
        ("one", "one/0", 0, 1.5, 0),
        ("one", "one/0", 1, 1.5, 0),
        ("one", "one/1", 0, -0.5, 0),
        ("one", "one/1", 1, -0.5, 0),
        ("two", "two/0", 0, 1.5, 0),
        ("two", "two/0", 1, 1.5, 0),
    ]
    assert "0.500  one (4 episodes)" in render_status(served.follower.hive, "main")
    outcomes = [outcome for event in await events(served.bus, EpisodeEnded, 6) for outcome in event.outcomes]
    metrics = {"count": 0.0, "turns": 1.0, "reward/wrote": 1.0}
    assert all(metrics.items() <= each.log_metrics.items() for each in outcomes), "the log has the metrics of each"
    assert sorted(each.data_set for each in outcomes) == ["one"] * 4 + ["two"] * 2


@pytest.mark.parametrize(("claim", "counted"), [(64, {0: 2}), (1, {0: 1, 1: 1})])
async def test_episodes_that_are_claimed_together_play_one_version_and_the_next_batch_waits_for_them(
    served: GatewayHive, client: AsyncSwarmClient, claim: int, counted: dict[int, int]
) -> None:
    asked, go = asyncio.Event(), asyncio.Event()
    served.replica.scripts.append(held(asked, go))
    told: list[EvalScore] = []
    evaluation = Evaluation(client, told.append, at_once=1, claim=claim)
    playing = asyncio.create_task(evaluation.play([counting("one")]))
    await asked.wait()
    await fills_the_batch(client)
    await served.until(lambda engine: engine.phase == Phase.ROLLING_POST)
    go.set()
    await served.until(lambda engine: engine.phase == Phase.WEIGHT_SYNCING)
    await train(served)
    await playing
    assert evaluation.versions == list(counted)
    await served.until(lambda engine: {version: each.episodes for version, each in engine.evals.items()} == counted)
    assert [score.version for score in told] == [version for version in counted for _ in range(counted[version])]


async def test_an_episode_that_several_versions_have_sampled_is_in_the_mean_of_none(
    served: GatewayHive, client: AsyncSwarmClient, folder: Path
) -> None:
    told: list[EvalScore] = []
    served.replica.scripts += [says("done", version=0), changes_meanwhile, says("done", version=1)]
    await Evaluation(client, told.append, at_once=1).play([counting("one", goals=3)])
    assert [(score.version, score.versions, score.reward) for score in told] == [
        (0, (0,), 1.5),
        (None, (0, 1), -0.5),
        (1, (1,), -0.5),
    ]
    await served.until(lambda engine: sorted(engine.evals) == [0, 1] and engine.evals[1].episodes == 1)
    counted = served.engine.evals[0].data_sets["one"]
    assert (counted.episodes, counted.mean, counted.mixed.episodes, counted.mixed.mean) == (1, 1.5, 1, -0.5)
    served.replica.scripts += [says("done", version=0), changes_meanwhile]
    code, printed, errors = await ended(await bombus(folder, *typed(served, "--at-once", "1")))
    assert code == 0, errors
    rows = [line.split() for line in printed.splitlines() if line.startswith("held_out, version")]
    assert [row[1:-6] for row in rows] == [
        ["version", "0", "1", "2.000"],
        ["versions", "0", "to", "1", "together", "1", "4.000"],
    ]


async def test_what_the_environment_has_lost_is_aborted_as_infrastructure_and_has_no_reward(
    served: GatewayHive, client: AsyncSwarmClient
) -> None:
    def broken() -> Counter:
        raise OSError("the simulator did not start")

    told: list[EvalScore] = []
    lost = EvalSet(name="lost", tasks=[Task(task_id="x")], rollout=Rollout(broken))
    await Evaluation(client, told.append).play([lost])
    (score,) = told
    assert score.reward is None
    assert "the simulator did not start" in score.error
    await served.until(lambda engine: not engine.open)
    assert [closed.aborted for closed in served.engine.closed.values()] == [AbortReason.INFRA]
    assert served.engine.evals == {}


async def test_a_data_set_whose_environment_is_broken_is_given_up_and_the_others_are_played(
    served: GatewayHive, client: AsyncSwarmClient
) -> None:
    def broken() -> Counter:
        raise OSError("the simulator did not start")

    told: list[EvalScore] = []
    tasks = [Task(task_id=f"x{number}") for number in range(FAILURES_IN_A_ROW_MAX + 4)]
    lost = EvalSet(name="lost", tasks=tasks, rollout=Rollout(broken))
    said = r"16 episodes of lost in a row failed, .*the simulator did not start \(.*\); 4 more of its episodes were"
    with pytest.raises(ServerFailed, match=said):
        await Evaluation(client, told.append, at_once=1, claim=18).play([lost, counting("good")])
    assert [(score.tasks, score.reward) for score in told] == [
        *[("lost", None)] * FAILURES_IN_A_ROW_MAX,
        ("good", 1.5),
        ("good", -0.5),
    ]
    await served.until(lambda engine: not engine.open)
    assert len(served.engine.closed) == 20  # two were claimed and not played, and two were not even claimed


async def test_only_failures_in_a_row_give_a_data_set_up(client: AsyncSwarmClient) -> None:
    def breaks_at_first() -> Counter:
        made.append("an environment")
        if len(made) % FAILURES_IN_A_ROW_MAX:
            raise OSError("the simulator did not start")
        return Counter()

    made: list[str] = []
    told: list[EvalScore] = []
    tasks = [Task(task_id=f"x{number}", metadata={"goal": 0}) for number in range(2 * FAILURES_IN_A_ROW_MAX)]
    shaky = EvalSet(name="shaky", tasks=tasks, rollout=Rollout(breaks_at_first))
    await Evaluation(client, told.append, at_once=1).play([shaky])
    assert [score.reward is None for score in told] == [*[True] * 15, False] * 2


async def test_episodes_that_wait_for_their_turn_are_kept_alive(served: GatewayHive) -> None:
    kept: list[tuple[str, ...]] = []

    class Noted(AsyncSwarmClient):
        @asynccontextmanager
        async def keep_alive(self, *episode_uuids: str, every_s: float = 30.0) -> AsyncIterator[None]:
            kept.append(episode_uuids)
            async with super().keep_alive(*episode_uuids, every_s=every_s):
                yield

    async with Noted(served.base_url, verbose=False) as client:
        await Evaluation(client, lambda score: None, at_once=1, claim=2).play([counting("one", goals=3)])
    assert [len(uuids) for uuids in kept] == [2, 1]


async def test_an_evaluation_that_is_cut_off_leaves_no_episode_open(
    served: GatewayHive, client: AsyncSwarmClient
) -> None:
    asked = asyncio.Event()
    served.replica.scripts.append(held(asked, asyncio.Event()))
    playing = asyncio.create_task(Evaluation(client, lambda score: None, at_once=1).play([counting("one")]))
    await asked.wait()
    playing.cancel()
    await asyncio.gather(playing, return_exceptions=True)
    await served.until(lambda engine: not engine.open)
    assert [closed.aborted for closed in served.engine.closed.values()] == [AbortReason.CLIENT] * 2


async def test_an_episode_that_its_batch_did_not_wait_for_any_longer_has_no_reward(bus: Bus) -> None:
    job = {"bombus": {**JOB["bombus"], "collection": {"batch_size": 1, "drain_s": 0.5}}}
    asked, go = asyncio.Event(), asyncio.Event()
    told: list[EvalScore] = []
    async with gateway_hive(bus, job) as served, AsyncSwarmClient(served.base_url, verbose=False) as client:
        served.replica.scripts.append(held(asked, go))
        playing = asyncio.create_task(Evaluation(client, told.append).play([counting("one", goals=1)]))
        await asked.wait()
        await fills_the_batch(client)
        await served.until(lambda engine: not engine.open)
        go.set()
        await playing
        assert served.engine.evals == {}
    (score,) = told
    assert (score.reward, score.status) == (None, "aborted")
    assert "the episode is not in claimed status: its batch was closed while it was running" in score.error


async def test_an_episode_that_is_closed_before_its_first_call_is_no_failure_of_its_data_set(bus: Bus) -> None:
    job = {"bombus": {**JOB["bombus"], "collection": {"batch_size": 1, "drain_s": 0.5}}}
    begun, go = asyncio.Event(), asyncio.Event()
    told: list[EvalScore] = []

    async def takes_its_time() -> Counter:
        begun.set()
        await go.wait()
        return Counter()

    async with gateway_hive(bus, job) as served, AsyncSwarmClient(served.base_url, verbose=False) as client:
        tasks = [Task(task_id=str(number), metadata={"goal": 0}) for number in range(FAILURES_IN_A_ROW_MAX)]
        slow = EvalSet(name="slow", tasks=tasks, rollout=Rollout(takes_its_time))
        evaluation = Evaluation(client, told.append, at_once=FAILURES_IN_A_ROW_MAX)
        playing = asyncio.create_task(evaluation.play([slow]))
        await begun.wait()
        await fills_the_batch(client)
        await served.until(lambda engine: not engine.open)
        go.set()
        await playing
    assert evaluation.cut_off == FAILURES_IN_A_ROW_MAX
    assert {score.error for score in told} == {
        "ModelRefused: the server answered 403: the episode was aborted (superseded); claim another one."
    }


async def test_a_batch_that_does_not_wait_for_a_pass_is_not_the_end_of_the_background_evaluator(
    bus: Bus, folder: Path
) -> None:
    job = {"bombus": {**JOB["bombus"], "collection": {"batch_size": 1, "drain_s": 0.5}}}
    lines = [json.dumps({"prompt": "ab", "task_id": f"h{number}"}) + "\n" for number in range(32)]
    (folder / "held_out.jsonl").write_text("".join(lines))
    asked, go = asyncio.Event(), asyncio.Event()
    async with gateway_hive(bus, job) as served, AsyncSwarmClient(served.base_url, verbose=False) as client:
        served.replica.otherwise = newest(served)
        served.replica.scripts += [held(asked, go)] * 2
        evaluator = await bombus(folder, *typed(served, "-n", "32", "--at-once", "2", "--every", "1"))
        await asked.wait()
        await fills_the_batch(client)
        await served.until(lambda engine: not engine.open)
        go.set()
        await served.until(lambda engine: engine.phase == Phase.WEIGHT_SYNCING)
        await train(served)
        await served.until(lambda engine: 1 in engine.evals and engine.evals[1].episodes == 32)
        evaluator.send_signal(signal.SIGINT)
        code, printed, errors = await ended(evaluator)
    assert code == 130, errors
    rows = [line.split()[2:-6] for line in printed.splitlines() if line.startswith("held_out, version")]
    assert rows[0][1:] == ["0", "-"]
    assert "32 episodes have no reward because the hive closed them: a batch waits for collection.drain_s" in printed
    begun = [line for line in printed.splitlines() if line.startswith("h") and "aborted: " in line]
    assert sum(NOT_BEGUN in line for line in begun) >= 28  # a place may be taken before the hive has said so


# ---- which versions are evaluated ----


def test_the_first_version_that_is_seen_is_evaluated_and_then_every_nth() -> None:
    schedule = EvalSchedule(3)
    assert schedule.is_due(1, 4)
    assert schedule.played(1, 4) == []
    assert [version for version in range(4, 10) if schedule.is_due(1, version)] == [6, 7, 8, 9]
    assert schedule.played(1, 6) == []
    assert not schedule.is_due(1, 8)


def test_versions_that_passed_while_another_was_evaluated_are_skipped_and_named() -> None:
    schedule = EvalSchedule(2)
    schedule.played(1, 2)
    assert schedule.played(1, 9) == [4, 6, 8]
    assert not schedule.is_due(1, 9)
    assert schedule.is_due(1, 10)


def test_another_run_begins_anew() -> None:
    schedule = EvalSchedule(5)
    schedule.played(1, 20)
    assert schedule.is_due(2, 0)
    assert schedule.played(2, 0) == []
    assert not schedule.is_due(2, 4)


# ---- the command ----


def typed(served: GatewayHive, *more: str) -> tuple[str, ...]:
    words = ("eval", "--task", "held_out.jsonl", "--env", "worlds_of_eval:Echo", "-n", "2")
    return (*words, "--engine", served.base_url, *more)


async def evaluated(served: GatewayHive, version: int) -> None:
    await served.until(lambda engine: version in engine.evals and engine.evals[version].episodes == 2)


@pytest.mark.parametrize("engine", ["", "/e/main"])
async def test_one_command_evaluates_prints_a_table_and_writes_lines(
    served: GatewayHive, folder: Path, engine: str
) -> None:
    words = typed(served, "--out", "scores.jsonl", "--engine", served.base_url + engine)
    code, printed, errors = await ended(await bombus(folder, *words))
    assert code == 0, errors
    assert "no reward" not in printed
    lines = printed.splitlines()
    assert sorted(line.split(" (")[0] for line in lines[:2]) == ["h1: reward 2", "h2: reward 4"]
    assert "policy version 0: 2 episodes in " in printed
    row = next(line.split() for line in lines if line.startswith("held_out, version 0"))
    assert row[3:5] == ["2", "3.000"]
    records = [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]
    assert sorted((each["task_id"], each["reward"], each["version"]) for each in records) == [
        ("h1", 2.0, 0),
        ("h2", 4.0, 0),
    ]
    assert served.engine.evals[0].data_sets["held_out"].mean == 3.0


async def test_a_file_is_played_as_far_as_it_is_asked_for(served: GatewayHive, folder: Path) -> None:
    code, printed, errors = await ended(await bombus(folder, *typed(served, "-n", "1")))
    assert code == 0, errors
    assert "policy version 0: 1 episodes in " in printed
    assert "there are no more" not in printed
    code, printed, errors = await ended(await bombus(folder, *typed(served, "-n", "3")))
    assert code == 0, errors
    assert printed.splitlines()[0] == "held_out: 2 tasks will be played: there are no more"


async def test_in_the_background_each_nth_version_is_evaluated_until_ctrl_c(
    served: GatewayHive, client: AsyncSwarmClient, folder: Path
) -> None:
    evaluator = await bombus(folder, *typed(served, "--every", "2"))
    for version in range(1, 5):
        if version % 2:
            await evaluated(served, version - 1)
        await fills_the_batch(client)
        await served.until(lambda engine: engine.phase == Phase.WEIGHT_SYNCING)
        await train(served)
    await evaluated(served, 4)
    evaluator.send_signal(signal.SIGINT)
    code, printed, errors = await ended(evaluator)
    assert code == 130, errors
    assert "Traceback" not in errors
    assert sorted(served.engine.evals) == [0, 2, 4]
    tables = [line.split(":")[0] for line in printed.splitlines() if line.startswith("policy version")]
    assert tables[:2] == ["policy version 0", "policy version 2"]
    await served.until(lambda engine: not engine.open)


async def test_a_pass_that_fails_is_told_and_the_next_version_is_evaluated(
    served: GatewayHive, client: AsyncSwarmClient, folder: Path
) -> None:
    lines = [json.dumps({"prompt": "ab", "task_id": f"h{number}"}) + "\n" for number in range(FAILURES_IN_A_ROW_MAX)]
    (folder / "held_out.jsonl").write_text("".join(lines))
    (folder / "broken").touch()
    evaluator = await bombus(folder, *typed(served, "-n", "16", "--every", "1", "--env", "worlds_of_eval:Fragile"))
    await served.until(lambda engine: len(engine.closed) == FAILURES_IN_A_ROW_MAX)
    (folder / "broken").unlink()
    await fills_the_batch(client)
    await served.until(lambda engine: engine.phase == Phase.WEIGHT_SYNCING)
    await train(served)
    await served.until(lambda engine: 1 in engine.evals and engine.evals[1].episodes == FAILURES_IN_A_ROW_MAX)
    evaluator.send_signal(signal.SIGINT)
    code, _, errors = await ended(evaluator)
    assert code == 130, errors
    assert "bombus eval: version 0: 16 episodes of held_out in a row failed, the last one with: " in errors
    assert "The next version will still be evaluated." in errors


async def test_a_background_evaluator_ends_with_the_run(
    served: GatewayHive, client: AsyncSwarmClient, folder: Path
) -> None:
    evaluator = await bombus(folder, *typed(served, "--every", "1"))
    await evaluated(served, 0)
    await client.stop_engine()
    code, printed, errors = await ended(evaluator)
    assert (code, errors) == (0, "")
    assert printed.splitlines()[-1] == "the engine is no longer running"


async def test_a_hive_whose_engine_is_off_or_that_does_not_answer_is_told(
    served: GatewayHive, client: AsyncSwarmClient, folder: Path
) -> None:
    await client.stop_engine()
    code, printed, errors = await ended(await bombus(folder, *typed(served)))
    assert (code, printed) == (1, "")
    assert "Start a job first" in errors
    async with AsyncSwarmClient("http://127.0.0.1:1", verbose=False, retry_s=0) as nobody:
        with pytest.raises(SwarmError, match="the hive does not answer: "):
            await wait_until_due(nobody, EvalSchedule(1))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--task", "shell", "--engine", "http://127.0.0.1:1/v1"], "is an agent's address"),
        (["--task", "no.jsonl", "--engine", "http://127.0.0.1:1"], "name a class with --env module:Class"),
        (["--task", "no.jsonl", "--env", "x:Y", "--engine", "http://127.0.0.1:1"], "cannot be read"),
        (["--task", "chess", "--engine", "http://127.0.0.1:1"], "there are no tasks 'chess'"),
        (
            ["--task", "no.jsonl", "--engine", "http://127.0.0.1:1", "--set", "topk=2"],
            "--set topk is refused",
        ),
        (["--task", "shell", "--engine", "http://127.0.0.1:1", "--every", "0"], "--every"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", *words]) == 2
    assert said in capsys.readouterr().err
