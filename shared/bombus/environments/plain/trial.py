"""Tries out a plain class without a model, by carrying out its gold solution or by doing nothing."""

import itertools
from collections.abc import Mapping, Sequence

import msgspec

from bombus.environments.budgets import RolloutBudgets
from bombus.environments.chat_model import ChatAnswer
from bombus.environments.kinds import MessageDict, RolloutScores, ToolCall, ToolOutcome, Transcript
from bombus.environments.plain.environment import PlainEnvironment
from bombus.environments.plain.play import Play
from bombus.errors import BombusError
from bombus.sdk.types import Task

CALLS_MAX = 10_000  # the most calls in a gold solution
ANSWERS_MAX = 10_000  # the most answers to the agents of a `play`, which might never end


class WrongGold(BombusError):
    """`gold` returned something that is not a solution. The text says what a solution must be."""


class GoldSolution(msgspec.Struct, frozen=True, kw_only=True):
    """The tool calls that solve a task, and the final answer."""

    calls: tuple[ToolCall, ...] = ()
    answer: str = ""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one trial: the first messages, the outcomes of the tool calls, and the scores."""

    messages: list[MessageDict]
    outcomes: tuple[ToolOutcome, ...]
    scores: RolloutScores
    numbers: dict[str, list[float]] = {}  # what each reward method returned for the calls of a `play`


def solution_of(found: object, name: str) -> GoldSolution:
    """Return what `gold` returned as a solution. Raises `WrongGold`."""
    if not isinstance(found, list | tuple) or len(found) > CALLS_MAX:
        raise WrongGold(_no_gold(name, found))
    steps = list(found)
    answer = steps.pop() if steps and isinstance(steps[-1], str) else ""
    calls = [_call(number, step) for number, step in enumerate(steps)]
    if None in calls:
        raise WrongGold(_no_gold(name, found))
    return GoldSolution(calls=tuple(call for call in calls if call is not None), answer=answer)


def _call(number: int, step: object) -> ToolCall | None:
    match step:
        case (str(name), Mapping() as arguments):
            return ToolCall(id=f"gold-{number}", name=name, arguments=msgspec.json.encode(dict(arguments)).decode())
        case _:
            return None


def _no_gold(name: str, found: object) -> str:
    return (
        f"{name}.gold returned a {type(found).__name__} that is not a solution: it must return a list of "
        '("tool", {"argument": value}), optionally followed by the final answer as text'
    )


async def tried(environment: PlainEnvironment, task: Task, *, gold: bool) -> Trial:
    """Open the environment, either carry out its gold solution or do nothing, and score the result. The environment is
    left open."""
    opening = await environment.open(task)
    description = environment.plain.description
    solution = GoldSolution()
    if gold:
        solution = solution_of(await environment.plain.call("gold", {"task": environment.task}), description.name)
    return await carried_out(environment, opening.messages, solution)


async def carried_out(environment: PlainEnvironment, messages: Sequence[MessageDict], solution: GoldSolution) -> Trial:
    """Carry out a solution in an open environment, and score the result."""
    transcript = Transcript(messages=list(messages))
    outcomes: list[ToolOutcome] = []
    for call in solution.calls:
        outcome = await environment.call(call)
        outcomes.append(outcome)
        function = {"name": call.name, "arguments": call.arguments}
        asked = {"id": call.id, "type": "function", "function": function}
        transcript.messages += [
            {"role": "assistant", "content": "", "tool_calls": [asked]},
            {"role": "tool", "tool_call_id": call.id, "content": outcome.text},
        ]
        transcript.turns += 1
        transcript.tool_calls += 1
        transcript.tool_failures += outcome.failed
        await environment.is_over(transcript)
    transcript.messages.append({"role": "assistant", "content": solution.answer})
    transcript.turns += 1
    await environment.is_over(transcript)
    return Trial(messages=list(messages), outcomes=tuple(outcomes), scores=await environment.score(transcript))


async def tried_play(environment: PlainEnvironment, task: Task, *, gold: bool) -> Trial:
    """Run a class with `play`, answering with the texts of its gold solution in order, and with empty texts after
    that."""
    answers: list[str] = []
    if gold:
        await environment.plain.make()
        found = await environment.plain.call("gold", {"task": task})
        if not isinstance(found, list | tuple) or not all(isinstance(each, str) for each in found):
            raise WrongGold(f"{environment.plain.description.name}.gold must return a list of answers, in order")
        answers = list(found)
    said = iter(answers)
    asked = itertools.count(1)

    async def ask(*_: object) -> ChatAnswer:
        text = next(said, "")
        return ChatAnswer(
            message={"role": "assistant", "content": text},
            text=text,
            tool_calls=(),
            finish="stop",
            prompt_tokens=1,
            completion_tokens=1,
            call=str(next(asked)),
        )

    await environment.plain.make()
    budgets = RolloutBudgets(turns_max=ANSWERS_MAX)
    play = Play(environment.plain, task, budgets, Transcript())
    await play.run(ask)
    scores, _ = await play.score()
    return Trial(messages=[], outcomes=(), scores=scores, numbers=play.numbers)
