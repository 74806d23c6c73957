"""The loop of turns and tools, its budgets, and what is whose fault. The model is scripted."""

import asyncio
import logging
import re
import threading
from contextlib import suppress
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from bombus import InfraError, Task
from bombus.environments.budgets import RolloutBudgets
from bombus.environments.kinds import (
    EnvironmentLost,
    MethodFailed,
    Opening,
    ResetFailed,
    RolloutScores,
    RolloutStatus,
    ToolCall,
    ToolOutcome,
    Transcript,
)
from bombus.environments.plain.description import WrongClass
from bombus.environments.plain.environment import PlainEnvironment
from bombus.environments.plain.marks import reward
from bombus.environments.rollout import Rollout, RolloutResult, WrongTask
from bombus.sdk import running
from tests.environments.scripted import CREDENTIALS, ScriptedModel, calls, completion
from tests.environments.small_environments import Counter, Threads, Together
from tests.patience import PATIENCE_S

SHORT_S = 2.0  # for what never ends, where something else has to end within it on a machine that is slow
TASK = Task(task_id="t1", metadata={"goal": 3})


async def played(model: ScriptedModel, environment: Any = Counter, task: Task = TASK, **budgets: Any) -> RolloutResult:
    rollout = Rollout(environment, RolloutBudgets(**budgets), transport=model)
    return await rollout.play(task, CREDENTIALS)


async def test_a_model_uses_tools_until_it_answers() -> None:
    model = ScriptedModel(calls(("add", {"amount": 1}), ("add", {"amount": 2})), "It is 3.")
    result = await played(model)
    assert result.status == RolloutStatus.COMPLETED
    roles = [message["role"] for message in result.transcript.messages]
    assert roles == ["user", "assistant", "tool", "tool", "assistant"]
    assert model.shown(1) == ['{"count":1}', '{"count":3}']
    assert [each["tool_call_id"] for each in model.requests[1]["messages"][2:]] == ["call_0", "call_1"]
    assert [tool["function"]["name"] for tool in model.requests[0]["tools"]] == ["add", "where", "fail"]
    output = result.output()
    assert output.reward == 2.0 * 1.0 - 0.5
    assert output.is_success is True
    assert output.metadata == {"status": "completed", "turns": 2}
    assert output.log_metrics == {
        "count": 3.0,
        "reward/reached": 1.0,
        "reward/wrote": 1.0,
        "turns": 2.0,
        "tool_calls": 2.0,
        "tool_failures": 0.0,
        "truncated": 0.0,
    }
    assert model.headers[0]["authorization"] == "Bearer sk-1"


async def test_an_environment_may_end_the_episode() -> None:
    model = ScriptedModel(otherwise=calls(("add", {"amount": 4})))
    result = await played(model)
    assert (result.status, len(model.requests)) == (RolloutStatus.COMPLETED, 1)
    assert result.output().reward == -0.5


async def test_what_a_tool_does_wrong_is_shown_to_the_model_and_the_loop_goes_on() -> None:
    model = ScriptedModel(calls(("fail", {}), ("subtract", {}), ("add", '{"amount": '), ("add", {"amount": 3})), "done")
    result = await played(model)
    shown = model.shown(1)
    assert shown[0] == "<error>Tool failed: ValueError: as it was asked to</error>"
    assert shown[1] == "<error>Tool failed: there is no tool 'subtract': the tools are add, where, fail</error>"
    assert shown[2].startswith("<error>Tool failed: the arguments are wrong: the arguments: Invalid JSON")
    assert shown[3] == '{"count":3}'
    assert result.output().reward == 1.5
    assert (result.transcript.tool_calls, result.transcript.tool_failures) == (4, 3)


