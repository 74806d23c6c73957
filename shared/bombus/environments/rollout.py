"""`Rollout` plays an environment with a model: turns, tools, budgets, and the reward at the end."""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Protocol, TypeVar

import httpx
import msgspec

from bombus.environments.budgets import RolloutBudgets
from bombus.environments.chat_model import (
    CallWatch,
    ChatAnswer,
    ChatModel,
    ModelRefused,
    OutageWarnings,
    beginning_refused,
    never_answered,
)
from bombus.environments.kinds import (
    AgentEnvironment,
    EnvironmentLost,
    MessageDict,
    MethodFailed,
    RolloutScores,
    RolloutStatus,
    ToolCall,
    ToolOutcome,
    ToolSchema,
    Transcript,
    is_environment,
    went_on,
)
from bombus.environments.plain.description import describe
from bombus.environments.plain.environment import PlainEnvironment
from bombus.environments.plain.play import Play, RewardedCall
from bombus.errors import BombusError, in_one_line, with_place, without_surrogates
from bombus.hive.failures import FailureKind
from bombus.sdk import running
from bombus.sdk.errors import InfraError
from bombus.sdk.running import contained, contained_here
from bombus.sdk.types import Credentials, Task, WorkflowOutput
from bombus.task_groups import first_failure

log = logging.getLogger("bombus")

CHARACTERS_FOR_A_TOKEN = 4  # a rough estimate for text whose tokens the server has not counted yet

T = TypeVar("T")


class WrongTask(BombusError):
    """A task contains something that no rollout can use."""


class MultiModelCredentials(Protocol):
    """The credentials for a multi-model episode: each role has the credentials for an episode on its own engine."""

    @property
    def credentials(self) -> Mapping[str, Credentials]: ...


class RolloutResult(msgspec.Struct, kw_only=True):
    """The result of a rollout. An aborted rollout has an `error` and no scores.

    For a class with `play`, `calls` contains the reward of each call, in the order of the answers. `versions` are the
    policy versions that sampled the answers, oldest first, if the server is a hive.
    """

    transcript: Transcript
    scores: RolloutScores | None = None
    error: InfraError | None = None
    calls: tuple[RewardedCall, ...] = ()
    versions: tuple[int, ...] = ()

    @property
    def status(self) -> RolloutStatus:
        return self.transcript.status or RolloutStatus.ABORTED

    def output(self) -> WorkflowOutput:
        """Return the outcome with which to end the episode. Raises the error if the rollout was aborted."""
        return self._output(self.calls)

    def outputs(self, roles: Iterable[str]) -> dict[str, WorkflowOutput]:
        """Return the outcome with which to end each role's episode. Raises the error if the rollout was aborted."""
        return {role: self._output([call for call in self.calls if call.role == role]) for role in roles}

    def _output(self, calls: Sequence[RewardedCall]) -> WorkflowOutput:
        if self.scores is None:
            raise self.error or InfraError("the rollout has no scores")
        transcript = self.transcript
        metrics: dict[str, float | list[float]] = {
            **self.scores.metrics,
            **{f"reward/{name}": value for name, value in self.scores.rewards.items()},
            "turns": float(transcript.turns),
            "tool_calls": float(transcript.tool_calls),
            "tool_failures": float(transcript.tool_failures),
            "truncated": float(self.status == RolloutStatus.TRUNCATED),
        }
        return WorkflowOutput(
            reward=_reward_of(calls, self.scores.reward),
            is_success=self.scores.is_success,
            metadata={"status": self.status.value, "turns": transcript.turns},
            log_metrics=metrics,
            failure=transcript.failure,
        )


def _aborted(transcript: Transcript, error: InfraError) -> RolloutResult:
    transcript.status = RolloutStatus.ABORTED
    return RolloutResult(transcript=transcript, error=error)


def _reward_of(calls: Sequence[RewardedCall], whole: float) -> float | dict[str, float]:
    """Return one number if all calls have the same reward, else a mapping from each call's id to its reward."""
    given = {call.reward for call in calls}
    if len(given) > 1:
        return {call.call: call.reward for call in calls}
    return given.pop() if given else whole


