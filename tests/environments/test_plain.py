"""Plain classes as environments: tools from methods, arguments that are checked, rewards with arguments by name."""

import asyncio
import itertools
import logging
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partialmethod, singledispatchmethod
from typing import Annotated, Any

import numpy as np
import pytest
from pydantic import BaseModel, Field

from bombus import InfraError, Task
from bombus.environments.kinds import EnvironmentLost, MethodFailed, ResetFailed, ToolCall, ToolOutcome, Transcript
from bombus.environments.plain.description import WrongClass, describe
from bombus.environments.plain.environment import PlainEnvironment
from bombus.environments.plain.marks import metric, reward, stop, success
from bombus.sdk import running
from tests.environments.small_environments import Counter, Point, Threads, Together
from tests.patience import PATIENCE_S, until

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


def moving(sign: int) -> Any:
    def tool(self: "Counter", by: int) -> int:
        """Move the count."""
        self.state["count"] += sign * by
        return int(self.state["count"])

    return tool


class Moving(Counter):
    """Has tools that one function has made, and one with two names."""

    up = moving(1)
    down = moving(-1)
    plus = Counter.add


async def test_a_tool_has_the_name_that_the_class_gives_it_whatever_its_function_is_called() -> None:
    tools = describe(Moving).tools
    assert {name: tool.schema.name for name, tool in tools.items()} == {name: name for name in tools}
    environment = PlainEnvironment(Moving)
    await environment.open(TASK)
    for name, argument, text in (("up", "by", "5"), ("down", "by", "0"), ("plus", "amount", '{"count":5}')):
        outcome = await environment.call(call(name, f'{{"{argument}": 5}}'))
        assert (outcome.text, outcome.failed) == (text, False)
    await environment.close()


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
    """Has a tool whose arguments have names that much else has too."""

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
        ("subtract", "{}", "there is no tool 'subtract': the tools are add, where, fail"),
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


async def test_a_model_is_told_five_wrong_arguments_of_a_call_and_how_many_more_there_are() -> None:
    environment = PlainEnvironment(Named)
    await environment.open(TASK)
    for given, more in (('{"name": "a"}', ""), ("{}", "; and 1 more")):
        text = (await environment.call(call("put", given))).text
        assert text.count("Field required") == 5
        assert text.endswith(f"Field required{more}")
    await environment.close()


@dataclass
class Span:
    """What a tool is given, whose own code raises for some."""

    low: int
    high: int

    def __post_init__(self) -> None:
        self.step = 10 // (self.high - self.low)


class Ranges(Counter):
    def split(self, span: Span) -> int:
        """Split a range."""
        return span.step


async def test_arguments_at_which_the_code_of_their_type_fails_are_told_to_the_model() -> None:
    environment = PlainEnvironment(Ranges())
    await environment.open(TASK)
    assert (await environment.call(call("split", '{"span": {"low": 0, "high": 5}}'))).text == "2"
    outcome = await environment.call(call("split", '{"span": {"low": 1, "high": 1}}'))
    assert outcome.failed
    assert outcome.text == "the arguments are wrong: ZeroDivisionError: integer division or modulo by zero"
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
    with pytest.raises(EnvironmentLost, match="has already been closed"):
        await environment.call(call("add", '{"amount": 3}'))


async def test_an_instance_whose_episode_is_over_may_be_played_again() -> None:
    counter = Counter()
    first, second = (PlainEnvironment(lambda: counter) for _ in range(2))
    for environment in (first, second):
        await environment.open(TASK)
        await environment.close()
    assert counter.closed == 2


async def test_only_a_close_that_the_class_has_is_called() -> None:
    asked = []

    class Wraps(Threads):
        def __getattr__(self, name: str) -> object:
            return lambda: asked.append(name)

    environment = PlainEnvironment(Wraps())
    await environment.open(TASK)
    await environment.close()
    assert asked == []