async def test_a_name_that_the_model_makes_up_reads_no_attribute_of_the_environment() -> None:
    class Connected(Counter):
        @property
        def connection(self) -> None:
            raise OSError("it is not there")

        def __getattr__(self, name: str) -> None:
            raise KeyError(name)

    model = ScriptedModel(calls(("connection", {}), ("anything", {}), ("", {})), "done")
    result = await played(model, Connected)
    assert [text.partition(":")[2][:17] for text in model.shown(1)] == [" there is no tool"] * 3
    assert result.status == RolloutStatus.COMPLETED


async def test_tools_that_a_task_describes_are_handed_to_the_model() -> None:
    described = {"name": "add", "description": "Add, but slowly.", "parameters": {"type": "object"}}
    extra = {"name": "other", "description": "Nobody has it."}
    model = ScriptedModel(calls(("other", {})), "done")
    task = Task(task_id="t1", metadata={"goal": 3, "tools": [described, extra]})
    await played(model, task=task)
    tools = {tool["function"]["name"]: tool["function"] for tool in model.requests[0]["tools"]}
    assert list(tools) == ["add", "where", "fail", "other"]
    assert tools["add"] == described
    assert "there is no tool 'other'" in model.shown(1)[0]
    with pytest.raises(WrongTask, match=r"metadata.tools of task 't1' is not a list of tools"):
        await played(model, task=Task(task_id="t1", metadata={"goal": 3, "tools": [{"title": "x"}]}))


# ---- budgets ----


async def test_b1_turns_are_limited_and_the_last_ones_tools_still_count() -> None:
    model = ScriptedModel(otherwise=calls(("add", {"amount": 1})))
    result = await played(model, turns_max=3)
    assert (result.status, len(model.requests)) == (RolloutStatus.TRUNCATED, 3)
    assert result.output().reward == 1.5
    assert result.output().log_metrics["truncated"] == 1.0


async def test_b1_no_request_asks_for_more_tokens_than_are_left() -> None:
    # "Count to 3." has 11 characters, so about 2 tokens; the server counts 30 and 20, then 61 and 19.
    model = ScriptedModel(
        completion(calls(("add", {"amount": 1})), prompt=30, tokens=20),
        completion(calls(("add", {"amount": 1})), prompt=61, tokens=19),
    )
    result = await played(model, tokens_max=100)
    assert [request["max_tokens"] for request in model.requests] == [98, 100 - 50 - 2, 100 - 80 - 2]
    assert {headers["x-bombus-total-tokens"] for headers in model.headers} == {"100"}
    assert (result.transcript.prompt_tokens, result.transcript.completion_tokens) == (10, 44)


@pytest.mark.parametrize("tokens", [38, 39])  # and the tool's result has about 2, so that none or too few are left
async def test_b1_tokens_that_are_used_up_end_the_episode_before_another_request(tokens: int) -> None:
    model = ScriptedModel(completion(calls(("add", {"amount": 3})), prompt=60, tokens=tokens))
    result = await played(model, tokens_max=100)
    assert (result.status, len(model.requests)) == (RolloutStatus.TRUNCATED, 1)
    assert result.output().reward == 1.5


async def test_an_answer_over_the_budget_is_the_last_and_its_tools_are_not_used() -> None:
    model = ScriptedModel(completion(calls(("add", {"amount": 3})), prompt=90, tokens=11))
    result = await played(model, tokens_max=100)
    assert (result.status, len(model.requests)) == (RolloutStatus.TRUNCATED, 1)
    assert result.transcript.tool_calls == 0


async def test_an_answer_that_uses_up_the_tokens_exactly_has_its_tools_carried_out() -> None:
    model = ScriptedModel(completion(calls(("add", {"amount": 3})), prompt=90, tokens=10))
    result = await played(model, tokens_max=100)
    assert (result.status, len(model.requests)) == (RolloutStatus.TRUNCATED, 1)
    assert result.output().reward == 1.5


