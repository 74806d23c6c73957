"""Several agents in one episode: roles on the log, rewards by role and by call, one end."""

import asyncio
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from bombus import AsyncSwarmClient, Credentials, InfraError, Task
from bombus.environments.budgets import RolloutBudgets
from bombus.environments.kinds import RolloutStatus
from bombus.environments.plain.marks import metric, reward, success
from bombus.environments.plain.play import AgentCall, BudgetSpent, PlayAgents
from bombus.environments.rollout import Rollout, RolloutResult
from bombus.hive.generation import Generate
from bombus.hive.records import decode_record
from tests.environments.scripted import CREDENTIALS, ScriptedModel
from tests.environments.small_environments import Counter
from tests.gateway.openai_hive import GatewayHive, Send, says

TASK = Task(task_id="t1", main_query="1+1")


class Debate:
    """Two speakers at the same time, then a judge."""

    speakers = 2

    async def play(self, task: Task, agents: PlayAgents) -> None:
        self.verdict = ""
        speeches = await asyncio.gather(*(agents["speaker"].ask(f"Speech {n}") for n in range(self.speakers)))
        said = " ".join(speech.text for speech in speeches)
        self.verdict = (await agents["judge"].ask([{"role": "user", "content": said}], max_tokens=7)).text

    @reward(role="speaker", weight=2.0)
    def length(self, calls: list[AgentCall]) -> list[float]:
        return [float(len(call.text)) for call in calls]

    @reward(role="judge")
    def fair(self, task: Task) -> float:
        return 1.0

    @reward(weight=0.5)
    def together(self) -> float:
        return 1.0

    @metric
    def heard(self, calls: list[AgentCall]) -> int:
        return len(calls)

    @success
    def agreed(self) -> bool:
        return self.verdict == "aye"


async def played(model: ScriptedModel, kind: Any = Debate, **budgets: Any) -> RolloutResult:
    return await Rollout(kind, RolloutBudgets(**budgets), transport=model).play(TASK, CREDENTIALS)


async def test_agents_are_asked_under_their_roles_and_their_calls_are_rewarded_apart() -> None:
    model = ScriptedModel("a", "bcd", "aye")
    result = await played(model)
    assert [headers["x-bombus-role"] for headers in model.headers] == ["speaker", "speaker", "judge"]
    assert [request["max_tokens"] for request in model.requests] == [4094, 4094, 7]
    assert [request["messages"][0]["content"] for request in model.requests] == ["Speech 0", "Speech 1", "a bcd"]
    output = result.output()
    # 2 x its length for a speaker, 1 for the judge, and 0.5 for everybody
    assert output.reward == {"1": 2.0 * 1 + 0.5, "2": 2.0 * 3 + 0.5, "3": 1.0 + 0.5}
    assert output.log_metrics["reward/length"] == 2.0
    assert output.log_metrics["heard"] == 3.0
    assert output.is_success is True
    assert result.transcript.turns == 3


async def test_equal_rewards_of_all_calls_are_one_number() -> None:
    class Equal(Debate):
        @reward(role="speaker", weight=2.0)
        def length(self, calls: list[AgentCall]) -> list[float]:
            return [0.5 for _ in calls]

    assert (await played(ScriptedModel(), Equal)).output().reward == 1.5


async def test_a_list_of_another_length_is_refused() -> None:
    class Short(Debate):
        @reward(role="speaker")
        def length(self, calls: list[AgentCall]) -> list[float]:
            return [1.0]

    with pytest.raises(InfraError, match=r"Short.length returned 1 numbers for 2 calls: return one for each"):
        (await played(ScriptedModel(), Short)).output()


async def test_calls_over_the_budget_cut_the_episode_unless_the_class_goes_on_without_them() -> None:
    result = await played(ScriptedModel("a", "b", "c"), turns_max=1)
    assert (result.status, result.transcript.turns) == (RolloutStatus.TRUNCATED, 1)
    result = await played(ScriptedModel("a", "b", "c"))
    assert result.transcript.completion_tokens == 3 * 5, "of all answers"

    class Careful(Debate):
        async def play(self, task: Task, agents: PlayAgents) -> None:
            self.verdict = "none"
            try:
                for number in range(100):
                    await agents["speaker"].ask(str(number))
            except BudgetSpent:
                self.verdict = "aye"

    result = await played(ScriptedModel(), Careful, turns_max=3)
    assert (result.status, result.output().is_success) == (RolloutStatus.COMPLETED, True)
    assert result.transcript.turns == 3