class Working(Counter):
    """Has a tool that ends when a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.release = asyncio.Event(), asyncio.Event()

    async def work(self) -> str:
        """Work."""
        self.begun.set()
        await self.release.wait()
        return f"closed {self.closed} times"

    async def close(self) -> None:  # type: ignore[override]
        self.closed += 1


async def test_an_environment_is_closed_after_the_method_that_runs_in_it() -> None:
    instance = Working()
    environment = PlainEnvironment(instance)
    await environment.open(TASK)
    working = asyncio.create_task(environment.call(call("work")))
    await instance.begun.wait()
    closing = asyncio.create_task(environment.close())
    await asyncio.wait({closing}, timeout=0.05)
    instance.release.set()
    assert (await working).text == "closed 0 times"
    await closing
    assert instance.closed == 1


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
        "The tool `silent`: it has no docstring: write one that tells the model what the tool does. A method "
        "that is not a tool begins with an underscore.",
        "The tool `many`: its argument `all` is positional-only or variadic: the model gives arguments by name. A "
        "method that is not a tool begins with an underscore.",
        "The metric `length` takes `answer`, which does not exist: its arguments must be among task, transcript "
        "and state.",
        "The reward `right` takes `tusk`, which does not exist: its arguments must be among task, transcript "
        "and state.",
        "The reward `right` has low=1 and high=0: low must be less than high.",
        "The reward `right` has the role 'solver', but only a class with `play` has roles.",
        "`reset` cannot be called as `reset(self, task)`: give it these arguments, by these names.",
        "It cannot be created without arguments: give them defaults, or pass `lambda: Wrong(...)` instead of the "
        "class.",
    )


class Hidden(Counter):
    """Has rewards and tools where they would not be found."""

    @staticmethod
    @reward
    def fixed() -> float:
        return 1.0

    @property
    @reward
    def computed(self) -> float:
        return 1.0

    @reward
    def _secret(self) -> float:
        return 1.0

    @lru_cache  # noqa: B019 - what it is about
    def cached(self, number: int) -> str:
        """Look something up."""
        return ""

    def each(self) -> Iterator[str]:
        """Tell one after the other."""
        yield ""

    @singledispatchmethod
    def by_kind(self, what: int) -> str:
        """Tell what it is."""
        return ""

    always = partialmethod(each)

    def alone() -> str:  # type: ignore[misc]
        """Tell something without an environment."""
        return ""


class Derived(Counter):
    """Has tools beside those of its base, a whole number as a weight, and what no model is shown."""

    def twice(self) -> int:
        """Double the count."""
        return 0

    @reward(3)
    def always(self) -> float:
        return 1.0

    @lru_cache  # noqa: B019 - what it is about
    def _cached(self, number: int) -> str:
        return ""


def test_tools_of_a_base_come_first_and_a_hidden_method_may_be_behind_anything() -> None:
    described = describe(Derived)
    assert list(described.tools) == ["add", "where", "fail", "twice"]
    assert [(each.name, each.mark.weight) for each in described.rewards] == [
        ("reached", 2.0),
        ("wrote", -0.5),
        ("always", 3),
    ]


class Stateful:
    def gold(self) -> list[object]:
        return []

    def reset(self, t: Task) -> str:
        return ""

    def state(self) -> str:
        """Tell the state."""
        return ""

    @reward
    def one(self) -> float:
        return 1.0


def test_what_would_be_left_out_without_a_word_is_said() -> None:
    with pytest.raises(WrongClass) as wrong:
        describe(Hidden)
    assert wrong.value.problems == (
        "`fixed` has @reward and is a staticmethod: make it a plain method.",
        "`computed` has @reward and is a property: make it a plain method.",
        "`_secret` has @reward and begins with an underscore: give it a public name.",
        "`cached` is a method wrapped in a _lru_cache_wrapper, so it is not a tool: remove the wrapper, or begin its "
        "name with an underscore.",
        "`by_kind` is a method wrapped in a singledispatchmethod, so it is not a tool: remove the wrapper, or begin "
        "its name with an underscore.",
        "`always` is a method wrapped in a partialmethod, so it is not a tool: remove the wrapper, or begin its name "
        "with an underscore.",
        "The tool `each`: it is a generator, which cannot be shown to the model: return a list or a text. A method "
        "that is not a tool begins with an underscore.",
        "The tool `alone`: it has no parameter `self`. A method that is not a tool begins with an underscore.",
    )
    with pytest.raises(WrongClass) as wrong:
        describe(Stateful)
    assert wrong.value.problems == (
        "`state` names the attribute that rewards take, and cannot be a tool: give it another name.",
        "`reset` cannot be called as `reset(self, task)`: give it these arguments, by these names.",
        "`gold` cannot be called as `gold(self, task)`: give it these arguments, by these names.",
    )


class Modelled(BaseModel):
    """Is a pydantic model."""

    cents: int = 0

    def reset(self, task: Task) -> str:
        return ""

    @reward
    def one(self) -> float:
        return 1.0


def test_a_pydantic_model_is_refused_in_one_sentence() -> None:
    with pytest.raises(WrongClass) as wrong:
        describe(Modelled)
    assert wrong.value.problems == (
        "It is a pydantic model, whose own methods would be tools: use a plain class that holds a model.",
    )


class Weighed(Counter):
    """Has rewards whose marks are no numbers."""

    @reward(weight="0.5")  # type: ignore[call-overload,untyped-decorator]
    def text(self) -> float:
        return 1.0

    @reward(weight=float("inf"), low=None)  # type: ignore[call-overload,untyped-decorator]
    def endless(self) -> float:
        return 1.0


def test_a_mark_that_is_no_finite_number_is_named_with_its_value() -> None:
    with pytest.raises(WrongClass) as wrong:
        describe(Weighed)
    assert wrong.value.problems == (
        "The reward `text` has weight='0.5', which is not a finite number.",
        "The reward `endless` has weight=inf, which is not a finite number.",
        "The reward `endless` has low=None, which is not a finite number.",
    )


def test_a_class_has_128_tools_at_most() -> None:
    for number in (128, 129):
        kind = type("Many", (Counter,), {f"by_{each}": moving(each) for each in range(number - 3)})
        if number == 128:
            assert len(describe(kind).tools) == number
        else:
            with pytest.raises(WrongClass, match="It has 129 tools, but the limit is 128: split it"):
                describe(kind)


async def test_a_function_that_returns_a_class_is_told_to_return_an_instance() -> None:
    async def make() -> type:
        return Counter

    for function in (lambda: Counter, make):
        environment = PlainEnvironment(function)
        with pytest.raises(WrongClass, match=r"returned the class itself: return an instance, `Counter\(\)`"):
            await environment.open(TASK)
        await environment.close()


def test_a_class_that_cannot_be_made_yet_is_refused() -> None:
    class Abstract(Counter, ABC):
        @abstractmethod
        def _board(self) -> str: ...

    with pytest.raises(WrongClass, match="is abstract and cannot be instantiated: it does not define _board"):
        describe(Abstract)


class Injected(Counter):
    """Has tools that take what only decorated methods get, and an argument whose pattern pydantic cannot read."""

    tools_run_together = property(lambda self: False)

    def submit(self, answer: str, task: Task) -> str:
        """Hand the answer in."""
        return answer

    def look(self, transcript: Transcript) -> str:
        """Look back."""
        return ""

    def open_as(self, user: Annotated[str, Field(pattern="^(?!root)")]) -> str:
        """Log in."""
        return user


def test_what_a_model_would_write_in_the_place_of_the_rollout_is_no_argument_of_a_tool() -> None:
    with pytest.raises(WrongClass) as wrong:
        describe(Injected)
    submit, look, open_as, together = wrong.value.problems
    assert submit.startswith("The tool `submit`: its argument `task` is a Task, which the model would have to write")
    assert look.startswith("The tool `look`: its argument `transcript` is a Transcript, which the model would have ")
    assert open_as.startswith("The tool `open_as`: its arguments have no JSON schema: SchemaError: ")
    assert together == "`tools_run_together` is neither True nor False: set it to one of them."


def test_a_second_decorator_of_another_kind_is_refused_and_hides_no_reward() -> None:
    with pytest.raises(
        TypeError, match="@success decorates a method that already has @reward, but a method can have only one"
    ):

        class Doubled(Counter):
            @success
            @reward
            def right(self) -> bool:
                return True


def test_decorators_take_empty_parentheses_and_a_reward_its_weight_alone() -> None:
    class Marked:
        def reset(self, task: Task) -> str:
            return ""

        @reward(0.5)
        def half(self) -> float:
            return 1.0

        @reward()
        def whole(self) -> float:
            return 1.0

        @metric()
        def length(self) -> float:
            return 0.0

        @success()
        def good(self) -> bool:
            return True

        @stop()
        def over(self) -> bool:
            return True

    found = describe(Marked)
    assert [(each.name, each.mark.weight) for each in found.rewards] == [("half", 0.5), ("whole", 1.0)]
    assert (found.metrics[0].name, found.stops[0].name) == ("length", "over")
    assert found.success is not None
    with pytest.raises(TypeError, match="@reward decorates a property: it must decorate a plain method"):
        reward(property(lambda self: 1.0))  # type: ignore[call-overload]


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
        if task.metadata["goal"] == "object":
            return [{"role": "user", "content": object()}]
        raise InfraError("the simulator is gone") if task.metadata["goal"] == "infra" else KeyError("goal")


@pytest.mark.parametrize(
    ("goal", "why"),
    [
        ("none", "Failing.reset returned NoneType: it must return the first message as text"),
        ("object", "Failing.reset returned messages that cannot be sent as JSON: TypeError"),
        ("infra", "the simulator is gone"),
        ("", "Failing.reset failed: KeyError: 'goal'"),
    ],
)
async def test_a_reset_that_fails_is_infrastructure(goal: str, why: str) -> None:
    environment = PlainEnvironment(Failing)
    with pytest.raises(InfraError, match=why):
        await environment.open(Task(metadata={"goal": goal}))
    await environment.close()


class Several:
    """Is as an array of several numbers, which is neither one number nor yes or no."""

    def __float__(self) -> float:
        raise RuntimeError("there are several")

    __bool__ = __float__

    def __repr__(self) -> str:
        return "several numbers"


class Undecided(Counter):
    @success
    def done(self, task: Task) -> Any:
        return Several()

    @stop
    def is_full(self) -> Any:
        return Several()


async def test_an_answer_that_is_neither_yes_nor_no_is_infrastructure() -> None:
    environment = PlainEnvironment(Undecided)
    await environment.open(TASK)
    why = "returned several numbers, which is neither true nor false: RuntimeError: there are several"
    with pytest.raises(MethodFailed, match=rf"Undecided\.is_full {why}"):
        await environment.is_over(Transcript())
    with pytest.raises(MethodFailed, match=rf"Undecided\.done {why}"):
        await environment.score(Transcript())
    await environment.close()


class Unjudged(Counter):
    @reward
    def broken(self, task: Task) -> Any:
        found = {
            "nan": float("nan"),
            "text": "1",
            "bytes": b"1",
            "huge": 10**400,
            "unshown": Unshown(),
            "several": Several(),
        }
        if task.metadata["what"] == "raises":
            return 1 / 0
        return found[task.metadata["what"]]


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("nan", "returned nan"),
        ("text", "did not return a number: a reward must be a number .* not str '1'"),
        ("bytes", "did not return a number: .* not bytes b'1'"),
        ("several", "did not return a number: .* not Several"),
        ("huge", "did not return a number: .* not int 1000"),
        ("unshown", "did not return a number: .* not Unshown"),
        ("raises", "failed: ZeroDivisionError"),
    ],
)
async def test_a_reward_that_fails_is_infrastructure_and_not_zero(what: str, why: str) -> None:
    environment = PlainEnvironment(Unjudged)
    await environment.open(Task(metadata={"goal": 1, "what": what}))
    with pytest.raises(MethodFailed, match=rf"Unjudged.broken {why}"):
        await environment.score(Transcript())
    await environment.close()


class Measured(Counter):
    @metric
    def nothing(self) -> float:
        return float("nan")

    @metric
    def wrong(self) -> float:
        raise KeyError("wrong")


async def test_a_metric_that_has_no_number_is_left_out_and_costs_no_episode(caplog: pytest.LogCaptureFixture) -> None:
    environment = PlainEnvironment(Measured)
    await environment.open(TASK)
    with caplog.at_level(logging.WARNING, "bombus"):
        scores = await environment.score(Transcript())
    assert set(scores.metrics) == {"count"}
    assert "a metric was left out: Measured.wrong failed: KeyError: 'wrong'" in caplog.text
    await environment.close()


# ---- what tools return, and how they fail ----


class Results(Counter):
    def printed(self) -> bytes:
        """Return what a program prints."""
        return b"hello\xff\n"

    def reset(self, task: Task) -> str:
        return super().reset(task) + self.named()

    def named(self) -> str:
        """Return the name of a file that is no text."""
        return b"a\xff".decode(errors="surrogateescape")

    def misnamed(self) -> None:
        """Fail with such a name."""
        raise OSError(self.named())

    def points(self) -> list[Point]:
        """Return models."""
        return [Point(x=1), Point(x=2, y=3)]

    def board(self) -> dict[str, object]:
        """Return arrays and numbers of NumPy's."""
        return {"cells": [np.zeros(2), np.eye(2, dtype=int)], "score": np.float32(0.5), "moves": np.int64(3)}

    def picture(self) -> Any:
        """Return an array that is too large to be shown."""
        return np.zeros(1001)

    async def leave(self) -> None:
        """End the program."""
        sys.exit(2)

    async def cancel(self) -> None:
        """Cancel a task of its own, and await it."""
        helper = asyncio.create_task(asyncio.Event().wait())
        helper.cancel()
        await helper

    async def cancel_again(self) -> None:
        """Do so after a group of tasks that has failed, and has cancelled the task that waits for it."""

        async def fails() -> None:
            await asyncio.sleep(0)
            raise ValueError

        with pytest.raises(ExceptionGroup):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(fails())
        await self.cancel()

    def give_up(self) -> None:
        """Fail as a test does, with what is no Exception."""
        raise Quit("here")

    async def give_up_too(self) -> None:
        """Fail like that in a coroutine."""
        raise Quit("there")

    def speechless(self) -> None:
        """Fail without a text."""
        raise Speechless

    def unshown(self) -> object:
        """Return what cannot be shown."""
        return Unshown()

    def several(self) -> Iterator[int]:
        """Return what has no end, as far as one can see."""
        return itertools.count()

    def pages(self) -> AsyncIterator[int]:
        """Return what only a loop could read."""

        async def numbers() -> AsyncIterator[int]:
            yield 1

        return numbers()