async def test_a_first_prompt_that_looks_too_long_is_asked_because_its_server_counts_better() -> None:
    class Wordy(Counter):
        def reset(self, task: Task) -> str:
            return super().reset(task) + " " * 1000

    model = ScriptedModel(completion("done", prompt=20, tokens=1))
    assert (await played(model, Wordy, tokens_max=100)).status == RolloutStatus.COMPLETED
    assert model.requests[0]["max_tokens"] == 1


async def test_an_answer_that_is_cut_at_its_length_ends_the_episode() -> None:
    model = ScriptedModel(completion("It is", finish="length"))
    result = await played(model)
    assert (result.status, len(model.requests)) == (RolloutStatus.TRUNCATED, 1)
    assert result.output().reward == -0.5


@pytest.mark.parametrize("code", ["context_length_exceeded", "prompt_too_long", None])
async def test_a_conversation_that_the_model_cannot_hold_is_cut_there(code: str | None) -> None:
    message = "This model's maximum context length is 20 tokens." if code is None else "too long"
    refusal = httpx.Response(400, json={"error": {"message": message, "code": code}})
    result = await played(ScriptedModel(calls(("add", {"amount": 3})), refusal))
    assert (result.status, result.output().reward) == (RolloutStatus.TRUNCATED, 1.5)
    first = await played(ScriptedModel(refusal))
    assert first.status == RolloutStatus.ABORTED, "a task that no model call fits is not the model's fault"


