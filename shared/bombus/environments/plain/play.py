"""Several agents in one episode: a plain class's `play` method prompts them, each in its role."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial

import msgspec

from bombus.environments.budgets import RolloutBudgets
from bombus.environments.chat_model import ChatAnswer, ModelRefused, never_answered
from bombus.environments.kinds import (
    MessageDict,
    MethodFailed,
    RolloutScores,
    RolloutStatus,
    ToolSchema,
    Transcript,
    task_of_its_own,
    went_on,
)
from bombus.environments.plain.description import MarkedMethod
from bombus.environments.plain.environment import PlainInstance, metrics_of, number_of
from bombus.errors import BombusError, with_place
from bombus.hive.failures import FailureKind
from bombus.sdk.errors import InfraError
from bombus.sdk.running import contained
from bombus.sdk.types import Task

ROLE_CHARACTERS = 64  # the longest role name that a hive stores


class BudgetSpent(BombusError):
    """The calls made by the episode's agents have used up its turns or its tokens; `kind` says which.

    The episode is truncated, unless `play` catches this.
    """

    def __init__(self, why: str, kind: FailureKind = FailureKind.TURNS) -> None:
        super().__init__(why)
        self.kind = kind


class AgentCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that an agent has made: the agent's role, the messages and the answer."""

    role: str
    messages: Sequence[MessageDict]
    answer: ChatAnswer

    @property
    def text(self) -> str:
        return self.answer.text


class RewardedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call's part of the reward. `call` is its id on the log."""

    role: str
    call: str
    reward: float


Ask = Callable[[str, Sequence[MessageDict], Sequence[ToolSchema], int | None], Awaitable[ChatAnswer]]


class PlayAgent(msgspec.Struct, frozen=True):
    """One of the episode's agents. Each of its calls is logged with its role."""

    role: str
    _ask: Ask

    async def ask(
        self,
        messages: str | Sequence[MessageDict],
        *,
        tools: Sequence[ToolSchema] = (),
        max_tokens: int | None = None,
    ) -> ChatAnswer:
        """Return the model's answer to a text or a conversation.

        Raises `BudgetSpent` if the episode's turns or tokens are used up, or `InfraError` if the model does not answer.
        """
        whole = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        return await self._ask(self.role, whole, tools, max_tokens)