class Quit(BaseException):
    """Is no Exception, as pytest's own are none."""


class Speechless(Exception):
    def __str__(self) -> str:
        raise KeyError("text")


class Unshown:
    def __repr__(self) -> str:
        raise KeyError("name")


@pytest.mark.parametrize(
    ("tool", "text", "failed"),
    [
        ("printed", "hello\N{REPLACEMENT CHARACTER}\n", False),
        ("named", "a?", False),
        ("misnamed", "OSError: a?", True),
        ("points", '[{"x":1,"y":0},{"x":2,"y":3}]', False),
        ("board", '{"cells":[[0.0,0.0],[[1,0],[0,1]]],"score":0.5,"moves":3}', False),
        ("picture", "[0. 0. 0. ... 0. 0. 0.]", False),
        ("leave", "RuntimeError: it raised SystemExit(2)", True),
        ("cancel", "RuntimeError: it raised a CancelledError, but it had not been cancelled", True),
        ("cancel_again", "RuntimeError: it raised a CancelledError, but it had not been cancelled", True),
        ("give_up", "RuntimeError: it raised Quit('here')", True),
        ("give_up_too", "RuntimeError: it raised Quit('there')", True),
        ("speechless", "Speechless: its text is not available: str() raised KeyError", True),
        ("unshown", "KeyError: 'name'", True),
        ("several", "TypeError: it returned count, which cannot be shown to the model: return a list or a text", True),
        (
            "pages",
            "TypeError: it returned async_generator, which cannot be shown to the model: return a list or a text",
            True,
        ),
    ],
)
async def test_whatever_a_tool_returns_or_raises_is_text_that_a_model_can_be_shown(
    tool: str, text: str, failed: bool
) -> None:
    environment = PlainEnvironment(Results)
    await environment.open(TASK)
    assert await environment.call(call(tool)) == ToolOutcome(text=text, failed=failed)
    await environment.close()


