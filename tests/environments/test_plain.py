"""Plain classes as environments: tools from methods, arguments that are checked, rewards with arguments by name."""

import asyncio
import threading
from typing import Any

import pytest

from bombus import InfraError, Task
from bombus.environments.kinds import EnvironmentLost, MethodFailed, ResetFailed, ToolCall, Transcript
from bombus.environments.plain.description import WrongClass, describe
from bombus.environments.plain.environment import PlainEnvironment
from bombus.environments.plain.marks import metric, reward, stop
from tests.environments.worlds import Counter, Threads, Together

TASK = Task(task_id="t1", metadata={"goal": 3})


def call(name: str, arguments: str = "{}") -> ToolCall:
    return ToolCall(id="c1", name=name, arguments=arguments)


def test_public_methods_are_tools_and_everything_else_is_not() -> None:
    assert list(describe(Counter).tools) == ["add", "where", "fail"]


def test_the_schema_of_a_tool_comes_from_type_hints_and_docstring() -> None:
    add = describe(Counter).tools["add"].schema
    assert add.description == "Add to the count."
    assert add.parameters == {
        "type": "object",
        "properties": {
            "amount": {"type": "integer", "description": "how much to add"},
            "times": {"type": "integer", "description": "how often, as a whole number", "default": 1},
        },
        "required": ["amount"],
        "additionalProperties": False,
    }
    where = describe(Counter).tools["where"].schema.parameters
    assert where["properties"]["point"] == {"$ref": "#/$defs/Point", "description": "in the plane"}
    assert where["$defs"]["Point"]["properties"]["x"] == {"type": "integer"}


async def test_a_tool_is_called_with_arguments_that_were_checked() -> None:
    environment = PlainEnvironment(Counter)
    opening = await environment.open(TASK)
    assert opening.messages == [{"role": "user", "content": "Count to 3."}]
    assert [tool.name for tool in opening.tools] == ["add", "where", "fail"]
    added = await environment.call(call("add", '{"amount": "2", "times": 3}'))
    assert (added.text, added.failed) == ('{"count":6}', False)
    assert (await environment.call(call("where", '{"point": {"x": 4}}'))).text == "4/0"
    await environment.close()


class Named:
    """Has a tool whose arguments are named like much else."""

    def reset(self, task: Task) -> str:
        return "Name it."

    def put(
        self, name: str, together: bool, schema: str, copy: int, json: str, model_config: str, func: int = 0
    ) -> str:
        """Say what was given."""
        return f"{name} {together} {schema} {copy} {json} {model_config} {func}"

    @reward
    def always(self) -> float:
        return 1.0


async def test_the_arguments_of_a_tool_may_have_any_name() -> None:
    environment = PlainEnvironment(Named)
    await environment.open(TASK)
    given = '{"name": "a", "together": true, "schema": "b", "copy": 3, "json": "c", "model_config": "d", "func": 4}'
    outcome = await environment.call(call("put", given))
    assert (outcome.text, outcome.failed) == ("a True b 3 c d 4", False)
    await environment.close()


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("add", "{}", "the arguments are wrong: amount: Field required"),
        ("add", '{"amount": 1, "more": 2}', "the arguments are wrong: more: Extra inputs are not permitted"),
        ("add", '{"amount": ', "the arguments are wrong: the arguments: Invalid JSON"),
        ("add", "[1]", "the arguments are wrong: the arguments: "),
        ("subtract", "{}", "there is no tool 'subtract': there is add, where, fail"),
        ("reset", "{}", "there is no tool 'reset'"),
        ("_helper", "{}", "there is no tool '_helper'"),
        ("fail", "", "ValueError: as it was asked to"),
    ],
)
async def test_what_goes_wrong_in_a_call_is_text_for_the_model(name: str, arguments: str, why: str) -> None:
    environment = PlainEnvironment(Counter())
    await environment.open(TASK)
    outcome = await environment.call(call(name, arguments))
    assert outcome.failed
    assert outcome.text.startswith(why)
    await environment.close()


async def test_the_reward_is_the_weighted_sum_of_methods_that_name_what_they_take() -> None:
    environment = PlainEnvironment(Counter())
    await environment.open(TASK)
    await environment.call(call("add", '{"amount": 3}'))
    scores = await environment.score(Transcript(turns=1))
    assert scores.rewards == {"reached": 1.0, "wrote": 1.0}
    assert scores.reward == 2.0 * 1.0 - 0.5 * 1.0
    assert scores.metrics == {"count": 3.0}
    assert scores.is_success is True
    assert not await environment.is_over(Transcript())
    await environment.call(call("add", '{"amount": 1}'))
    assert await environment.is_over(Transcript())
    await environment.close()


async def test_closing_again_does_nothing_and_what_is_closed_is_not_used_again() -> None:
    counter = Counter()
    environment = PlainEnvironment(counter)
    await environment.open(TASK)
    await environment.close()
    await environment.close()
    assert counter.closed == 1
    with pytest.raises(EnvironmentLost, match="was closed"):
        await environment.call(call("add", '{"amount": 3}'))


# ---- what is wrong with a class ----


class Wrong:
    def __init__(self, size: int) -> None:
        self.size = size

    def reset(self) -> str:
        return ""

    def untyped(self, a) -> str:  # type: ignore[no-untyped-def]
        """Take something."""
        return str(a)

    def silent(self) -> None:
        pass

    def many(self, *all: int) -> None:
        """Take any number."""

    @metric
    def length(self, answer: str) -> float:
        return len(answer)

    @reward(low=1.0, high=0.0, role="solver")
    def right(self, tusk: Task) -> float:
        return 0.0


