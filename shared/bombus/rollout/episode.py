"""Plays one episode: copies the workspace, claims an episode, runs the agent, judges its work, reports the reward."""

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path

from bombus.errors import BombusError
from bombus.hive.failures import FailureKind
from bombus.rollout.commands import CommandTemplate
from bombus.rollout.environment import (
    ModelAccess,
    agent_variables,
    inherited,
    task_variables,
    with_decimal_points,
)
from bombus.rollout.harbor.sandbox import agent_prefix, judge_words, verifier_folder
from bombus.rollout.harbor.verdict import verdict_of
from bombus.rollout.plan import RolloutPlan
from bombus.rollout.process import CannotStart, EndedProgram, OutputFile, Program, StopReason, run_program
from bombus.rollout.records import LossReason, LostEpisode, PlayedEpisode, RecordFolder
from bombus.rollout.reward import Judgement, has_raised, judgement_of
from bombus.rollout.tasks import AgentTask
from bombus.rollout.watch import EpisodeWatch, WatchedEpisode
from bombus.rollout.workspace import EpisodeFolder, check_room, episode_folder
from bombus.sdk.aio import AsyncSwarmClient
from bombus.sdk.errors import EpisodeGone, InfraError, failure_of
from bombus.sdk.types import Credentials, EpisodeUsage, Task, WorkflowOutput

LOOKS_FOR_CALLS = 4  # attempts, two seconds each: after a failover, the new coordinator counts calls late
SILENT_AGENTS = 3
TRACEBACK_BYTES = 64 << 10  # how much is read from the end of a reward command's errors
SHOWN_CHARACTERS = 2000  # length of an agent's output in its episode's metadata, and in the message if it made no call


class Pointless(BombusError):
    """Raised if further episodes would fail in the same way. The message says why."""


class TakenBack(BombusError):
    """Raised if the hive has ended the episode, for example because it was open for longer than a batch waits."""


@dataclass(frozen=True)
class _OpenEpisode:
    """An episode that is being played."""

    task: AgentTask
    folder: EpisodeFolder
    credentials: Credentials
    watched: WatchedEpisode
    printed: Path  # the file for the agent's output

    @property
    def uuid(self) -> str:
        return self.credentials.episode_uuid

    @property
    def name(self) -> str:
        return self.credentials.episode