async def test_what_reset_says_is_text_that_a_model_can_be_shown_too() -> None:
    environment = PlainEnvironment(Results)
    opening = await environment.open(TASK)
    assert opening.messages == [{"role": "user", "content": "Count to 3.a?"}]
    await environment.close()


# ---- threads ----


async def test_methods_of_an_environment_run_off_the_loop_in_one_thread_which_ends_with_it() -> None:
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


async def test_an_environment_whose_tool_hangs_in_a_thread_is_given_up() -> None:
    instance = Threads()
    environment = PlainEnvironment(instance)
    await environment.open(TASK)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await environment.call(call("hang"))
    with pytest.raises(EnvironmentLost, match=r"`hang` did not end in time.*cannot be cancelled"):
        await environment.is_over(Transcript())
    await environment.close()
    instance.release.set()


async def test_a_call_that_has_waited_for_one_that_hangs_is_not_carried_out() -> None:
    instance = Threads()
    environment = PlainEnvironment(instance)
    await environment.open(TASK)
    hanging = asyncio.create_task(environment.call(call("hang")))
    waiting = asyncio.create_task(environment.call(call("touch")))
    await until(instance.hangs.is_set)
    hanging.cancel()
    with pytest.raises(EnvironmentLost, match="`hang` did not end in time"):
        await waiting
    await environment.close()
    instance.release.set()