class PlayAgents(Mapping[str, PlayAgent]):
    """The agents of an episode by role. Looking up a role creates its agent."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._agents: dict[str, PlayAgent] = {}

    def __getitem__(self, role: str) -> PlayAgent:
        if not (0 < len(role) <= ROLE_CHARACTERS and role.isascii() and role.isprintable()):
            raise ValueError(f"the role {role!r} must consist of 1 to {ROLE_CHARACTERS} printable ASCII characters")
        return self._agents.setdefault(role, PlayAgent(role, self._ask))

    def __contains__(self, role: object) -> bool:
        return isinstance(role, str)

    def __iter__(self) -> Iterator[str]:
        return iter(self._agents)

    def __len__(self) -> int:
        return len(self._agents)


class Play:
    """One episode of a class with `play`. `calls` contains its agents' calls, in the order of their answers.

    Once the episode is scored, `numbers` contains what each reward method returned for the calls that it applies to.
    """

    def __init__(self, instance: PlainInstance, task: Task, budgets: RolloutBudgets, transcript: Transcript) -> None:
        self.calls: list[AgentCall] = []
        self.numbers: dict[str, list[float]] = {}
        self._instance = instance
        self._task = task_of_its_own(task)
        self._budgets = budgets
        self._transcript = transcript
        self._asked = 0
        self._under_way: set[asyncio.Task[ChatAnswer]] = set()
        self._answers: list[AgentCall] = []  # including answers that arrive after `play` has ended

    async def run(self, ask: Ask) -> RolloutStatus:
        """Run the class's `play`. Raises `InfraError` if `play` or the infrastructure fails.

        Calls still in progress when `play` ends are cancelled, and answers that arrive later do not count.
        """
        name = self._instance.description.name
        left: list[str] = []
        try:
            async with asyncio.timeout(self._budgets.episode_s) as limit:
                await contained(self._played(ask), lambda: left.append("play"))
        except (InfraError, BudgetSpent, ExceptionGroup, TimeoutError) as error:
            if isinstance(error, TimeoutError) and limit.expired():
                if left:
                    raise went_on("play", FailureKind.ENVIRONMENT) from error
                if self._asked and not self._answers:
                    raise never_answered(self._budgets.episode_s) from error
                self._transcript.failure = FailureKind.TIME
                return RolloutStatus.TRUNCATED
            found = _first(error)
            if isinstance(found, BudgetSpent):
                self._transcript.failure = found.kind
                return RolloutStatus.TRUNCATED
            raise (found if isinstance(found, InfraError) else _failed(name, found)) from error
        except Exception as error:  # any error in the class's own code: an episode whose `play` failed has no reward
            raise _failed(name, error) from error
        finally:
            for asking in self._under_way:
                asking.cancel()
            await asyncio.gather(*self._under_way, return_exceptions=True)
            self.calls = list(self._answers)
        return RolloutStatus.COMPLETED

    async def _played(self, ask: Ask) -> None:
        if self._instance.description.has_reset:
            await self._instance.call("reset", {"task": self._task})
        agents = PlayAgents(partial(self._counted, ask))
        await self._instance.call("play", {"task": self._task, "agents": agents})

    async def _counted(
        self, ask: Ask, role: str, messages: Sequence[MessageDict], tools: Sequence[ToolSchema], max_tokens: int | None
    ) -> ChatAnswer:
        """Make the call in a separate task, which can be cancelled.

        Raises `BudgetSpent` if the episode's turns or tokens are used up, or `InfraError` if the model does not answer.
        """
        if self._asked >= self._budgets.turns_max:
            raise BudgetSpent(
                f"the agents have made {self._asked} calls, which is the limit turns_max: end the episode",
                FailureKind.TURNS,
            )
        self._asked += 1
        asking = asyncio.create_task(self._answered(ask, role, messages, tools, max_tokens))
        self._under_way.add(asking)
        asking.add_done_callback(self._under_way.discard)
        return await asking

    async def _answered(
        self, ask: Ask, role: str, messages: Sequence[MessageDict], tools: Sequence[ToolSchema], max_tokens: int | None
    ) -> ChatAnswer:
        try:
            answer = await ask(role, messages, tools, max_tokens)
        except ModelRefused as error:
            if error.is_too_long and self._answers:
                why = f"the prompt of {role} has become too long: {error}"
                raise BudgetSpent(why, FailureKind.TOKENS) from error
            raise
        self._answers.append(AgentCall(role=role, messages=messages, answer=answer))
        self._transcript.turns += 1
        self._transcript.prompt_tokens = answer.prompt_tokens
        self._transcript.completion_tokens += answer.completion_tokens
        return answer

    async def score(self) -> tuple[RolloutScores, tuple[RewardedCall, ...]]:
        """Return the scores, and the reward of each call. Raises `MethodFailed` if a reward method or the `success`
        method fails.

        A reward with a role applies only to that role's calls; one without a role applies to all calls. A method may
        return a list with one number for each call that its reward applies to.
        """
        description = self._instance.description
        by_call = [0.0] * len(self.calls)
        rewards: dict[str, float] = {}
        total = 0.0
        for method in description.rewards:
            places = [place for place, call in enumerate(self.calls) if method.mark.role in ("", call.role)]
            numbers = await self._numbers(method, places)
            self.numbers[method.name] = numbers
            rewards[method.name] = sum(numbers) / len(numbers) if numbers else 0.0
            total += method.mark.weight * rewards[method.name]
            for place, number in zip(places, numbers):
                by_call[place] += method.mark.weight * number
        metrics = await metrics_of(description.metrics, self._metric)
        achieved = description.success
        scores = RolloutScores(
            reward=sum(by_call) / len(by_call) if by_call else total,
            rewards=rewards,
            metrics=metrics,
            is_success=await self._instance.tells(achieved, self._values(self.calls)) if achieved is not None else None,
        )
        return scores, tuple(
            RewardedCall(role=call.role, call=call.answer.call, reward=given)
            for call, given in zip(self.calls, by_call, strict=True)
        )

    async def _metric(self, method: MarkedMethod) -> float:
        return (await self._numbers(method, []))[0]

    async def _numbers(self, method: MarkedMethod, places: list[int]) -> list[float]:
        """Return a number for each of these calls. A single number is repeated, or returned once if there are no
        calls."""
        where = f"{self._instance.description.name}.{method.name}"
        chosen = [self.calls[place] for place in places] if method.mark.kind == "reward" else self.calls
        found = await self._instance.asked(method, self._values(chosen))
        if not isinstance(found, list | tuple):
            return [number_of(found, where)] * max(1, len(places))
        if len(found) != len(places):
            raise MethodFailed(
                f"{where} returned {len(found)} numbers for {len(places)} calls: return one for each of `calls`, in "
                "order, or a single number"
            )
        return [number_of(each, where) for each in found]

    def _values(self, calls: Sequence[AgentCall]) -> dict[str, object]:
        return {"task": self._task, "transcript": self._transcript, "calls": list(calls)}


def _failed(name: str, error: BaseException) -> MethodFailed:
    return MethodFailed(f"{name}.play failed: {with_place(error)}", FailureKind.ENVIRONMENT)


def _first(error: BaseException) -> BaseException:
    """Return the most important error of a group: an infrastructure failure, else a mistake in `play`, else a spent
    budget."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    inner = [_first(each) for each in error.exceptions]
    infra = (each for each in inner if isinstance(each, InfraError))
    mistakes = (each for each in inner if not isinstance(each, BudgetSpent))
    return next(infra, None) or next(mistakes, inner[0])
