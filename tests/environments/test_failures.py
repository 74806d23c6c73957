"""What fails in environments of a whole hive has its kind on the log, and nothing of it is trained."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bombus import (
    AsyncSwarmClient,
    Credentials,
    EpisodesFailed,
    FailureKind,
    InfraError,
    Rollout,
    RolloutBudgets,
    Task,
    Transcript,
    WorkflowOutput,
    reward,
    stop,
    success,
)
from bombus.environments.backends.pool import BackendPool
from bombus.environments.backends.process import SimulatorProcess
from bombus.environments.kinds import Opening, RolloutScores, RolloutStatus, ToolCall, ToolOutcome
from bombus.environments.pools.aio import AsyncEnvPool
from bombus.environments.rollout import RolloutResult
from bombus.hive.generation import Generate
from bombus.tasks.search.backends import SearchFailed
from tests.environments.backends.test_pool import simulator
from tests.environments.scripted import CREDENTIALS, ScriptedModel, calls, completion
from tests.environments.serving.served import ServerProcess
from tests.environments.serving.served import served as serving
from tests.environments.test_rollout_on_a_hive import JOB, writes
from tests.gateway.openai_hive import GatewayHive, Send, says

__all__ = ["JOB"]  # of `served`

TASK = Task(task_id="t1", metadata={"goal": 3})
Broken = Callable[[], object]


class Plain:
    """An environment with a tool, in which nothing fails."""

    def reset(self, task: Task) -> str:
        return "go"

    def act(self) -> str:
        """Act."""
        return "done"

    @reward
    def worth(self) -> float:
        return 0.5


class NoReset(Plain):
    def reset(self, task: Task) -> str:
        raise KeyError("goal")


class Searching(Plain):
    def act(self) -> str:
        """Act."""
        raise SearchFailed("the search engine gave no answer")


class ToolGone(Plain):
    def act(self) -> str:
        """Act."""
        raise InfraError("the tool's server is away")


class BrowserGone(Plain):
    def act(self) -> str:
        """Act."""
        raise InfraError("the browser is gone", FailureKind.SANDBOX)


class Hanging(Plain):
    def act(self) -> str:
        """Act."""
        time.sleep(1)
        return "late"


class NeverStops(Plain):
    @stop
    def is_over(self) -> bool:
        raise KeyError("state")


class Unjudged(Plain):
    @reward
    def worth(self) -> float:
        raise ZeroDivisionError


class Nonsense(Plain):
    @reward
    def worth(self) -> Any:
        return "good"


class Infinite(Plain):
    @reward
    def worth(self) -> float:
        return float("nan")


class JudgeAway(Plain):
    @reward
    def worth(self) -> float:
        raise InfraError("the judge's server is away")


class JudgeLate(Plain):
    @reward
    async def worth(self) -> float:  # type: ignore[override]
        await asyncio.sleep(3600)
        return 0.0


class NoVerdict(Plain):
    @success
    def is_done(self) -> bool:
        raise OSError("disk")


async def failed(served: GatewayHive, client: AsyncSwarmClient, agent: Any) -> None:
    with pytest.raises(EpisodesFailed):
        await client.run_group(TASK, agent, 1)
    await served.until(lambda engine: not engine.open)


def assert_untrained(served: GatewayHive, kind: FailureKind) -> None:
    counters = served.engine.counters
    assert (counters.aborted_by, counters.ended_by) == ({kind: 1}, {})
    assert (counters.ended, counters.trained, served.engine.pool) == (0, 0, {})


@pytest.mark.parametrize(
    ("broken", "kind"),
    [
        (NoReset, FailureKind.ENVIRONMENT),
        (Searching, FailureKind.TOOL),
        (ToolGone, FailureKind.TOOL),
        (BrowserGone, FailureKind.SANDBOX),
        (Hanging, FailureKind.TOOL),
        (NeverStops, FailureKind.ENVIRONMENT),
        (Unjudged, FailureKind.GRADER),
        (Nonsense, FailureKind.GRADER),
        (Infinite, FailureKind.GRADER),
        (JudgeAway, FailureKind.GRADER),
        (JudgeLate, FailureKind.GRADER),
        (NoVerdict, FailureKind.GRADER),
    ],
)
async def test_what_fails_in_a_class_is_aborted_with_its_kind(
    served: GatewayHive, client: AsyncSwarmClient, broken: type, kind: FailureKind
) -> None:
    served.replica.otherwise = says(writes("act"))
    budgets = RolloutBudgets(tool_s=0.1, turn_s=30, turns_max=2, setup_s=0.5)
    await failed(served, client, Rollout(broken, budgets))
    assert_untrained(served, kind)


async def test_a_tool_that_raises_is_shown_to_the_model_and_no_failure_of_the_episode(
    served: GatewayHive, client: AsyncSwarmClient
) -> None:
    class Raising(Plain):
        def act(self) -> str:
            """Act."""
            raise ValueError("there is no such coin")

    served.replica.scripts.extend([says(writes("act")), says("done")])
    (output,) = await client.run_group(TASK, Rollout(Raising), 1)
    assert output is not None
    assert (output.reward, output.failure, output.log_metrics["tool_failures"]) == (0.5, None, 1.0)
    await served.until(lambda engine: len(engine.pool) == 1)
    assert (served.engine.counters.aborted_by, served.engine.counters.ended_by) == ({}, {})


async def test_a_model_that_gives_no_answer(served: GatewayHive, client: AsyncSwarmClient) -> None:
    async def hangs(request: Generate, send: Send) -> None:
        await asyncio.sleep(3600)

    served.replica.otherwise = hangs
    rollout = Rollout(Plain, RolloutBudgets(tool_s=0.2, turn_s=0.5))
    await failed(served, client, rollout)
    assert_untrained(served, FailureKind.MODEL)


class Slow(Plain):
    async def act(self) -> str:  # type: ignore[override]
        """Act."""
        await asyncio.sleep(1)
        return "done"


@pytest.mark.parametrize(
    ("made", "budgets", "kind"),
    [
        (Plain, {"turns_max": 1}, FailureKind.TURNS),
        (Plain, {"tokens_max": 600, "turns_max": 50}, FailureKind.TOKENS),
        (Slow, {"tool_s": 0.1, "turn_s": 1, "episode_s": 1, "turns_max": 1000}, FailureKind.TIME),
    ],
)
async def test_a_budget_that_is_used_up_is_beside_the_reward(
    served: GatewayHive, client: AsyncSwarmClient, made: type, budgets: dict[str, Any], kind: FailureKind
) -> None:
    served.replica.otherwise = says(writes("act"))
    (output,) = await client.run_group(TASK, Rollout(made, RolloutBudgets(**budgets)), 1)
    assert output is not None
    assert (output.reward, output.failure) == (0.5, kind)
    await served.until(lambda engine: len(engine.pool) == 1)
    assert (served.engine.counters.ended_by, served.engine.counters.aborted_by) == ({kind: 1}, {})


async def test_an_environment_server_that_is_killed(served: GatewayHive, client: AsyncSwarmClient) -> None:
    served.replica.otherwise = says(writes("add", amount=1))
    server = await ServerProcess().start()
    asked = 0
    try:
        async with AsyncEnvPool(server.url, 1, group_size=1) as pool:

            async def agent(task: Task, credentials: Credentials) -> WorkflowOutput:
                environment = pool.environment()
                call = environment.call

                async def killing(made: ToolCall) -> ToolOutcome:
                    nonlocal asked
                    asked += 1
                    if asked == 2:
                        await server.end()
                    return await call(made)

                environment.call = killing  # type: ignore[assignment, method-assign]
                return (await Rollout(Plain).play(task, credentials, environment)).output()

            await failed(served, client, agent)
    finally:
        await server.end()
    assert_untrained(served, FailureKind.ENVIRONMENT)


@pytest.mark.parametrize(
    ("made", "kind"),
    [(Unjudged, FailureKind.GRADER), (JudgeAway, FailureKind.GRADER), (ToolGone, FailureKind.TOOL)],
)
async def test_a_served_class_reports_the_kinds_of_one_that_is_played_here(made: type, kind: FailureKind) -> None:
    async with serving(made) as (_, url), AsyncEnvPool(url, 1, group_size=1) as pool:
        model = ScriptedModel(calls(("act", {})), otherwise="done")
        result = await Rollout(pool.environment, transport=model).play(TASK, CREDENTIALS)
    assert result.error is not None
    assert (result.scores, result.error.failure) == (None, kind)


async def test_a_sandbox_that_dies_under_a_served_class() -> None:
    class Serving(Plain):
        def __init__(self, backend: SimulatorProcess) -> None:
            self._backend = backend

        def act(self) -> str:
            """Act."""
            assert self._backend.pid is not None
            os.kill(self._backend.pid, signal.SIGKILL)
            raise ConnectionError("the simulator does not answer")

    model = ScriptedModel(calls(("act", {})), otherwise="done")
    async with (
        BackendPool(simulator, 1) as backends,
        serving(Serving, backends) as (_, url),
        AsyncEnvPool(url, 1, group_size=1) as pool,
    ):
        result = await Rollout(pool.environment, transport=model).play(TASK, CREDENTIALS)
    assert result.error is not None
    assert (result.scores, result.error.failure) == (None, FailureKind.SANDBOX)


async def raises(error: Exception) -> float:
    raise error


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (ValueError("a bug"), FailureKind.CLIENT),
        (InfraError("it broke"), FailureKind.ENVIRONMENT),
        (InfraError("no disk", FailureKind.SANDBOX), FailureKind.SANDBOX),
        (None, FailureKind.GRADER),
        (float("nan"), FailureKind.GRADER),
        ("good", FailureKind.GRADER),
        (WorkflowOutput(), FailureKind.GRADER),
        (WorkflowOutput(reward=0.0, failure=FailureKind.GRADER), FailureKind.GRADER),
        (WorkflowOutput(reward=0.0, failure=FailureKind.TOOL), FailureKind.TOOL),
    ],
)
async def test_an_agent_that_fails_or_returns_no_reward(
    served: GatewayHive, client: AsyncSwarmClient, given: Any, kind: FailureKind
) -> None:
    async def agent(task: Task, credentials: Credentials) -> Any:
        return await raises(given) if isinstance(given, Exception) else given

    await failed(served, client, agent)
    assert_untrained(served, kind)


# ---- no exception of a grader gives a reward ---------------------------------------------------------------------

RAISED = st.sampled_from(
    [
        ValueError("no"),
        KeyError("answer"),
        FileNotFoundError("answer.txt"),
        TimeoutError("late"),
        RecursionError(),
        AssertionError(),
        StopIteration(),
        SystemExit(0),
        asyncio.CancelledError(),
        ExceptionGroup("several", [ValueError("a"), InfraError("b")]),
        InfraError("the judge is away"),
    ]
)
NONSENSE = st.sampled_from([None, "1", b"", float("nan"), float("inf"), {}, [1.0, 2.0], object(), 1j])


@given(error=st.none() | RAISED, value=NONSENSE, place=st.sampled_from(["sync", "async", "success", "play", "own"]))
@settings(deadline=None, max_examples=60)
def test_no_exception_and_no_nonsense_of_a_grader_ever_gives_an_outcome(
    error: BaseException | None, value: object, place: str
) -> None:
    def judge() -> Any:
        if error is not None:
            raise error
        return value

    result = asyncio.run(judged(judge, place))
    if place == "success" and error is None:
        return  # any value is true or false
    assert result.scores is None
    assert result.status == RolloutStatus.ABORTED
    assert result.error is not None
    assert result.error.failure == FailureKind.GRADER
    with pytest.raises(InfraError):
        result.output()


async def judged(judge: Broken, place: str) -> RolloutResult:  # noqa: C901 - one class for each place
    """Play an episode whose grader is a function, in one of the places where there may be one."""

    class Sync(Plain):
        @reward
        def worth(self) -> Any:
            return judge()

    class Async(Plain):
        @reward
        async def worth(self) -> Any:  # type: ignore[override]
            return judge()

    class Success(Plain):
        @success
        def is_done(self) -> Any:
            return judge()

    class Playing:
        async def play(self, task: Task, agents: Any) -> None:
            await agents["one"].ask("go")

        @reward
        def worth(self) -> Any:
            return judge()

    class Own:
        async def open(self, task: Task) -> Opening:
            return Opening(messages=[{"role": "user", "content": "go"}])

        async def call(self, call: ToolCall) -> ToolOutcome:
            return ToolOutcome(text="")

        async def is_over(self, transcript: Transcript) -> bool:
            return False

        async def score(self, transcript: Transcript) -> RolloutScores:
            return RolloutScores(reward=judge())  # type: ignore[arg-type]

        async def close(self) -> None: ...

    made = {"sync": Sync, "async": Async, "success": Success, "play": Playing, "own": Own}[place]
    return await Rollout(made, transport=ScriptedModel(completion("done"))).play(TASK, CREDENTIALS)