async def test_an_answer_may_have_so_many_calls_and_a_tool_so_many_characters() -> None:
    model = ScriptedModel(calls(*[("add", {"amount": 1})] * 3), "done")
    result = await played(model, calls_max=2)
    assert model.shown(1)[2] == (
        "<error>Tool failed: it was not carried out: an answer may have at most 2 calls</error>"
    )
    assert (result.transcript.tool_calls, result.transcript.tool_failures) == (3, 1)

    class Talkative(Counter):
        def talk(self) -> str:
            """Say much."""
            return "x" * 150

    model = ScriptedModel(calls(("talk", {})), "done")
    await played(model, Talkative, tool_characters_max=100)
    assert model.shown(1) == ["x" * 100 + "\n[50 more characters were left out]"]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"turns_max": 0}, "turns_max"),
        ({"tokens_max": 1}, "tokens_max"),
        ({"tool_s": 0}, "tool_s"),
        ({"turns": 3}, "turns"),
        ({"tool_s": 60, "turn_s": 30}, "tool_s is 60, turn_s 30 and episode_s 420"),
    ],
)
def test_budgets_that_make_no_sense_are_refused_at_birth(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        RolloutBudgets(**given)
    with pytest.raises(ValidationError, match="frozen"):
        RolloutBudgets().turns_max = 7


class Other:
    """An environment that is not a plain class, and counts how many calls it has at once."""

    def __init__(self) -> None:
        self.now = self.most = 0

    async def open(self, task: Task) -> Opening:
        return Opening(messages=[{"role": "user", "content": "go"}])

    async def call(self, call: ToolCall) -> ToolOutcome:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        self.now -= 1
        return ToolOutcome(text="")

    async def is_over(self, transcript: Transcript) -> bool:
        return False

    async def score(self, transcript: Transcript) -> RolloutScores:
        return RolloutScores(reward=1.0)

    async def close(self) -> None:
        pass


# ---- time ----


async def test_a_coroutine_that_takes_too_long_is_cancelled_and_the_model_is_told() -> None:
    model = ScriptedModel(calls(("wait", {}), ("touch", {})), "done")
    result = await played(model, Threads, tool_s=SHORT_S)
    assert model.shown(1)[0] == "<error>Tool failed: it did not end within 2 s, and was cancelled</error>"
    assert not model.shown(1)[1].startswith("<error>")
    assert result.output().reward == 1.0


async def test_a_coroutine_that_goes_on_after_it_was_cancelled_ends_the_episode_as_infrastructure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(running, "CANCELLED_S", 0.05)
    over = asyncio.Event()

    class Stubborn(Counter):
        async def wait(self) -> None:
            """Wait for ever."""
            while not over.is_set():
                with suppress(asyncio.CancelledError):
                    await over.wait()

    model = ScriptedModel(calls(("wait", {})), "done")
    result = await played(model, Stubborn, tool_s=SHORT_S, setup_s=SHORT_S)
    with pytest.raises(EnvironmentLost, match="`wait` kept running after it was cancelled"):
        result.output()
    over.set()


@pytest.mark.parametrize("stubborn", ["open", "call", "is_over", "score", "close"])
async def test_a_budget_holds_whatever_an_environment_makes_of_its_cancellation(
    stubborn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "CANCELLED_S", 0.05)
    over = asyncio.Event()

    async def goes_on(*_: object) -> None:
        while not over.is_set():
            with suppress(asyncio.CancelledError):
                await over.wait()

    made = type("Stubborn", (Other,), {stubborn: goes_on})
    budgets: dict[str, Any] = {"tool_s": 0.2, "turn_s": SHORT_S, "setup_s": 0.2}
    result = await played(ScriptedModel(calls(("act", {})), "done"), made, **budgets)
    if stubborn == "close":
        assert result.output().reward == 1.0, "it was known before"
    else:
        with pytest.raises(EnvironmentLost, match=r"took longer than 0.2 s|`act` kept running after it was cancelled"):
            result.output()
    over.set()


async def test_methods_of_an_environment_run_in_one_task_so_that_it_can_hold_something_open() -> None:
    class Connected(Other):
        async def open(self, task: Task) -> Opening:
            self.task = asyncio.current_task()
            return await super().open(task)

        async def close(self) -> None:
            closed.append(asyncio.current_task() is self.task)

    closed: list[bool] = []
    await played(ScriptedModel(), Connected)
    assert closed == [True]


async def test_a_tool_that_hangs_in_a_thread_ends_the_episode_as_infrastructure() -> None:
    instance = Threads()
    model = ScriptedModel(calls(("hang", {})), "done")
    result = await played(model, lambda: instance, tool_s=1.0)
    assert result.status == RolloutStatus.ABORTED
    with pytest.raises(EnvironmentLost, match=r"`hang` did not end in time.*cannot be cancelled"):
        result.output()
    assert len(model.requests) == 1
    instance.release.set()


async def test_an_episode_that_uses_up_its_time_is_cut_and_scored() -> None:
    limits: dict[str, Any] = {"tool_s": SHORT_S, "turn_s": SHORT_S, "episode_s": SHORT_S}
    result = await played(ScriptedModel(calls(("nap", {})), calls(("wait", {}))), Slow, **limits)
    assert (result.status, result.output().reward) == (RolloutStatus.TRUNCATED, 1.0)
    assert time_told(result.transcript.messages[-1]["content"]) <= 0.4 * SHORT_S


def time_told(text: str) -> float:
    told = re.fullmatch(r"<error>Tool failed: it did not end within (.*) s, and was cancelled</error>", text)
    assert told is not None
    return float(told[1])


class Slow(Threads):
    """Has a tool that takes a while, and cannot be cancelled."""

    def nap(self) -> str:
        """Rest."""
        self.release.wait(0.6 * SHORT_S)
        return "rested"


@pytest.mark.parametrize("limit", ["turn_s", "episode_s"])
async def test_a_call_that_cannot_be_cancelled_keeps_its_own_time_and_no_other_one_is_begun(limit: str) -> None:
    limits: dict[str, Any] = {"tool_s": SHORT_S, "turn_s": SHORT_S, limit: SHORT_S}
    model = ScriptedModel(calls(("nap", {}), ("nap", {}), ("nap", {})), "done")
    result = await played(model, Slow, **limits)
    assert result.output().reward == 1.0
    shown = [each["content"] for each in result.transcript.messages if each["role"] == "tool"]
    late = "<error>Tool failed: it was not carried out: the time for this answer's tools had run out</error>"
    assert shown == ["rested", "rested", late]
    assert result.status == (RolloutStatus.COMPLETED if limit == "turn_s" else RolloutStatus.TRUNCATED)


async def test_a_coroutine_has_what_is_left_of_its_turn() -> None:
    model = ScriptedModel(calls(("nap", {}), ("wait", {})), "done")
    await played(model, Slow, tool_s=SHORT_S, turn_s=SHORT_S)
    assert time_told(model.shown(1)[1]) <= 0.4 * SHORT_S


async def test_a_model_that_does_not_answer_in_its_turn_is_infrastructure() -> None:
    model = ScriptedModel()
    model.hangs = True
    result = await played(model, tool_s=0.05, turn_s=0.05)
    assert result.status == RolloutStatus.ABORTED
    with pytest.raises(InfraError, match=r"no answer within 0.05 s"):
        result.output()


async def test_an_episode_whose_time_is_over_before_the_first_answer_is_infrastructure_and_not_scored() -> None:
    model = ScriptedModel()
    model.hangs = True
    result = await played(model, tool_s=0.05, turn_s=0.05, episode_s=0.05)
    assert result.status == RolloutStatus.ABORTED
    with pytest.raises(InfraError, match=r"no answer within 0.05 s"):
        result.output()
    model = ScriptedModel(calls(("add", {"amount": 1})), otherwise=httpx.Response(503))
    result = await played(model, tool_s=0.5, turn_s=0.5, episode_s=0.5)
    assert (result.status, result.transcript.turns) == (RolloutStatus.TRUNCATED, 1), "after an answer it is cut"


async def test_tools_of_an_answer_overlap_where_the_environment_allows_it() -> None:
    model = ScriptedModel(calls(("meet", {}), ("meet", {})), "done")
    await played(model, Together)
    assert model.shown(1) == ["met", "met"]


async def test_calls_of_an_environment_that_does_not_say_that_it_takes_several_are_made_one_by_one() -> None:
    instance = Other()
    model = ScriptedModel(calls(*(("touch", {}) for _ in range(4))), "done")
    await played(model, lambda: instance)
    assert len(model.shown(1)) == 4
    assert instance.most == 1


async def test_g1_tools_of_eight_episodes_run_at_the_same_time() -> None:
    meeting = threading.Barrier(8, timeout=PATIENCE_S)

    class Meeting(Counter):
        def meet(self) -> str:
            """Wait until all eight are here."""
            meeting.wait()
            return "met"

    models = [ScriptedModel(calls(("meet", {}))) for _ in range(8)]
    await asyncio.gather(*(played(model, Meeting) for model in models))
    assert [model.shown(1) for model in models] == [["met"]] * 8


async def test_a_rollout_that_is_cancelled_closes_its_environment() -> None:
    instance = Counter()
    model = ScriptedModel()
    model.hangs = True
    running = asyncio.create_task(played(model, lambda: instance))
    await model.asked.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert instance.closed == 1


# ---- the server ----


async def test_a_server_that_is_away_or_busy_is_asked_again_as_a_retry() -> None:
    model = ScriptedModel(
        httpx.ConnectError("refused"),
        httpx.Response(503, json={"error": {"message": "syncing"}}, headers={"retry-after": "0"}),
        "done",
    )
    result = await played(model)
    assert result.status == RolloutStatus.COMPLETED
    assert [headers.get("x-stainless-retry-count") for headers in model.headers] == [None, "1", "2"]
    assert result.transcript.turns == 1


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (httpx.Response(401, json={"error": {"message": "The key has expired."}}), "answered 401: The key has expired"),
        (httpx.Response(404, text="<html>no such page"), "answered 404: <html>no such page"),
        (httpx.Response(307, headers={"location": "https://model.test/"}), "answered 307: https://model.test/"),
        (httpx.Response(200, text="hello"), "not a chat completion"),
        (httpx.Response(200, json={"choices": []}), "no choice"),
        (httpx.Response(200, json={"choices": [{"message": {}}]}), "no `usage`"),
        (completion({"tool_calls": [{"name": "add"}]}), "tool calls have no id or no function"),
    ],
)
async def test_a_refusal_of_the_server_is_infrastructure_and_never_a_reward(reply: httpx.Response, why: str) -> None:
    result = await played(ScriptedModel(reply))
    assert (result.status, result.scores) == (RolloutStatus.ABORTED, None)
    with pytest.raises(InfraError, match=why):
        result.output()