class Open(Together):
    """Tells when it was closed, and in which thread."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Barrier(3, timeout=PATIENCE_S)
        self.closed = threading.Event()
        self.closed_in = ""

    def stall(self) -> None:
        """Wait until a test lets it go on."""
        self.begun.wait()
        self.release.wait()

    def close(self) -> None:
        self.closed_in = threading.current_thread().name
        self.closed.set()


async def test_an_environment_that_is_given_up_is_closed_once_its_methods_have_ended() -> None:
    instance = Open()
    environment = PlainEnvironment(instance)
    await environment.open(TASK)
    running = [asyncio.create_task(environment.call(call("stall"))) for _ in range(2)]
    await asyncio.to_thread(instance.begun.wait)
    for each in running:
        each.cancel()
    await asyncio.wait(running)
    await environment.close()
    assert not instance.closed.is_set(), "its methods still use what `close` gives up"
    instance.release.set()
    assert await asyncio.to_thread(instance.closed.wait, PATIENCE_S)
    assert instance.closed_in.startswith("bombus-instance-")


class Parted(Together):
    """Has two methods that end one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Barrier(3, timeout=PATIENCE_S)
        self.left = {name: threading.Event() for name in ("first", "last")}
        self.threads: dict[str, threading.Thread] = {}
        self.closed = threading.Event()

    def stall(self, name: str) -> None:
        """Wait until a test lets it go on."""
        self.threads[name] = threading.current_thread()
        self.begun.wait()
        self.left[name].wait()

    def close(self) -> None:
        self.closed.set()