def test_everything_that_is_wrong_with_a_class_is_said_in_sentences() -> None:
    with pytest.raises(WrongClass) as wrong:
        describe(Wrong)
    assert wrong.value.problems == (
        "The tool `untyped`: its argument `a` has no type hint. A method that is not a tool begins with an underscore.",
        "The tool `silent`: it has no docstring, which is what tells the model what it does. A method that is not a "
        "tool begins with an underscore.",
        "The tool `many`: its argument `all` cannot be given by name: give it arguments with names. A method that is "
        "not a tool begins with an underscore.",
        "The metric `length` takes `answer`, which is not there: it can take task, transcript and state, by these "
        "names.",
        "The reward `right` takes `tusk`, which is not there: it can take task, transcript and state, by these names.",
        "The reward `right` lies from 1 to 0: give a low and a higher high.",
        "The reward `right` is for the role 'solver', and only a class with `play` has roles.",
        "`reset` cannot be called as `reset(self, task)`: give it these arguments.",
        "It cannot be made without arguments: give them defaults, or give `lambda: Wrong(...)` in its place, which "
        "makes one.",
    )


class Forgetful(Counter):
    def reached(self, task: Task, state: dict[str, int]) -> float:
        """Say how far it is."""
        return 0.5


def test_a_reward_that_is_overridden_without_its_decorator_is_not_lost_silently() -> None:
    with pytest.raises(WrongClass, match="`reached` overrides a method with @reward and has no decorator itself"):
        describe(Forgetful)


class Nothing:
    async def play(self, task: Task) -> None:
        pass

    @stop
    def over(self) -> bool:
        return True


def test_a_class_without_reset_and_without_rewards_is_told_so() -> None:
    with pytest.raises(WrongClass, match=r"It has no `reset\(self, task\)`.*It has no method with @reward"):
        describe(object)
    with pytest.raises(WrongClass, match=r"`play` cannot be called as `play\(self, task, agents\)`.*@stop"):
        describe(Nothing)


async def test_a_function_may_make_the_instance_with_arguments_of_its_own() -> None:
    environment = PlainEnvironment(lambda: Counter())
    assert (await environment.open(TASK)).messages
    await environment.close()

    def broken() -> Counter:
        raise OSError("no space left")

    with pytest.raises(ResetFailed, match="could not be made: OSError: no space left"):
        await PlainEnvironment(broken).open(TASK)


# ---- what fails is infrastructure, and never a reward ----


class Failing(Counter):
    def reset(self, task: Task) -> Any:
        if task.metadata["goal"] == "none":
            return None
        raise InfraError("the simulator is gone") if task.metadata["goal"] == "infra" else KeyError("goal")


@pytest.mark.parametrize(
    ("goal", "why"),
    [
        ("none", "Failing.reset returned NoneType: it returns the first message as text"),
        ("infra", "the simulator is gone"),
        ("", "Failing.reset failed: KeyError: 'goal'"),
    ],
)
async def test_a_reset_that_fails_is_infrastructure(goal: str, why: str) -> None:
    environment = PlainEnvironment(Failing)
    with pytest.raises(InfraError, match=why):
        await environment.open(Task(metadata={"goal": goal}))
    await environment.close()


class Unjudged(Counter):
    @reward
    def broken(self, task: Task) -> Any:
        return {"nan": float("nan"), "text": "1", "raises": None}[task.metadata["what"]] or 1 / 0


@pytest.mark.parametrize(
    ("what", "why"),
    [("nan", "returned nan"), ("text", "returned '1'"), ("raises", "failed: ZeroDivisionError")],
)
async def test_a_reward_that_fails_is_infrastructure_and_not_zero(what: str, why: str) -> None:
    environment = PlainEnvironment(Unjudged)
    await environment.open(Task(metadata={"goal": 1, "what": what}))
    with pytest.raises(MethodFailed, match=rf"Unjudged.broken {why}"):
        await environment.score(Transcript())
    await environment.close()


# ---- threads ----


async def test_methods_of_a_world_run_off_the_loop_in_one_thread_which_ends_with_it() -> None:
    before = set(threading.enumerate())
    environment = PlainEnvironment(Threads())
    await environment.open(TASK)
    idents = await asyncio.gather(*(environment.call(call("touch")) for _ in range(8)))
    assert len({outcome.text for outcome in idents}) == 1
    assert idents[0].text != str(threading.get_ident())
    await environment.close()
    assert not set(threading.enumerate()) - before


async def test_tools_overlap_where_their_class_says_so() -> None:
    environment = PlainEnvironment(Together())
    await environment.open(TASK)
    met = await asyncio.gather(*(environment.call(call("meet")) for _ in range(2)))
    assert [outcome.text for outcome in met] == ["met", "met"]
    await environment.close()


async def test_a_world_whose_tool_hangs_in_a_thread_is_given_up() -> None:
    world = Threads()
    environment = PlainEnvironment(world)
    await environment.open(TASK)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await environment.call(call("hang"))
    with pytest.raises(EnvironmentLost, match=r"`hang` did not end in its time.*cannot be cancelled"):
        await environment.is_over(Transcript())
    await environment.close()
    world.release.set()


async def test_a_coroutine_that_takes_too_long_is_cancelled_and_its_world_goes_on() -> None:
    environment = PlainEnvironment(Threads())
    await environment.open(TASK)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await environment.call(call("wait"))
    assert not (await environment.call(call("touch"))).failed
    await environment.close()