class Rollout:
    """Plays an environment with a model, one episode per call: `client.run_group(task, Rollout(Counter), 8)`.

    `environment` is a plain class, or a function (optionally `async`) that returns an instance of a plain class or any
    other `AgentEnvironment`. Each episode gets a separate environment. `sampling` contains fields for every request,
    such as `temperature`. `watch` is notified of every call; by default, a warning is logged while the server does not
    answer. Raises `WrongClass` for a class that cannot be an environment. `transport` is for tests.
    """

    def __init__(
        self,
        environment: object,
        budgets: RolloutBudgets | None = None,
        *,
        sampling: Mapping[str, Any] | None = None,
        watch: CallWatch | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        if not callable(environment):
            raise TypeError(
                f"Rollout was given an instance of {type(environment).__name__}, but each episode needs its own "
                "environment: pass the class, or a function that makes an instance"
            )
        if inspect.isclass(environment) and not is_environment(environment):
            describe(environment)
        self.budgets = budgets or RolloutBudgets()
        self._make = environment
        self._sampling = sampling
        self._watch = watch or OutageWarnings()
        self._transport = transport

    async def __call__(self, task: Task, credentials: Credentials) -> WorkflowOutput:
        """Play one episode, and return its outcome. Raises `InfraError` if it was aborted."""
        return (await self.play(task, credentials)).output()

    async def multi_model(self, task: Task, episode: MultiModelCredentials) -> dict[str, WorkflowOutput]:
        """Play one multi-model episode. Its roles are the agents of the class, and each agent uses its own engine's
        model.

        Returns the outcome of each role. Raises `InfraError` if the episode was aborted.
        """
        roles = episode.credentials
        return (await self._played(task, None, None, roles)).outputs(roles)

    async def play(
        self, task: Task, credentials: Credentials, environment: AgentEnvironment | None = None
    ) -> RolloutResult:
        """Play one episode, and return its full result. An `environment` passed by the caller is not closed."""
        model = self._model(credentials)
        result = await self._played(task, environment, model, {})
        return msgspec.structs.replace(result, versions=tuple(sorted(model.versions)))

    async def _played(
        self,
        task: Task,
        environment: AgentEnvironment | None,
        model: ChatModel | None,
        roles: Mapping[str, Credentials],
    ) -> RolloutResult:
        limits = _MethodLimits(Transcript())
        return await contained(self._episode(task, environment, model, roles, limits), given_up=limits.given_up)

    async def _episode(
        self,
        task: Task,
        environment: AgentEnvironment | None,
        model: ChatModel | None,
        roles: Mapping[str, Credentials],
        limits: "_MethodLimits",
    ) -> RolloutResult:
        async with AsyncExitStack() as stack:
            if model is not None:
                await stack.enter_async_context(model)
            models = {role: await stack.enter_async_context(self._model(one)) for role, one in roles.items()}
            try:
                if environment is None:
                    environment = await self._made(limits)
                    stack.push_async_callback(self._close, environment, limits)
                limits.result = await self._result(environment, task, lambda role: models.get(role, model), limits)
            except ModelRefused as error:
                named = beginning_refused(error, self.budgets.tokens_max) if error.is_too_long else error
                limits.result = _aborted(limits.transcript, named)
            except InfraError as error:
                limits.result = _aborted(limits.transcript, error)
            except Exception as error:  # an error in the caller's code, which a failing close must not hide
                limits.mistake = error
                raise
            return limits.result

    async def _result(
        self,
        environment: AgentEnvironment,
        task: Task,
        model_of: Callable[[str], ChatModel | None],
        limits: "_MethodLimits",
    ) -> RolloutResult:
        if isinstance(environment, PlainEnvironment):
            await limits.within(self.budgets.setup_s, environment.plain.make(), "making the environment")
            if environment.plain.has_play:
                return await self._play(environment, model_of, task, limits)
        model = model_of("")
        if model is None:
            raise TypeError("a multi-model episode needs a class with `play`, whose agents take its roles")
        loop = _ToolLoop(environment, model, self.budgets, task, limits)
        return RolloutResult(transcript=limits.transcript, scores=await loop.run())

    async def _play(
        self,
        environment: PlainEnvironment,
        model_of: Callable[[str], ChatModel | None],
        task: Task,
        limits: "_MethodLimits",
    ) -> RolloutResult:
        budgets, transcript = self.budgets, limits.transcript
        play = Play(environment.plain, task, budgets, transcript)

        async def ask(
            role: str, messages: Sequence[MessageDict], tools: Sequence[ToolSchema], max_tokens: int | None
        ) -> ChatAnswer:
            model = model_of(role)
            if model is None:
                raise ValueError(f"the multi-model episode has no role {role!r}: add it to the claim's engines")
            room = max(1, budgets.tokens_max - _tokens_guessed(messages))
            return await model.ask(
                messages,
                within_s=budgets.turn_s,
                tools=tools,
                max_tokens=min(room, max_tokens or room),
                total_tokens=budgets.tokens_max,
                role=role,
            )

        transcript.status = await play.run(ask)
        scores, calls = await limits.scored(budgets.setup_s, play.score())
        return RolloutResult(transcript=transcript, scores=scores, calls=calls)

    def _model(self, credentials: Credentials) -> ChatModel:
        return ChatModel(
            credentials.base_url,
            credentials.api_key,
            credentials.model,
            sampling=self._sampling,
            watch=self._watch,
            transport=self._transport,
        )

    async def _made(self, limits: "_MethodLimits") -> AgentEnvironment:
        """Return an episode's environment, whose instance may not exist yet.

        Raises `InfraError` if making the environment fails, or `WrongClass` if its class cannot be an environment.
        """
        make: Any = self._make
        if inspect.isclass(make) and not is_environment(make):
            return PlainEnvironment(make)
        return await limits.within(self.budgets.setup_s, _made_by(make), "making the environment")

    async def _close(self, environment: AgentEnvironment, limits: "_MethodLimits") -> None:
        try:
            await limits.within(self.budgets.setup_s, environment.close(), "closing the environment")
        except Exception as error:  # the episode is over, and its reward is known
            log.warning("an environment was not closed cleanly: %s", in_one_line(error))


class _MethodLimits:
    """Limits how long the methods of an episode's environment may take, even those that keep running after a
    cancellation.

    All of the methods run in the episode's task, so that a context entered in one method, such as a client's task
    group, can be exited in another. `given_up` is done once nobody waits for that task any longer.
    """

    def __init__(self, transcript: Transcript) -> None:
        self.transcript = transcript
        self.result: RolloutResult | None = None  # None until it is known
        self.mistake: Exception | None = None  # the exception that the episode raises instead of returning a result
        self.given_up: asyncio.Future[RolloutResult] = asyncio.get_running_loop().create_future()

    async def scored(self, limit_s: float, scores: Awaitable[T]) -> T:
        """Await the environment's scores. Any error is raised as an `InfraError`, since there is no reward then."""
        try:
            return await self.within(limit_s, contained_here(scores), "scoring the environment", FailureKind.GRADER)
        except InfraError as error:
            error.attribute_to(FailureKind.GRADER)
            raise
        except Exception as error:  # any error in the environment's own code
            raise MethodFailed(f"scoring the environment failed: {with_place(error)}") from error

    async def within(self, limit_s: float, work: Awaitable[T], what: str, kind: FailureKind | None = None) -> T:
        """Await a method of the environment. Raises `EnvironmentLost`, with this `kind`, if it takes too long."""
        error = EnvironmentLost(f"{what} took longer than {limit_s:g} s", kind)
        giving_up = asyncio.get_running_loop().call_later(limit_s + running.CANCELLED_S, self._give_up, error)
        try:
            async with asyncio.timeout(limit_s) as limit:
                return await work
        except TimeoutError as raised:
            if not limit.expired():
                raise
            raise error from raised
        finally:
            giving_up.cancel()

    def _give_up(self, error: EnvironmentLost) -> None:
        log.warning("%s, and is still running after it was cancelled; not waiting for it", error)
        if self.given_up.done():
            return
        if self.mistake is not None:
            self.given_up.set_exception(self.mistake)
        else:
            self.given_up.set_result(self.result or _aborted(self.transcript, error))


class _ToolLoop:
    """One episode of an environment with tools."""

    def __init__(
        self,
        environment: AgentEnvironment,
        model: ChatModel,
        budgets: RolloutBudgets,
        task: Task,
        limits: _MethodLimits,
    ) -> None:
        self._environment = environment
        self._model = model
        self._budgets = budgets
        self._task = task
        self._limits = limits
        self._transcript = limits.transcript
        self._tools: list[ToolSchema] = []
        self._used = 0  # tokens in the conversation, as counted by the server
        self._uncounted: list[MessageDict] = []  # messages added since that count
        self._over_at = 0.0  # the loop time at which the episode runs out of time

    async def run(self) -> RolloutScores:
        """Play the episode to its end, and return the scores. Raises `InfraError`."""
        budgets, transcript = self._budgets, self._transcript
        described = tools_of_task(self._task)
        opening = await self._within(self._environment.open(self._task), "resetting the environment")
        named = {tool.name: tool for tool in [*opening.tools, *described]}
        self._tools = list(named.values())
        self._say(opening.messages)
        self._over_at = _now() + budgets.episode_s
        transcript.failure = await self._turns()
        transcript.status = RolloutStatus.COMPLETED if transcript.failure is None else RolloutStatus.TRUNCATED
        if not transcript.turns:
            raise never_answered(budgets.episode_s)
        return await self._limits.scored(budgets.setup_s, self._environment.score(transcript))

    async def _turns(self) -> FailureKind | None:
        """Play turn after turn. Return the budget that was used up, or None if the episode ended before that."""
        transcript, budgets = self._transcript, self._budgets
        while transcript.turns < budgets.turns_max and _now() < self._over_at:
            over_at = min(_now() + budgets.turn_s, self._over_at)
            room = budgets.tokens_max - self._used - _tokens_guessed(self._uncounted)
            if room < 1 and transcript.turns:
                return FailureKind.TOKENS
            try:
                async with asyncio.timeout_at(self._over_at) as limit:
                    answer = await self._ask(max(1, room))
            except TimeoutError:
                if not limit.expired():
                    raise
                return FailureKind.TIME
            except ModelRefused as error:
                if error.is_too_long and transcript.turns:
                    return FailureKind.TOKENS
                raise
            if answer.is_cut or self._used > budgets.tokens_max:
                return FailureKind.TOKENS
            if answer.tool_calls:
                await self._use_tools(answer.tool_calls, over_at)
            if await self._is_over() or not answer.tool_calls:
                return None
        return FailureKind.TURNS if transcript.turns >= budgets.turns_max else FailureKind.TIME

    async def _ask(self, max_tokens: int) -> ChatAnswer:
        answer = await self._model.ask(
            self._transcript.messages,
            within_s=self._budgets.turn_s,
            tools=self._tools,
            max_tokens=max_tokens,
            total_tokens=self._budgets.tokens_max,
        )
        transcript = self._transcript
        self._say([answer.message])
        self._uncounted = []
        self._used = answer.prompt_tokens + answer.completion_tokens
        transcript.turns += 1
        transcript.prompt_tokens = answer.prompt_tokens
        transcript.completion_tokens += answer.completion_tokens
        return answer

    def _say(self, messages: Sequence[MessageDict]) -> None:
        self._transcript.messages += messages
        self._uncounted += messages

    async def _is_over(self) -> bool:
        return await self._within(self._environment.is_over(self._transcript), "checking whether it is over")

    async def _within(self, work: Awaitable[T], what: str) -> T:
        return await self._limits.within(self._budgets.setup_s, work, what)

    # ---- tools --------------------------------------------------------------------------------------------------

    async def _use_tools(self, calls: Sequence[ToolCall], over_at: float) -> None:
        """Carry out the tool calls in one answer, several of them concurrently, and append their results in order."""
        carried_out = calls[: self._budgets.calls_max]
        slots = asyncio.Semaphore(self._at_once)

        async def one(call: ToolCall) -> ToolOutcome:
            async with slots:
                return await self._outcome(call, over_at)

        async with first_failure() as group:
            running = [group.create_task(one(call)) for call in carried_out]
        outcomes = [task.result() for task in running]
        left = f"it was not carried out: an answer may have at most {self._budgets.calls_max} calls"
        outcomes += [ToolOutcome(text=left, failed=True)] * (len(calls) - len(carried_out))
        self._transcript.tool_calls += len(calls)
        self._transcript.tool_failures += sum(outcome.failed for outcome in outcomes)
        self._say(
            [
                {"role": "tool", "tool_call_id": call.id, "content": self._shown(outcome)}
                for call, outcome in zip(calls, outcomes, strict=True)
            ]
        )

    @property
    def _at_once(self) -> int:
        """Return how many calls may run concurrently. If the environment allows only one at a time, the time limit of a
        call does not start while the call waits."""
        return self._budgets.tools_at_once if getattr(self._environment, "tools_run_together", False) else 1

    async def _outcome(self, call: ToolCall, over_at: float) -> ToolOutcome:
        """Carry out a call. A call that cannot be cancelled gets all of `tool_s` once it has begun, even if less is
        left in the turn or the episode: cutting the call off would lose its environment, and thus the episode."""
        limit_s, left_s = self._budgets.tool_s, over_at - _now()
        if left_s <= 0:
            return ToolOutcome(text="it was not carried out: the time for this answer's tools had run out", failed=True)
        if isinstance(self._environment, PlainEnvironment) and self._environment.plain.can_cancel(call.name):
            limit_s = min(limit_s, left_s)
        left: list[str] = []
        try:
            async with asyncio.timeout(limit_s):
                return await contained(self._environment.call(call), lambda: left.append(call.name))
        except TimeoutError as error:
            if left:
                raise went_on(call.name) from error
            return ToolOutcome(text=f"it did not end within {limit_s:.3g} s, and was cancelled", failed=True)

    def _shown(self, outcome: ToolOutcome) -> str:
        """Return an outcome as the text shown to the model."""
        text, limit = without_surrogates(outcome.text), self._budgets.tool_characters_max
        if len(text) > limit:
            text = f"{text[:limit]}\n[{len(text) - limit} more characters were left out]"
        return f"<error>Tool failed: {text}</error>" if outcome.failed else text


def tools_of_task(task: Task) -> list[ToolSchema]:
    """Return the tools described in a task's metadata. Raises `WrongTask`."""
    try:
        return msgspec.convert(task.metadata.get("tools") or [], list[ToolSchema])
    except msgspec.ValidationError as error:
        raise WrongTask(
            f"metadata.tools of task {task.task_id!r} is not a list of tools with name, description and parameters: "
            f"{error}"
        ) from error


async def _made_by(make: Callable[[], Any]) -> AgentEnvironment:
    """Return the environment that a function makes, directly or as a coroutine.

    A plain class's methods run in the thread in which the function ran. An instance that is made too late is closed.
    Raises `InfraError` if making the environment fails, or `WrongClass` if its class cannot be an environment.
    """
    async with AsyncExitStack() as stack:
        environment = PlainEnvironment(lambda: make())
        stack.push_async_callback(environment.close)
        if is_environment(await environment.plain.instance()):
            found: Any = await environment.plain.give_away()
            return found  # type: ignore[no-any-return]
        await environment.plain.make()
        stack.pop_all()
        return environment


def _now() -> float:
    return asyncio.get_running_loop().time()


def _tokens_guessed(messages: Sequence[MessageDict]) -> int:
    """Estimate the tokens of messages that the server has not counted yet. A hive counts them exactly."""
    return sum(_characters(message.get("content") or "") for message in messages) // CHARACTERS_FOR_A_TOKEN


def _characters(content: object) -> int:
    """Return the length of a message's text. Only the server knows how many tokens its images take."""
    if isinstance(content, list):
        return sum(_characters(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return len(str(content))
