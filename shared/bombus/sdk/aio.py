"""`AsyncSwarmClient`: the same client for asyncio. `SwarmClient` documents the methods, which are the same."""

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self, TypeVar

import httpx

from bombus import telemetry
from bombus.config.algorithms import Estimator
from bombus.datums.episodes import EpisodeDatum
from bombus.sdk import running, transport
from bombus.sdk.core import ClientOperation, EpisodeReport, NoReply, ServerReply, ServerRequest, Sleep, check_task
from bombus.sdk.errors import SwarmError
from bombus.sdk.groups import ClaimT, GivenT, GroupClaim, GroupRun, JointGroup, OutcomeT, SingleGroup
from bombus.sdk.heartbeat import Heartbeat
from bombus.sdk.job import JobLike, job_document
from bombus.sdk.joint import AsyncJointAgent, HiveCore, JointReport, JointResult
from bombus.sdk.progress import ProgressBar
from bombus.sdk.types import (
    Credentials,
    EpisodeKind,
    EpisodeUsage,
    JointEpisode,
    PoolInformation,
    Task,
    ThrottlePolicy,
    WorkflowOutput,
)

log = logging.getLogger("bombus")

T = TypeVar("T")


class AsyncSwarmClient:
    """`SwarmClient` with `await`. Tasks of one event loop may share it."""

    def __init__(  # noqa: PLR0913 - the options of a client
        self,
        server_url: str,
        verbose: bool = True,
        *,
        engine: str | None = None,
        api_key: str | None = None,
        retry_s: float = 120.0,
        transport_: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        telemetry.configure("client")
        self.server_url, key = transport.address(server_url, api_key)
        self.verbose = verbose
        self._core = HiveCore(self.server_url, time.monotonic, random.random, retry_s=retry_s)
        options = transport.client_options(self.server_url, engine, key)
        self._http = httpx.AsyncClient(transport=transport_, **options)
        self._heartbeat = Heartbeat(self._core, options) if transport_ is None else None
        if self._heartbeat is not None:
            self._core.on_claimed = self._heartbeat.begin
        self._sleep = sleep
        self.lost_episodes: Counter[str] = Counter()  # of groups, by the kind of the error

    @property
    def client_uuid(self) -> str:
        return self._core.client_uuid

    @property
    def missed_at(self) -> float:
        return self._core.missed_at

    async def close(self) -> None:
        """Abort the episodes that are still open, and close the connections."""
        try:
            if self._heartbeat is not None:
                await asyncio.to_thread(self._heartbeat.end)
        finally:
            await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(self, operation: ClientOperation[T]) -> T:
        try:
            step = operation.send(None)
            while True:
                try:
                    result = await self._carry_out(step)
                except BaseException as interruption:  # whatever it is, the operation raises it again
                    step = operation.throw(interruption)
                else:
                    step = operation.send(result)
        except StopIteration as done:
            value: T = done.value
            return value

    async def _carry_out(self, step: ServerRequest | Sleep) -> ServerReply | NoReply | None:
        if isinstance(step, ServerRequest):
            return await self._send(step)
        await self._sleep(step.seconds)
        return None

    async def _send(self, request: ServerRequest) -> ServerReply | NoReply:
        with telemetry.span("sdk.request", path=request.path):
            try:
                response = await self._http.request(**transport.request_options(request))
            except httpx.RequestError as error:
                return transport.no_reply(self._http.base_url, error)
        return transport.reply_of(response)

    # ---- episodes ---------------------------------------------------------------------------------------------

    async def begin_episode(  # noqa: PLR0913 - AgentJet's arguments, and ours as keywords
        self,
        discard_episode_timeout: float | None = None,
        episode_type: EpisodeKind = "train",
        throttle_policy: ThrottlePolicy | None = None,
        *,
        max_wait_s: float | None = None,
        max_episode_time: float | None = None,
        sampler: str = "",
    ) -> tuple[str, Credentials]:
        return await self._run(
            self._core.begin_episode(
                discard_episode_timeout, episode_type, throttle_policy, max_wait_s, max_episode_time, sampler
            )
        )

    async def begin_episodes(  # noqa: PLR0913 - AgentJet's arguments, and ours as keywords
        self,
        n: int,
        discard_episode_timeout: float | None = None,
        episode_type: EpisodeKind = "train",
        *,
        task_id: str = "",
        max_wait_s: float | None = None,
        max_episode_time: float | None = None,
        sampler: str = "",
    ) -> list[Credentials]:
        return await self._run(
            self._core.begin_episodes(
                n, discard_episode_timeout, episode_type, task_id, max_wait_s, max_episode_time, sampler
            )
        )

    async def end_episode(self, task: Task, episode_uuid: str, workflow_output: WorkflowOutput) -> None:
        await self._run(self._core.end_episodes([(task, episode_uuid, workflow_output)]))

    async def end_episodes(self, ends: Sequence[EpisodeReport]) -> None:
        await self._run(self._core.end_episodes(ends))

    async def abort_episode(self, episode_uuid: str, *, infra: bool = False, detail: str = "") -> None:
        await self._run(self._core.abort_episodes([episode_uuid], infra, detail))

    async def abort_episodes(self, episode_uuids: Sequence[str], *, infra: bool = False, detail: str = "") -> None:
        await self._run(self._core.abort_episodes(episode_uuids, infra, detail))

    async def can_continue_episode(self, episode_uuid: str) -> bool:
        return await self._run(self._core.can_continue_episode(episode_uuid))

    async def take_datums(
        self, episode_uuids: Sequence[str] | None = None, *, estimator: Estimator | str = Estimator.DR_GRPO
    ) -> list[EpisodeDatum]:
        """See `SwarmClient.take_datums`."""
        return await self._run(self._core.take_datums(episode_uuids, estimator))

    async def touch_episodes(self, episode_uuids: Sequence[str]) -> list[str]:
        return await self._run(self._core.touch_episodes(episode_uuids))

    async def watch_episodes(self, episode_uuids: Sequence[str]) -> dict[str, EpisodeUsage]:
        return await self._run(self._core.watch_episodes(episode_uuids))

    async def episode_usage(self, episode_uuid: str) -> EpisodeUsage | None:
        return await self._run(self._core.episode_usage(episode_uuid))

    @asynccontextmanager
    async def keep_alive(self, *episode_uuids: str, every_s: float = 30.0) -> AsyncIterator[None]:
        async with self._beating(lambda: self.touch_episodes(episode_uuids), every_s):
            yield

    @asynccontextmanager
    async def _beating(self, touch: Callable[[], Awaitable[object]], every_s: float) -> AsyncIterator[None]:
        async def beat() -> None:
            while True:
                await asyncio.sleep(every_s)
                try:
                    await touch()
                except SwarmError as error:
                    log.warning("could not keep the episodes alive: %s", error)

        heartbeat = asyncio.create_task(beat())
        try:
            yield
        finally:
            heartbeat.cancel()

    # ---- joint episodes, on several engines -------------------------------------------------------------------

    async def begin_joint_episode(  # noqa: PLR0913 - those of `begin_episode`
        self,
        engines: Mapping[str, str],
        discard_episode_timeout: float | None = None,
        episode_type: EpisodeKind = "train",
        *,
        task_id: str = "",
        max_wait_s: float | None = None,
        max_episode_time: float | None = None,
    ) -> JointEpisode:
        (joint,) = await self.begin_joint_episodes(
            1,
            engines,
            discard_episode_timeout,
            episode_type,
            task_id=task_id,
            max_wait_s=max_wait_s,
            max_episode_time=max_episode_time,
        )
        return joint

    async def begin_joint_episodes(  # noqa: PLR0913 - those of `begin_episodes`
        self,
        n: int,
        engines: Mapping[str, str],
        discard_episode_timeout: float | None = None,
        episode_type: EpisodeKind = "train",
        *,
        task_id: str = "",
        max_wait_s: float | None = None,
        max_episode_time: float | None = None,
    ) -> list[JointEpisode]:
        return await self._run(
            self._core.begin_joint_episodes(
                n, engines, discard_episode_timeout, episode_type, task_id, max_wait_s, max_episode_time
            )
        )

    async def end_joint_episode(self, task: Task, joint: JointEpisode, results: JointResult) -> None:
        await self._run(self._core.end_joint_episodes([(task, joint, results)]))

    async def end_joint_episodes(self, ends: Sequence[JointReport]) -> None:
        await self._run(self._core.end_joint_episodes(ends))

    async def abort_joint_episode(self, joint: JointEpisode, *, infra: bool = False, detail: str = "") -> None:
        await self._run(self._core.abort_joint_episodes([joint], infra, detail))

    async def touch_joint_episodes(self, joints: Sequence[JointEpisode]) -> list[JointEpisode]:
        return await self._run(self._core.touch_joint_episodes(joints))

    @asynccontextmanager
    async def keep_joint_alive(self, *joints: JointEpisode, every_s: float = 30.0) -> AsyncIterator[None]:
        async with self._beating(lambda: self.touch_joint_episodes(joints), every_s):
            yield

    # ---- the engine -------------------------------------------------------------------------------------------

    async def get_engine_status(self) -> tuple[str, dict[str, Any]]:
        return await self._run(self._core.get_engine_status())

    async def get_global_step(self) -> int:
        return int((await self._run(self._core.get_json("/get_engine_status")))["global_step"])

    async def get_rollout_stat(self) -> PoolInformation:
        return await self._run(self._core.get_rollout_stat())

    async def sync_train_config(self, agent_jet_job: JobLike) -> None:
        await self._run(self._core.sync_train_config(job_document(agent_jet_job)))

    async def start_engine(self) -> None:
        await self._run(self._core.start_engine())

    async def stop_engine(self) -> None:
        await self._run(self._core.stop_engine())

    async def resume_engine(self) -> None:
        await self._run(self._core.resume_engine())

    async def auto_sync_train_config_and_start_engine(
        self, agent_jet_job: JobLike, force_restart: bool = False
    ) -> None:
        await self._run(self._core.auto_start(job_document(agent_jet_job), force_restart))

    async def wait_for_status(self, wanted: str, timeout_s: float = 3600.0) -> None:
        await self._run(self._core.wait_for_status(wanted, timeout_s))

    async def agree_sync_weight(self) -> None:
        await self._run(self._core.agree_sync_weight())

    async def replay_latest_llm_call(self, episode_uuid: str = "") -> dict[str, Any]:
        return await self._run(self._core.post_json("/replay_latest_llm_call", {"episode_uuid": episode_uuid}))

    # ---- running many ------------------------------------------------------------------------------------------

    async def run_episodes_until_all_complete(
        self,
        tasks: Sequence[Task],
        func: Callable[[Task], Awaitable[T]],
        max_workers: int | None = None,
        auto_retry: bool = True,
    ) -> list[T | None]:
        results: list[T | None] = [None] * len(tasks)
        failures: dict[int, Exception] = {}
        slots = asyncio.Semaphore(running.workers_for(len(tasks), max_workers))

        async def attempt(index: int) -> None:
            delays = running.retry_delays(auto_retry)
            async with slots:
                while True:
                    try:
                        results[index] = await running.contained(func(tasks[index]))
                        break
                    except Exception as error:  # the caller's code: whatever it raises must not stop the others
                        delay = None if running.is_mistake(error) else next(delays, None)
                        running.reports.report(error, f"task {tasks[index].task_id} failed{running.retry_note(delay)}")
                        if delay is None:
                            failures[index] = error
                            break
                    await self._sleep(delay)
            progress.step(failed=index in failures)

        with ProgressBar(len(tasks), "episodes", shown=None if self.verbose else False) as progress:
            async with asyncio.TaskGroup() as group:
                for index in range(len(tasks)):
                    group.create_task(attempt(index))
        return running.all_or_raise(results, failures)

    async def run_group(  # noqa: PLR0913 - the public signature
        self,
        task: Task,
        func: running.AsyncAgent,
        n: int,
        *,
        discard_episode_timeout: float | None = None,
        episode_type: EpisodeKind = "train",
        sampler: str = "",
        replace_infra: int = 0,
    ) -> list[WorkflowOutput | None]:
        check_task(task)
        claimed = await self.begin_episodes(
            n, discard_episode_timeout, episode_type, task_id=task.task_id, sampler=sampler
        )
        claim = GroupClaim(discard_episode_timeout=discard_episode_timeout, episode_type=episode_type, sampler=sampler)
        group = SingleGroup(self._core, task, claim, claimed, replace_infra)
        return await self._played(group, lambda episode: func(task, episode))

    async def _played(
        self, group: GroupRun[ClaimT, GivenT, OutcomeT], play: Callable[[ClaimT], Awaitable[GivenT]]
    ) -> list[OutcomeT | None]:
        """Play the episodes of a group to its end. Where that fails, none of them stays open."""

        async def attempt(index: int) -> None:
            try:
                group.succeeded(index, await running.contained(play(group.begin(index))))
            except Exception as error:  # the caller's code: the rest of the group goes on
                group.failed(index, error)

        async def fill(index: int) -> None:
            if index not in group.failures:
                await attempt(index)
            while index in group.failures and await self._run(group.replace(index)):
                await attempt(index)

        left: Sequence[int] = range(len(group))
        try:
            async with self._beating(lambda: self._run(group.keep()), group.keep_every_s):
                while left:
                    async with asyncio.TaskGroup() as tasks:
                        for index in left:
                            tasks.create_task(fill(index))
                    left = await self._run(group.end())
        except BaseException:
            await self._run(group.give_up())
            raise
        group.tell()
        self.lost_episodes += group.lost
        return group.outcome()

    async def run_joint_group(  # noqa: PLR0913 - the public signature
        self,
        task: Task,
        func: AsyncJointAgent,
        n: int,
        engines: Mapping[str, str],
        *,
        discard_episode_timeout: float | None = None,
        episode_type: EpisodeKind = "train",
        replace_infra: int = 0,
    ) -> list[JointResult | None]:
        check_task(task)
        claimed = await self.begin_joint_episodes(
            n, engines, discard_episode_timeout, episode_type, task_id=task.task_id
        )
        claim = GroupClaim(discard_episode_timeout=discard_episode_timeout, episode_type=episode_type, engines=engines)
        group = JointGroup(self._core, task, claim, claimed, replace_infra)
        return await self._played(group, lambda joint: func(task, joint))