class EpisodePlayer:
    """Plays episodes of a plan. `unfinished` contains the UUIDs of claimed episodes that have been neither ended nor
    aborted.

    `reporting` contains the asyncio tasks that have begun to report a reward. They must be allowed to finish, since the
    hive may already have the reward.
    """

    def __init__(
        self, plan: RolloutPlan, client: AsyncSwarmClient, watch: EpisodeWatch, kept: RecordFolder | None = None
    ) -> None:
        self.unfinished: set[str] = set()
        self.reporting: set[asyncio.Task[object] | None] = set()
        self._plan = plan
        self._client = client
        self._watch = watch
        self._kept = kept
        self._silent = 0  # number of agents that made no model call

    async def play(self, task: AgentTask, path: Path) -> PlayedEpisode | LostEpisode:
        """Play an episode in a new folder at `path`. Raises `Pointless`, or an error of the client."""
        try:
            files = task.package.files if task.package is not None else self._plan.workspace
            async with episode_folder(path, files) as folder:
                credentials = await self._claim(task)
                printed = self._kept.output(credentials.episode) if self._kept else folder.outputs / "agent.txt"
                with self._watch.watching(credentials.episode_uuid) as watched:
                    return await self._claimed(_OpenEpisode(task, folder, credentials, watched, printed))
        except (InfraError, OSError) as error:
            return LostEpisode(loss=LossReason.INFRA, why=str(error), failure=_failure_of(error))
        finally:
            self.reporting.discard(asyncio.current_task())

    async def _claim(self, task: AgentTask) -> Credentials:
        (claimed,) = await self._client.begin_episodes(
            1,
            episode_type="eval" if self._plan.options.eval else "train",
            task_id=task.task_id,
            max_episode_time=self._plan.episode_s(task),
        )
        self.unfinished.add(claimed.episode_uuid)
        return claimed

    async def _claimed(self, one: _OpenEpisode) -> PlayedEpisode | LostEpisode:
        try:
            with OutputFile(one.printed) as output:
                return await self._played(one, output)
        except (InfraError, OSError) as error:
            return await self._lost(one, LossReason.INFRA, str(error), _failure_of(error))
        except (EpisodeGone, TakenBack):
            self.unfinished.discard(one.uuid)
            why = "it was open for longer than the hive allows"
            return self._lost_episode(one, LossReason.TAKEN_BACK, why, FailureKind.HIVE)

    async def _played(self, one: _OpenEpisode, output: OutputFile) -> PlayedEpisode | LostEpisode:
        began = time.monotonic()
        ended = await self._run_agent(one, output)
        used = await self._used(one)
        if _has_failed(ended):
            await self._check_outage(began, ended)
        if not used.calls:
            self._check_silence(ended, output)
        if ended.stopped is not None and self._plan.options.on_limit == "abort":
            return await self._lost(one, LossReason.LIMIT, ended.stopped, ended.stopped.failure)
        for folder in {one.folder.outputs, one.printed.parent}:
            check_room(folder)
        judged = await self._judge(one, ended)
        check_room(one.folder.outputs)
        played = PlayedEpisode(
            episode=one.name,
            reward=judged.reward,
            seconds=ended.seconds,
            exit_code=ended.exit_code,
            used=used,
            stopped=ended.stopped,
            output=self._kept_output(one),
            complaint=judged.complaint,
            parts=judged.parts,
        )
        await self._end(one, played, output)
        return played

    async def _check_outage(self, began: float, ended: EndedProgram) -> None:
        """Raise `InfraError` if the agent may have failed because its calls were not answered."""
        if self._client.missed_at > began:
            raise InfraError(
                f"the hive was unreachable while the agent ran, and the agent failed (exit code {ended.exit_code})",
                FailureKind.HIVE,
            )
        _, status = await self._client.get_engine_status()
        if status.get("serving_replicas") == 0:
            why = f"no replica serves the model, and the agent failed (exit code {ended.exit_code})"
            raise InfraError(why, FailureKind.MODEL)

    def _kept_output(self, one: _OpenEpisode) -> str:
        return str(one.printed) if self._kept is not None else ""

    def _prompt(self, task: AgentTask) -> str:
        """Return the prompt as it is put into the agent's command."""
        return self._plan.preset.prompt(task.prompt) if self._plan.preset is not None else task.prompt

    def _words(self, command: CommandTemplate, one: _OpenEpisode, prompt: str) -> list[str]:
        values = {**one.task.words(), **one.folder.words(), "prompt": prompt}
        if one.task.package is not None:
            return [*agent_prefix(one.task.package, one.folder, one.printed.parent), *command.filled(values)]
        sandbox = self._plan.sandbox.filled(values) if self._plan.sandbox is not None else []
        return [*sandbox, *command.filled(values)]

    # ---- the agent ----------------------------------------------------------------------------------------------

    async def _run_agent(self, one: _OpenEpisode, output: OutputFile) -> EndedProgram:
        access = ModelAccess.of(one.credentials)
        program = Program(
            words=await asyncio.to_thread(self._words, self._plan.agent, one, self._prompt(one.task)),
            folder=one.folder.workspace,
            variables={
                **agent_variables(access, self._plan.preset, self._plan.dialects, one.folder, one.task),
                **task_variables(one.task, one.folder.workspace),
            },
            output=output,
        )
        try:
            ended = await run_program(program, self._plan.timeout_s(one.task), one.watched.stop)
        except CannotStart as error:
            raise Pointless(f"--agent: {error}") from error
        if ended.stopped == StopReason.OVER:
            raise TakenBack
        return ended

    async def _used(self, one: _OpenEpisode) -> EpisodeUsage:
        """Return the episode's total usage, asking several times if no calls are counted yet. Raises `TakenBack` if the
        episode is no longer open."""
        used = EpisodeUsage()
        for _ in range(LOOKS_FOR_CALLS):
            found = await self._client.episode_usage(one.uuid)
            if found is None:
                raise TakenBack
            if found.calls:
                self._watch.has_seen_calls = True
                return found
            used = found
        return used

    def _check_silence(self, ended: EndedProgram, output: OutputFile) -> None:
        """Raise `InfraError` because this agent had no answered call, or `Pointless` if no agent has had one.

        Other agents may still be running and just be slower to make calls. `Pointless` is then raised only after
        `SILENT_AGENTS` silent agents.
        """
        self._silent += 1
        if self._watch.has_seen_calls or (self._watch.count > 1 and self._silent < SILENT_AGENTS):
            raise InfraError(f"the agent made no model call (exit code {ended.exit_code})", FailureKind.CLIENT)
        raise Pointless(_no_call(ended, output))

    # ---- its end ------------------------------------------------------------------------------------------------

    async def _judge(self, one: _OpenEpisode, ended: EndedProgram) -> Judgement:
        """Run the reward command, or the task's tests. Raises `InfraError` if that produces no reward."""
        try:
            return await self._judgement(one, ended)
        except InfraError as error:
            error.attribute_to(FailureKind.GRADER)
            raise

    async def _judgement(self, one: _OpenEpisode, ended: EndedProgram) -> Judgement:
        def beside(name: str) -> OutputFile:
            return OutputFile(one.printed.with_name(f"{one.printed.stem}-{name}.txt"))

        with beside("reward") as printed, beside("reward-errors") as errors:
            program = Program(
                words=await self._judge_words(one),
                folder=one.folder.workspace,
                variables=_judge_variables(one, ended),
                output=printed,
                errors=errors,
            )
            judged = await self._judged(program, self._plan.reward_timeout_s(one.task))
            if self._plan.reward is None:
                return verdict_of(judged.exit_code, verifier_folder(one.folder), errors.tail())
            raised = has_raised(errors.tail(TRACEBACK_BYTES), program.words, one.folder.workspace)
            return judgement_of(judged.exit_code, printed.tail(), errors.tail(), raised)

    async def _judge_words(self, one: _OpenEpisode) -> list[str]:
        if one.task.package is not None:
            return await asyncio.to_thread(judge_words, one.task.package, one.folder)
        assert self._plan.reward is not None
        return self._words(self._plan.reward, one, one.task.prompt)

    async def _judged(self, program: Program, limit_s: float) -> EndedProgram:
        """Run the reward command to its end. Raises `InfraError` if the command cannot be started or is stopped."""
        try:
            judged = await run_program(program, limit_s)
        except CannotStart as error:
            raise InfraError(f"--reward: {error}") from error
        if judged.stopped == StopReason.TIMEOUT:
            raise InfraError(f"the reward command took longer than {limit_s:g} s")
        if judged.stopped is not None:
            raise InfraError(f"the reward command was stopped ({judged.stopped})")
        return judged

    async def _end(self, one: _OpenEpisode, played: PlayedEpisode, printed: OutputFile) -> None:
        metadata = {
            "agent": self._plan.options.agent,
            "exit_code": played.exit_code,
            "seconds": round(played.seconds, 3),
            "calls": played.used.calls,
            "truncated": played.stopped is not None,
            "stopped": played.stopped or "",
            "output": printed.tail()[-SHOWN_CHARACTERS:],
        }
        metrics: dict[str, float | list[float]] = {
            "agent_s": played.seconds,
            "agent_failed": float(played.exit_code != 0),
            "truncated": float(played.stopped is not None),
            **{f"reward/{name}": value for name, value in played.parts.items()},
        }
        failure = played.stopped.failure if played.stopped is not None else None
        output = WorkflowOutput(reward=played.reward, metadata=metadata, log_metrics=metrics, failure=failure)
        self.reporting.add(asyncio.current_task())
        await self._client.end_episode(Task(task_id=one.task.task_id), one.uuid, output)
        self.unfinished.discard(one.uuid)

    async def _lost(self, one: _OpenEpisode, loss: LossReason, why: str, failure: FailureKind) -> LostEpisode:
        await self._client.abort_episode(one.uuid, failure=failure, detail=why)
        self.unfinished.discard(one.uuid)
        return self._lost_episode(one, loss, why, failure)

    def _lost_episode(self, one: _OpenEpisode, loss: LossReason, why: str, failure: FailureKind) -> LostEpisode:
        return LostEpisode(loss=loss, why=why, failure=failure, episode=one.name, output=self._kept_output(one))