class Unjudged(Counter):
    @reward
    def broken(self) -> float:
        raise RuntimeError("no judge")


async def test_an_environment_that_cannot_be_judged_is_infrastructure() -> None:
    with pytest.raises(MethodFailed, match=r"Unjudged.broken failed: RuntimeError: no judge"):
        (await played(ScriptedModel(), Unjudged)).output()


async def test_a_picture_in_a_prompt_is_not_counted_by_the_characters_of_its_file() -> None:
    class Drawn(Counter):
        def reset(self, task: Task) -> Any:
            picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{'A' * 400_000}"}}
            return [{"role": "user", "content": [{"type": "text", "text": "a" * 4000}, picture]}]

    model = ScriptedModel()
    await played(model, Drawn, tokens_max=4096)
    assert model.requests[0]["max_tokens"] == 4096 - 4000 // 4


# ---- environments ----


async def test_any_environment_may_be_played_and_one_that_is_given_stays_open() -> None:
    instance = Counter()
    environment = PlainEnvironment(instance)
    rollout = Rollout(Counter, transport=ScriptedModel())
    for _ in range(2):
        assert (await rollout.play(TASK, CREDENTIALS, environment)).output().reward == -0.5
    assert instance.closed == 0
    await environment.close()

    async def made() -> PlainEnvironment:
        return PlainEnvironment(instance)

    instance.closed = 0
    assert (await played(ScriptedModel(), made)).output().reward == -0.5
    assert instance.closed == 1


