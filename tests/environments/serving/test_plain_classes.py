"""Plain classes at a server: a rollout there is the rollout here, and what cannot be served is refused by name."""

import asyncio
import os
import signal
from typing import Any

import httpx
import pytest

from bombus import Task
from bombus.environments.backends.kinds import REAL, Backend, RealBackend
from bombus.environments.backends.pool import BackendPool
from bombus.environments.backends.process import SimulatorProcess
from bombus.environments.kinds import AgentEnvironment, EnvironmentLost, ResetFailed, RolloutStatus, ToolCall
from bombus.environments.openenv.messages import Rpc
from bombus.environments.plain.marks import reward
from bombus.environments.pools.aio import AsyncEnvPool
from bombus.environments.pools.blocking import EnvPool
from bombus.environments.pools.session import EnvSession
from bombus.environments.rollout import Rollout
from bombus.environments.serving.sources import ClassSource
from bombus.errors import Refused
from tests.environments.backends.test_pool import kept, put, simulator
from tests.environments.scripted import CREDENTIALS, ScriptedModel, calls
from tests.environments.serving.served import served
from tests.environments.small_environments import Counter
from tests.patience import until

TASK = Task(task_id="t1", metadata={"goal": 3})


def model() -> ScriptedModel:
    wrong = calls(("add", {"amount": 1}), ("fail", {}), ("add", {"amount": "many"}), ("subtract", {}))
    return ScriptedModel(wrong, calls(("add", {"amount": 2})), "It is 3.")


async def test_a_rollout_at_a_server_is_the_rollout_in_this_process() -> None:
    here, there = model(), model()
    local = await Rollout(Counter, transport=here).play(TASK, CREDENTIALS)
    async with served(Counter) as (_, url), AsyncEnvPool(url, 1, group_size=1) as pool:
        remote = await Rollout(pool.environment, transport=there).play(TASK, CREDENTIALS)
    assert local.status == RolloutStatus.COMPLETED
    assert remote.transcript == local.transcript
    assert remote.output() == local.output()
    assert there.requests == here.requests
    assert remote.output().reward == 1.5


async def test_a_rollout_takes_environments_of_a_pool_with_a_loop_of_its_own() -> None:
    async with served(Counter, slots=2) as (_, url):

        def play() -> list[float | None]:
            with EnvPool(url, 2, group_size=2) as pool:
                rollout = Rollout(pool.environment, transport=ScriptedModel(otherwise=calls(("add", {"amount": 9}))))

                async def both() -> list[Any]:
                    return list(await asyncio.gather(*(rollout(TASK, CREDENTIALS) for _ in range(2))))

                return [output.reward for output in asyncio.run(both())]

        assert await asyncio.to_thread(play) == [-0.5, -0.5]


async def test_a_rollout_whose_environment_dies_is_infra_and_not_worth_zero() -> None:
    class Breaking(Counter):
        def snap(self) -> str:
            """Break."""
            raise EnvironmentLost("the disk is gone")

    async with served(Breaking) as (_, url), AsyncEnvPool(url, 1, group_size=1) as pool:
        result = await Rollout(pool.environment, transport=ScriptedModel(calls(("snap", {})))).play(TASK, CREDENTIALS)
        assert result.status == RolloutStatus.ABORTED
        with pytest.raises(EnvironmentLost, match="the disk is gone"):
            result.output()
        again = Rollout(pool.environment, transport=ScriptedModel(calls(("add", {"amount": 3}))))
        assert (await again(TASK, CREDENTIALS)).reward == 1.5, "the pool has a new session in its place"


async def test_steps_of_a_plain_class_end_with_its_stop_and_its_rewards() -> None:
    async with served(Counter) as (_, url), await EnvSession.open(url) as session:
        await session.reset({"task": TASK.model_dump()})
        first = await session.step({"tool": "add", "arguments": {"amount": 3}})
        assert (first.observation, first.done) == ({"text": '{"count":3}', "failed": False}, False)
        last = await session.step({"tool": "add", "arguments": {"amount": 1}})
        assert (last.done, last.reward) == (True, -0.5)
        with pytest.raises(ResetFailed, match="KeyError: 'goal'"):
            await session.reset({})


async def test_the_schema_has_the_arguments_of_each_tool() -> None:
    async with served(Counter) as (_, url), httpx.AsyncClient() as http:
        kinds = (await http.get(f"{url}/schema")).json()["action"]["oneOf"]
    named = {kind["properties"].get("tool", {}).get("const"): kind for kind in kinds}
    assert list(named) == ["add", "where", "fail", None]
    assert named["add"]["properties"]["arguments"]["required"] == ["amount"]


class Store:
    """Puts text into its backend."""

    def __init__(self, backend: Backend | RealBackend) -> None:
        self._backend = backend

    def reset(self, task: Task) -> str:
        return "Store it."

    async def store(self, text: str) -> str:
        """Store a text, and say what was there before."""
        if isinstance(self._backend, RealBackend):
            return "in the real one"
        before = await kept(self._backend)
        await put(self._backend, text)
        return f"before: {before}"

    @reward()
    def always(self) -> float:
        return 1.0