async def test_an_agent_asks_for_no_more_tokens_than_its_budget_has() -> None:
    class Greedy(Debate):
        async def play(self, task: Task, agents: PlayAgents) -> None:
            for most in (None, 7, 1000):
                await agents["speaker"].ask("1234" * 10, max_tokens=most)
            self.verdict = ""

    model = ScriptedModel()
    await played(model, Greedy, tokens_max=100)
    assert [request["max_tokens"] for request in model.requests] == [100 - 10, 7, 100 - 10]


async def test_a_prompt_that_has_become_too_long_cuts_the_episode_and_the_first_one_is_the_tasks_fault() -> None:
    refusal = httpx.Response(400, json={"error": {"message": "9 tokens at most", "code": "context_length_exceeded"}})
    result = await played(ScriptedModel("a", "bcd", refusal))
    assert result.status == RolloutStatus.TRUNCATED
    # 2 x its length for a speaker and 0.5 for everybody: what was said before is scored
    assert result.output().reward == {"1": 2.0 * 1 + 0.5, "2": 2.0 * 3 + 0.5}
    with pytest.raises(
        InfraError, match=r"first prompt.* too long .*tokens_max \(77 for prompt.* 400: 9 tokens at most$"
    ):
        (await played(ScriptedModel(refusal), tokens_max=77)).output()


async def test_what_fails_in_a_play_is_infrastructure() -> None:
    class Buggy(Debate):
        async def play(self, task: Task, agents: PlayAgents) -> None:
            raise KeyError("verdict")

    with pytest.raises(InfraError, match=r"Buggy.play failed: KeyError: 'verdict' \(test_play.py, line \d+\)"):
        (await played(ScriptedModel(), Buggy)).output()
    refused = ScriptedModel("a", httpx.Response(401, json={"error": {"message": "expired"}}))
    with pytest.raises(InfraError, match="answered 401: expired"):
        (await played(refused)).output()

    class Grouped(Debate):
        async def play(self, task: Task, agents: PlayAgents) -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(agents["speaker"].ask("x"))

    class Mixed(Debate):
        async def play(self, task: Task, agents: PlayAgents) -> None:
            raise ExceptionGroup("two", [BudgetSpent("no more calls"), KeyError("verdict")])

    with pytest.raises(InfraError, match=r"Mixed.play failed: KeyError: 'verdict'"):
        (await played(ScriptedModel(), Mixed)).output()
    with pytest.raises(InfraError, match="answered 401: no"):
        (await played(ScriptedModel(httpx.Response(401, json={"error": {"message": "no"}})), Grouped)).output()


async def test_a_play_that_uses_up_its_time_is_cut() -> None:
    class Slow(Debate):
        async def play(self, task: Task, agents: PlayAgents) -> None:
            self.verdict = ""
            await asyncio.Event().wait()

    result = await played(ScriptedModel(), Slow, tool_s=0.05, turn_s=0.05, episode_s=0.05)
    assert (result.status, result.output().is_success) == (RolloutStatus.TRUNCATED, False)


async def test_one_whose_agents_were_never_answered_is_infrastructure() -> None:
    model = ScriptedModel()
    model.hangs = True
    result = await played(model, Debate, tool_s=0.05, turn_s=0.05, episode_s=0.05)
    with pytest.raises(InfraError, match=r"no answer within 0.05 s"):
        result.output()


async def test_one_that_has_caught_a_failed_group_of_tasks_before_is_cut_too() -> None:
    async def fails() -> None:
        await asyncio.sleep(0)
        raise ValueError

    class Slow(Debate):
        async def play(self, task: Task, agents: PlayAgents) -> None:
            self.verdict = ""
            with pytest.raises(ExceptionGroup):
                async with asyncio.TaskGroup() as tasks:  # which cancels the task that waits for it
                    tasks.create_task(fails())
            await asyncio.Event().wait()

    result = await played(ScriptedModel(), Slow, tool_s=0.05, turn_s=0.05, episode_s=0.05)
    assert (result.status, result.output().is_success) == (RolloutStatus.TRUNCATED, False)