class Unmade(Counter):
    def __init__(self) -> None:
        raise OSError("no space left")


def unmade() -> Counter:
    return Unmade()


@pytest.mark.parametrize("made", [Unmade, unmade])
async def test_an_environment_that_cannot_be_made_is_infrastructure_and_leaves_no_thread(made: Any) -> None:
    before = set(threading.enumerate())
    result = await played(ScriptedModel(), made)
    with pytest.raises(ResetFailed, match="could not be made: OSError: no space left"):
        result.output()
    assert not {thread.name for thread in set(threading.enumerate()) - before}


async def test_a_function_makes_an_environment_in_the_thread_in_which_its_methods_run() -> None:
    class Kept(Threads):
        def __init__(self) -> None:
            super().__init__()
            self.made_in = threading.get_ident()

        def here(self) -> bool:
            """Say whether this is where it was made."""
            return threading.get_ident() == self.made_in

    before = set(threading.enumerate())
    model = ScriptedModel(calls(("here", {})), "done")
    await played(model, lambda: Kept())
    assert model.shown(1) == ["true"]
    assert not set(threading.enumerate()) - before


@pytest.mark.parametrize("is_plain", [True, False])
async def test_what_a_function_makes_after_its_time_is_closed(is_plain: bool) -> None:
    release, closed = threading.Event(), threading.Event()

    class Late(Counter):
        def close(self) -> None:
            closed.set()

    class LateOther(Other):
        async def close(self) -> None:
            closed.set()

    def late() -> object:
        release.wait()
        return Late() if is_plain else LateOther()

    result = await played(ScriptedModel(), late, setup_s=0.05)
    assert result.status == RolloutStatus.ABORTED
    release.set()
    assert await asyncio.to_thread(closed.wait, PATIENCE_S)