async def test_b2_a_class_gets_a_simulator_of_its_own_or_uses_the_real_backend() -> None:
    async def store(task: Task, environment: AgentEnvironment) -> str:
        await environment.open(task)
        made = [ToolCall(id="c", name="store", arguments='{"text": "mine"}')] * 2
        return " ".join([(await environment.call(call)).text for call in made])

    async with BackendPool(simulator, 2) as backends, served(Store, backends, slots=2) as (server, url):
        async with AsyncEnvPool(url, 2, group_size=2) as pool:
            for _ in range(2):
                assert await pool.run_group(TASK, store) == ["before:  before: mine"] * 2, "new at each reset"
            assert backends.counts()["bound"] == 2
        await until(lambda: len(server.table.free) == 2)
        assert backends.counts() == {"ready": 2, "bound": 0, "replacing": 0}
    async with served(Store, REAL) as (_, url), AsyncEnvPool(url, 1, group_size=1) as pool:
        assert await pool.run_group(TASK, store) == ["in the real one in the real one"]


class Playing:
    async def play(self, task: Task, agents: dict[str, Any]) -> None: ...

    @reward()
    def always(self) -> float:
        return 1.0


class Unrewarded:
    def reset(self, task: Task) -> str:
        return "go"


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Playing, "Playing cannot be served: it has `play`"),
        (Unrewarded, "It has no method with @reward"),
    ],
)
def test_a_class_that_cannot_be_served_is_refused(kind: type, why: str) -> None:
    with pytest.raises(Refused, match=why):
        ClassSource(kind)


def test_a_class_that_needs_a_backend_is_not_served_without_one() -> None:
    with pytest.raises(Refused, match="Store needs a backend: choose one with --backend"):
        ClassSource(Store)


async def test_a_class_that_can_do_without_a_backend_is_made_without_one() -> None:
    class Perhaps(Counter):
        def __init__(self, backend: Backend | None = None) -> None:
            super().__init__()
            self.is_alone = backend is None

        def has_backend(self) -> str:
            """Say whether it has a backend."""
            return f"alone: {self.is_alone}"

    async with served(Perhaps) as (_, url), await EnvSession.open(url) as session:
        await session.reset({"task": TASK.model_dump()})
        assert (await session.step({"tool": "has_backend"})).observation["text"] == "alone: True"


async def test_a_class_that_knows_simulators_alone_is_not_led_to_the_real_service() -> None:
    class Simulated(Counter):
        def __init__(self, backend: Backend) -> None:
            super().__init__()
            self.address = backend.address

    async with served(Simulated, REAL) as (_, url):
        with pytest.raises(EnvironmentLost, match="BACKEND_TYPE=aws gives it the real AWS"):
            await EnvSession.open(url)


class Wordy(Counter):
    """Says more than fits into a message, and what is no text."""

    def reset(self, task: Task) -> str:
        super().reset(task)
        return "x" * int(task.metadata.get("characters", 1))

    def talk(self) -> str:
        """Talk."""
        return "\x01" * 20_000_000

    def name(self) -> str:
        """Return the name of a file that is not UTF-8."""
        return os.fsdecode(b"caf\xe9")


async def test_a_tool_that_says_too_much_is_cut_and_the_session_goes_on() -> None:
    async with served(Wordy) as (_, url), await EnvSession.open(url) as session:
        await session.reset({"task": TASK.model_dump()})
        text = (await session.step({"tool": "talk"})).observation["text"]
        assert text == "\x01" * 1_000_000 + "\n[19000000 more characters were left out]"
        assert (await session.step({"tool": "name"})).observation["text"] == "caf?"


async def test_a_reset_that_says_too_much_fails_and_the_session_goes_on() -> None:
    async with served(Wordy) as (_, url), await EnvSession.open(url) as session:
        with pytest.raises(ResetFailed, match="but the limit is 16777216: send less at a time"):
            await session.reset({"task": {"metadata": {"goal": 3, "characters": 17 << 20}}})
        await session.reset({"task": TASK.model_dump()})


async def kill_backend(backends: BackendPool, session: EnvSession) -> None:
    backend = await backends.take(session.name)
    assert isinstance(backend, SimulatorProcess)
    assert backend.pid is not None
    os.kill(backend.pid, signal.SIGKILL)


@pytest.mark.parametrize("is_step", [False, True])
async def test_a_backend_that_dies_before_the_score_is_infra_and_not_the_models_failure(is_step: bool) -> None:
    async with BackendPool(simulator, 1) as backends, served(Store, backends) as (_, url):
        session = await EnvSession.open(url)
        await session.reset({})
        await kill_backend(backends, session)
        score = session.step({"message": "done"}) if is_step else session.rpc(Rpc.SCORE, {"transcript": {}})
        with pytest.raises(EnvironmentLost, match="backend 0 of this session has died"):
            await score


async def test_a_backend_that_dies_in_the_middle_is_infra_and_not_the_models_failure() -> None:
    async with BackendPool(simulator, 1) as backends, served(Store, backends) as (_, url):
        session = await EnvSession.open(url)
        await session.reset({})
        await kill_backend(backends, session)
        with pytest.raises(EnvironmentLost, match="backend 0 of this session has died"):
            await session.step({"tool": "store", "arguments": {"text": "mine"}})
        async with await EnvSession.open(url) as another:
            await another.reset({})
            stored = await another.step({"tool": "store", "arguments": {"text": "mine"}})
            assert stored.observation == {"text": "before: ", "failed": False}