async def test_an_answer_that_comes_after_the_play_does_not_count() -> None:
    class Hasty(Debate):
        async def play(self, task: Task, agents: PlayAgents) -> None:
            self.verdict = (await agents["judge"].ask("at once")).text
            self.scoring = asyncio.Event()

            async def later() -> str:
                await self.scoring.wait()
                return (await agents["speaker"].ask("and later")).text

            self.left = asyncio.create_task(later())

        @reward(role="judge")
        async def fair(self, task: Task) -> float:  # type: ignore[override]
            self.scoring.set()
            assert await self.left == "late"
            return 1.0

    result = await played(ScriptedModel("aye", "late"), Hasty)
    assert [(call.role, call.reward) for call in result.calls] == [("judge", 1.5)]
    assert result.output().reward == 1.5


async def test_a_call_that_is_under_way_when_the_play_is_over_is_given_up_before_it_is_scored() -> None:
    model = ScriptedModel("aye")

    class Hasty(Debate):
        async def play(self, task: Task, agents: PlayAgents) -> None:
            self.verdict = (await agents["judge"].ask("at once")).text
            model.hangs = True
            model.asked.clear()
            self.left = asyncio.create_task(agents["speaker"].ask("and more"))
            await model.asked.wait()

        @reward(role="judge")
        async def fair(self, task: Task) -> float:  # type: ignore[override]
            assert self.left.cancelled()
            return 1.0

    result = await played(model, Hasty)
    assert result.output().reward == 1.5


async def test_a_role_is_a_short_printable_text() -> None:
    class Odd(Debate):
        async def play(self, task: Task, agents: PlayAgents) -> None:
            agents["x" * 64]
            agents["a\nb"]

    with pytest.raises(InfraError, match=r"'a\\nb' must consist of 1 to 64 printable ASCII characters"):
        (await played(ScriptedModel(), Odd)).output()


class MultiModel(BaseModel):
    """A multi-model episode: an episode of an engine for each role."""

    credentials: dict[str, Credentials]


async def test_roles_of_a_multi_model_episode_are_played_by_the_models_of_their_engines() -> None:
    model = ScriptedModel("a", "bcd", "aye")
    multi = MultiModel(
        credentials={
            role: CREDENTIALS.model_copy(update={"model": f"{role}-model", "api_key": f"sk-{role}"})
            for role in ("speaker", "judge", "silent")
        }
    )
    outputs = await Rollout(Debate, transport=model).multi_model(TASK, multi)
    assert [request["model"] for request in model.requests] == ["speaker-model", "speaker-model", "judge-model"]
    assert [headers["authorization"] for headers in model.headers][1:] == ["Bearer sk-speaker", "Bearer sk-judge"]
    assert {role: output.reward for role, output in outputs.items()} == {
        "speaker": {"1": 2.5, "2": 6.5},
        "judge": 1.5,
        "silent": pytest.approx((2.5 + 6.5 + 1.5) / 3),  # it has no calls of its own
    }
    with pytest.raises(InfraError, match="the multi-model episode has no role 'judge'"):
        await Rollout(Debate, transport=ScriptedModel()).multi_model(
            TASK, MultiModel(credentials={"speaker": CREDENTIALS})
        )
    with pytest.raises(TypeError, match="a multi-model episode needs a class with `play`"):
        await Rollout(Counter, transport=ScriptedModel()).multi_model(Task(metadata={"goal": 1}), multi)


# ---- on a hive ----


async def test_each_call_gets_its_own_reward_although_calls_at_the_same_time_end_in_any_order(
    served: GatewayHive,
) -> None:
    second_is_there = asyncio.Event()

    async def first(request: Generate, send: Send) -> None:
        await second_is_there.wait()
        await says("a")(request, send)

    async def second(request: Generate, send: Send) -> None:
        await says("bcd")(request, send)
        second_is_there.set()

    served.replica.scripts.extend([first, second, says("aye")])
    async with AsyncSwarmClient(served.base_url, verbose=False) as client:
        (output,) = await client.run_group(TASK, Rollout(Debate), 1)
    assert output is not None
    await served.until(lambda engine: bool(engine.pool))
    (ended,) = served.engine.pool.values()
    stored = await served.bus.get_many(served.bus.subjects.calls_stream, [ref.seq for ref in ended.calls])
    records = [decode_record(found.data, ref) for found, ref in zip(stored, ended.calls, strict=True)]
    assert ended.call_rewards is not None
    found = {
        (record.role, (record.choices[0].message or {})["content"]): given
        for record, given in zip(records, ended.call_rewards, strict=True)
    }
    assert found == {("speaker", "bcd"): 6.5, ("speaker", "a"): 2.5, ("judge", "aye"): 1.5}
    assert ended.reward == pytest.approx((6.5 + 2.5 + 1.5) / 3)