async def test_what_an_episode_changes_in_its_task_concerns_no_other_one() -> None:
    class Eats(Counter):
        def reset(self, task: Task) -> str:
            super().reset(task)
            task.metadata["left"]["cakes"].pop()
            return f"{len(task.metadata['left']['cakes'])} cakes are left."

    table = object()
    task = Task(task_id="t1", metadata={"goal": 3, "left": {"cakes": ["a", "b"]}, "table": table})
    model = ScriptedModel()
    for _ in range(2):
        assert (await played(model, Eats, task)).status == RolloutStatus.COMPLETED
    assert {request["messages"][0]["content"] for request in model.requests} == {"1 cakes are left."}
    assert task.metadata == {"goal": 3, "left": {"cakes": ["a", "b"]}, "table": table}


async def test_a_function_that_gives_two_episodes_the_same_instance_is_refused_while_the_first_one_plays() -> None:
    instance, model = Counter(), ScriptedModel()
    model.hangs = True
    first = asyncio.create_task(played(model, lambda: instance))
    await model.asked.wait()
    with pytest.raises(WrongClass, match="returned the same instance for two episodes: make a new one at each call"):
        await played(ScriptedModel(), lambda: instance)
    assert instance.closed == 0, "it belongs to the first one"
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert (await played(ScriptedModel(), lambda: instance)).output().reward == -0.5


async def test_a_function_may_return_a_coroutine_that_makes_the_environment() -> None:
    async def made(kind: type) -> Counter:
        return kind()  # type: ignore[no-any-return]

    assert (await played(ScriptedModel(), lambda: made(Counter))).output().reward == -0.5
    with pytest.raises(ResetFailed, match="could not be made: OSError: no space left"):
        (await played(ScriptedModel(), lambda: made(Unmade))).output()


async def test_an_instance_that_knows_any_attribute_is_played_as_its_class_says() -> None:
    class Wraps(Counter):
        def __getattr__(self, name: str) -> object:
            return lambda: None

    assert (await played(ScriptedModel(), lambda: Wraps())).output().reward == -0.5


async def test_a_function_that_hangs_while_it_makes_an_environment_is_given_up() -> None:
    release = threading.Event()

    def stuck() -> Counter:
        release.wait()
        return Counter()

    result = await played(ScriptedModel(), stuck, setup_s=0.05)
    with pytest.raises(EnvironmentLost, match=r"making the environment took longer than 0.05 s"):
        result.output()
    release.set()


def test_a_class_that_is_no_environment_and_an_instance_are_refused_at_once() -> None:
    with pytest.raises(WrongClass, match="cannot be used as an environment"):
        Rollout(int)
    with pytest.raises(TypeError, match=r"an instance of Counter.*pass the class"):
        Rollout(Counter())


async def test_a_timeout_of_the_environments_own_is_no_limit_of_the_rollout() -> None:
    class Judged:
        async def open(self, task: Task) -> Opening:
            return Opening(messages=[{"role": "user", "content": "go"}])

        async def call(self, call: ToolCall) -> ToolOutcome:
            raise AssertionError("it has no tools")

        async def is_over(self, transcript: Transcript) -> bool:
            return False

        async def score(self, transcript: Transcript) -> RolloutScores:
            raise TimeoutError("the judge is late")

        async def close(self) -> None: ...

    result = await played(ScriptedModel(), Judged)
    assert isinstance(result.error, MethodFailed)
    assert "the judge is late" in str(result.error)
    assert isinstance(result.error.__cause__, TimeoutError)


async def test_an_environment_that_does_not_close_in_order_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Sticky(Counter):
        async def close(self) -> None:  # type: ignore[override]
            await asyncio.Event().wait()

    with caplog.at_level(logging.WARNING, "bombus"):
        result = await played(ScriptedModel(), Sticky, setup_s=SHORT_S)
    assert result.output().reward == -0.5
    assert "closing the environment took longer than 2 s" in caplog.text