def _judge_variables(one: _OpenEpisode, ended: EndedProgram) -> dict[str, str]:
    return {
        **with_decimal_points(inherited(os.environ, one.task)),
        **task_variables(one.task, one.folder.workspace),
        "BOMBUS_ENDED": ended.stopped or "exited",
        "BOMBUS_EXIT_CODE": str(ended.exit_code),
        "BOMBUS_OUTPUT": str(one.printed.absolute()),
        "TMPDIR": str(one.folder.temporary),
    }


def _failure_of(error: InfraError | OSError) -> FailureKind:
    """Return the kind of an episode's failure. An `OSError` comes from the episode's folders, for example because the
    disk is full."""
    return FailureKind.SANDBOX if isinstance(error, OSError) else failure_of(error)


def _has_failed(ended: EndedProgram) -> bool:
    """Return whether an agent ended with an error, by itself or at its time limit. Other limits are not failures."""
    return ended.exit_code != 0 and ended.stopped in (None, StopReason.TIMEOUT)


def _no_call(ended: EndedProgram, output: OutputFile) -> str:
    how = f"was stopped ({ended.stopped})" if ended.stopped is not None else f"ended with exit code {ended.exit_code}"
    printed = output.tail().strip()[-SHOWN_CHARACTERS:]
    said = f"Its output ends with:\n{printed}" if printed else "It printed nothing."
    return (
        f"the agent {how} after {ended.seconds:.0f} s, but none of its model calls was answered. Either it does not "
        "use $BOMBUS_BASE_URL or one of the variables that docs/rollout.md lists, or the hive refused its calls, for "
        f"example because of a prompt over the job's rollout.max_prompt_length. {said}"
    )