async def test_it_is_not_closed_before_the_last_of_them_has_ended() -> None:
    instance = Parted()
    environment = PlainEnvironment(instance)
    await environment.open(TASK)
    running = [asyncio.create_task(environment.call(call("stall", f'{{"name": "{name}"}}'))) for name in instance.left]
    await asyncio.to_thread(instance.begun.wait)
    for each in running:
        each.cancel()
    await asyncio.wait(running)
    await environment.close()
    instance.left["first"].set()
    await asyncio.to_thread(instance.threads["first"].join, PATIENCE_S)
    assert not instance.closed.is_set()
    instance.left["last"].set()
    assert await asyncio.to_thread(instance.closed.wait, PATIENCE_S)


async def test_an_environment_that_is_made_after_nobody_waits_for_it_any_more_is_closed_as_well() -> None:
    release, closed = threading.Event(), threading.Event()

    class Late(Counter):
        def __init__(self) -> None:
            super().__init__()
            release.wait()

        def close(self) -> None:
            closed.set()

    environment = PlainEnvironment(Late)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await environment.open(TASK)
    await environment.close()
    assert not closed.is_set()
    release.set()
    assert await asyncio.to_thread(closed.wait, PATIENCE_S)


async def test_an_environment_whose_coroutine_goes_on_although_it_was_cancelled_is_closed_once_that_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(running, "CANCELLED_S", 0.05)
    may_end = asyncio.Event()
    closed: list[bool] = []

    class Stubborn(Counter):
        async def wait(self) -> None:
            """Go on until it may end."""
            while not may_end.is_set():
                with suppress(asyncio.CancelledError):
                    await may_end.wait()

        def close(self) -> None:
            closed.append(may_end.is_set())

    environment = PlainEnvironment(Stubborn)
    await environment.open(TASK)
    for work in (environment.call(call("wait")), environment.close()):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await work
    may_end.set()
    await until(lambda: closed)
    await environment.close()
    assert closed == [True]


async def test_a_coroutine_that_takes_too_long_is_cancelled_and_its_environment_goes_on() -> None:
    environment = PlainEnvironment(Threads())
    await environment.open(TASK)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await environment.call(call("wait"))
    assert not (await environment.call(call("touch"))).failed
    await environment.close()
