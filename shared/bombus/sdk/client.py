"""`SwarmClient`: the client of a hive for threaded code."""

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx

from bombus import telemetry
from bombus.config.algorithms import Estimator
from bombus.datums.episodes import EpisodeDatum
from bombus.sdk import running, threads, transport
from bombus.sdk.core import ClientOperation, EpisodeReport, NoReply, ServerReply, ServerRequest, Sleep, check_task
from bombus.sdk.errors import SwarmError
from bombus.sdk.groups import ClaimT, GivenT, GroupClaim, GroupRun, JointGroup, OutcomeT, SingleGroup
from bombus.sdk.heartbeat import Heartbeat
from bombus.sdk.job import JobLike, job_document
from bombus.sdk.joint import HiveCore, JointAgent, JointReport, JointResult
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

KEPT_ALIVE_S = 5.0  # for a sign of life that is under way when it is not needed any more

T = TypeVar("T")


class SwarmClient:
    """A client of one engine. Threads may share it.

    `retry_s` is how long a request is retried while the server is away or busy. `engine` is for hives that train
    several models. `api_key` is for hives that require one: their client key, or their admin key to start and stop
    engines too. It may be part of the address (`http://host:10086/k/<key>`), or come from `$BOMBUS_ADMIN_KEY` or
    `$BOMBUS_CLIENT_KEY`.
    `transport_` and `sleep` are for tests. The errors that methods raise are in `bombus.sdk.errors`.
    """

    def __init__(  # noqa: PLR0913 - the options of a client
        self,
        server_url: str,
        verbose: bool = True,
        *,
        engine: str | None = None,
        api_key: str | None = None,
        retry_s: float = 120.0,
        transport_: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = threads.sleep,
    ) -> None:
        telemetry.configure("client")
        self.server_url, key = transport.address(server_url, api_key)
        self.verbose = verbose
        self._core = HiveCore(self.server_url, time.monotonic, random.random, retry_s=retry_s)
        options = transport.client_options(self.server_url, engine, key)
        self._http = httpx.Client(transport=transport_, **options)
        self._connections = transport.OpenConnections()
        self._heartbeat = Heartbeat(self._core, options) if transport_ is None else None
        if self._heartbeat is not None:
            self._core.on_claimed = self._heartbeat.begin
        self._sleep = sleep
        self._lost_lock = threading.Lock()
        self.lost_episodes: Counter[str] = Counter()  # of groups, by the kind of the error

    @property
    def client_uuid(self) -> str:
        return self._core.client_uuid

    @property
    def missed_at(self) -> float:
        """When the hive last gave no reply, 502 to 504, or a 500 that is not its own, on the clock of `time.monotonic`;
        minus infinity: never."""
        return self._core.missed_at

    def close(self) -> None:
        """Abort the episodes that are still open, and close the connections."""
        try:
            if self._heartbeat is not None:
                self._heartbeat.end()
        finally:
            self._http.close()

    def __enter__(self) -> "SwarmClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, operation: ClientOperation[T]) -> T:
        threads.check()
        is_interrupted = False
        try:
            step = operation.send(None)
            while True:
                try:
                    result = self._carry_out(step)
                    if not is_interrupted:
                        threads.check()
                except BaseException as interruption:  # whatever it is, the operation raises it again
                    is_interrupted = True
                    step = operation.throw(interruption)
                else:
                    step = operation.send(result)
        except StopIteration as done:
            value: T = done.value
            return value

    def _carry_out(self, step: ServerRequest | Sleep) -> ServerReply | NoReply | None:
        if isinstance(step, ServerRequest):
            return self._send(step)
        self._sleep(step.seconds)
        return None

    def _send(self, request: ServerRequest) -> ServerReply | NoReply:
        with telemetry.span("sdk.request", path=request.path):
            try:
                extensions = {"trace": self._connections.note}
                response = self._http.request(**transport.request_options(request), extensions=extensions)
            except httpx.RequestError as error:
                return transport.no_reply(self._http.base_url, error)
        return transport.reply_of(response)

    # ---- episodes ---------------------------------------------------------------------------------------------

    def begin_episode(  # noqa: PLR0913 - AgentJet's arguments, and ours as keywords
        self,
        discard_episode_timeout: float | None = None,
        episode_type: EpisodeKind = "train",
        throttle_policy: ThrottlePolicy | None = None,
        *,
        max_wait_s: float | None = None,
        max_episode_time: float | None = None,
        sampler: str = "",
    ) -> tuple[str, Credentials]:
        """Claim an episode, waiting until there is one. Returns its id and the credentials that an agent needs.

        The server aborts it after `discard_episode_timeout` seconds without a call or a touch, by default 240 or two
        steps of the engine, whichever is longer; and once this process was not heard from for the job's
        `collection.client_silence_s`, however long the former is. After `max_episode_time` seconds (default: twice
        `discard_episode_timeout`) `end_episode` aborts it instead of ending it. Raises `EngineOffline`, and `NoEpisode`
        after `max_wait_s`.

        Where you train yourself (docs/training.md), `sampler` is the path of the saved model that the episode plays
        with, as `save_weights_for_sampler` returned it, or `base`; `take_datums` returns what it has to teach.
        """
        episode, credentials = self._run(
            self._core.begin_episode(
                discard_episode_timeout, episode_type, throttle_policy, max_wait_s, max_episode_time, sampler
            )
        )
        threads.note_claimed([episode])
        return episode, credentials

    def begin_episodes(  # noqa: PLR0913 - AgentJet's arguments, and ours as keywords
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
        """Claim `n` episodes in one request, all or none. See `begin_episode`."""
        claimed = self._run(
            self._core.begin_episodes(
                n, discard_episode_timeout, episode_type, task_id, max_wait_s, max_episode_time, sampler
            )
        )
        threads.note_claimed([one.episode_uuid for one in claimed])
        return claimed

    def end_episode(self, task: Task, episode_uuid: str, workflow_output: WorkflowOutput) -> None:
        """Report how an episode went. Repeating a report is harmless; a different one raises `OtherOutcome`."""
        self._run(self._core.end_episodes([(task, episode_uuid, workflow_output)]))

    def end_episodes(self, ends: Sequence[EpisodeReport]) -> None:
        """Report (task, episode id, output) of several episodes in one request, all or none."""
        self._run(self._core.end_episodes(ends))

    def abort_episode(self, episode_uuid: str, *, infra: bool = False, detail: str = "") -> None:
        """Abort an episode. `infra` says that the model is not to blame."""
        self._run(self._core.abort_episodes([episode_uuid], infra, detail))

    def abort_episodes(self, episode_uuids: Sequence[str], *, infra: bool = False, detail: str = "") -> None:
        self._run(self._core.abort_episodes(episode_uuids, infra, detail))

    def can_continue_episode(self, episode_uuid: str) -> bool:
        """Return whether this client still holds the episode."""
        return self._run(self._core.can_continue_episode(episode_uuid))

    def take_datums(
        self, episode_uuids: Sequence[str] | None = None, *, estimator: Estimator | str = Estimator.DR_GRPO
    ) -> list[EpisodeDatum]:
        """Return the tokens of ended episodes of a run of training operations as data for a loss, and let them go.

        By default those are all that this client has begun with a `sampler`, has ended, and has not taken before. Each
        is compared with the others of its task and sampler that are taken with it, by default as its reward less their
        mean. Of calls at the same time, each episode is taken by one.
        """
        return self._run(self._core.take_datums(episode_uuids, estimator))

    def touch_episodes(self, episode_uuids: Sequence[str]) -> list[str]:
        """Keep these episodes from going idle. Returns those that are over."""
        return self._run(self._core.touch_episodes(episode_uuids))

    def watch_episodes(self, episode_uuids: Sequence[str]) -> dict[str, EpisodeUsage]:
        """Keep these episodes from going idle. Returns what those that are still open have used so far."""
        return self._run(self._core.watch_episodes(episode_uuids))

    def episode_usage(self, episode_uuid: str) -> EpisodeUsage | None:
        """Return what an episode has used once its agent has made its last call; None when the episode is over."""
        return self._run(self._core.episode_usage(episode_uuid))

    @contextmanager
    def keep_alive(self, *episode_uuids: str, every_s: float = 30.0) -> Iterator[None]:
        """Keep episodes from going idle while the block runs: for tools that take long."""
        with self._beating(lambda: self.touch_episodes(episode_uuids), every_s):
            yield

    @contextmanager
    def _beating(self, touch: Callable[[], object], every_s: float) -> Iterator[None]:
        over = threading.Event()

        def beat() -> None:
            while not over.wait(every_s):
                try:
                    touch()
                except SwarmError as error:
                    log.warning("could not keep the episodes alive: %s", error)

        thread = threading.Thread(target=beat, name="bombus-keep-alive", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(KEPT_ALIVE_S)

    # ---- joint episodes, on several engines -------------------------------------------------------------------

    def begin_joint_episode(  # noqa: PLR0913 - those of `begin_episode`
        self,
        engines: Mapping[str, str],
        discard_episode_timeout: float | None = None,
        episode_type: EpisodeKind = "train",
        *,
        task_id: str = "",
        max_wait_s: float | None = None,
        max_episode_time: float | None = None,
    ) -> JointEpisode:
        """Claim one episode on each of several engines at once, waiting until all of them have one.

        `engines` names the engine of each role, such as `{"planner": "big", "worker": "small"}`, and the result has the
        credentials of each: `joint["planner"]`. The episodes have one outcome: they are ended together, by
        `end_joint_episode`, or aborted together, and activity of one keeps all of them. See `begin_episode`; there is
        no `throttle_policy`, which divides the batch of one engine among its clients.
        """
        (joint,) = self.begin_joint_episodes(
            1,
            engines,
            discard_episode_timeout,
            episode_type,
            task_id=task_id,
            max_wait_s=max_wait_s,
            max_episode_time=max_episode_time,
        )
        return joint

    def begin_joint_episodes(  # noqa: PLR0913 - those of `begin_episodes`
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
        """Claim `n` joint episodes in one request, all or none. See `begin_joint_episode`."""
        claimed = self._run(
            self._core.begin_joint_episodes(
                n, engines, discard_episode_timeout, episode_type, task_id, max_wait_s, max_episode_time
            )
        )
        threads.note_claimed([episode for joint in claimed for episode in joint.episode_uuids])
        return claimed

    def end_joint_episode(self, task: Task, joint: JointEpisode, results: JointResult) -> None:
        """Report how a joint episode went: for each role an output, or just a reward.

        Repeating a report is harmless; a different one raises `OtherOutcome`.
        """
        self._run(self._core.end_joint_episodes([(task, joint, results)]))

    def end_joint_episodes(self, ends: Sequence[JointReport]) -> None:
        """Report (task, joint episode, results by role) of several in one request, all or none."""
        self._run(self._core.end_joint_episodes(ends))

    def abort_joint_episode(self, joint: JointEpisode, *, infra: bool = False, detail: str = "") -> None:
        """Abort a joint episode on all of its engines. `infra` says that no model is to blame."""
        self._run(self._core.abort_joint_episodes([joint], infra, detail))

    def touch_joint_episodes(self, joints: Sequence[JointEpisode]) -> list[JointEpisode]:
        """Keep these joint episodes from going idle. Returns those that are over."""
        return self._run(self._core.touch_joint_episodes(joints))

    @contextmanager
    def keep_joint_alive(self, *joints: JointEpisode, every_s: float = 30.0) -> Iterator[None]:
        """Keep joint episodes from going idle while the block runs: for tools that take long."""
        with self._beating(lambda: self.touch_joint_episodes(joints), every_s):
            yield

    # ---- the engine -------------------------------------------------------------------------------------------

    def get_engine_status(self) -> tuple[str, dict[str, Any]]:
        """Return the phase and its details; ("ENGINE.CANNOT_CONNECT", ...) when the server does not reply."""
        return self._run(self._core.get_engine_status())

    def get_global_step(self) -> int:
        """Return how many optimizer steps the engine has made."""
        return int(self._run(self._core.get_json("/get_engine_status"))["global_step"])

    def get_rollout_stat(self) -> PoolInformation:
        """Return the progress of the next batch."""
        return self._run(self._core.get_rollout_stat())

    def sync_train_config(self, agent_jet_job: JobLike) -> None:
        """Configure the engine, which must be OFFLINE, with a job. Raises `BadConfig`, `WrongPhase`."""
        self._run(self._core.sync_train_config(job_document(agent_jet_job)))

    def start_engine(self) -> None:
        """Start the engine and wait until it is ROLLING. Raises `WrongPhase`, `EngineOffline` with the reason."""
        self._run(self._core.start_engine())

    def stop_engine(self) -> None:
        """Stop the engine and wait until it is OFFLINE. Its open episodes are aborted."""
        self._run(self._core.stop_engine())

    def resume_engine(self) -> None:
        """Let a suspended run try again, once the cause is gone. Raises `WrongPhase` when the engine runs no job."""
        self._run(self._core.resume_engine())

    def auto_sync_train_config_and_start_engine(self, agent_jet_job: JobLike, force_restart: bool = False) -> None:
        """Bring the engine to ROLLING: start it with this job if it is OFFLINE, else join the job that it runs.

        If the job that runs differs, this logs a warning, or raises `OtherModel` when it trains another model.
        `force_restart` stops it and starts this one.
        """
        self._run(self._core.auto_start(job_document(agent_jet_job), force_restart))
        if self.verbose:
            log.info("the engine at %s is ROLLING; watch it with `bombus overwatch`", self.server_url)

    def wait_for_status(self, wanted: str, timeout_s: float = 3600.0) -> None:
        self._run(self._core.wait_for_status(wanted, timeout_s))

    def agree_sync_weight(self) -> None:
        """Say that this client has sampled enough for this batch."""
        self._run(self._core.agree_sync_weight())

    def replay_latest_llm_call(self, episode_uuid: str = "") -> dict[str, Any]:
        """Return `{input, output}` of the newest complete call of an episode; with the admin key, of all."""
        return self._run(self._core.post_json("/replay_latest_llm_call", {"episode_uuid": episode_uuid}))

    def push_verbose_log(self, tag: str, message: str) -> bool:
        """Write a line to the server's log. Returns False when it was dropped: too many came within a second."""
        return bool(self._run(self._core.post_json("/push_verbose_log", {"tag": tag, "message": message}))["success"])

    # ---- running many ------------------------------------------------------------------------------------------

    def run_episodes_until_all_complete(
        self,
        tasks: Sequence[Task],
        func: Callable[[Task], T],
        max_workers: int | None = None,
        auto_retry: bool = True,
    ) -> list[T | None]:
        """Call `func(task)` for every task, many at once, and return the results in the order of the tasks.

        `func` begins and ends its own episode. With `auto_retry`, a call that raises is repeated up to twice, after a
        pause. Raises `EpisodesFailed` once all are done, if some failed for good.

        When it is interrupted (Ctrl-C), the episodes that `func` has begun are aborted, and every operation of this
        client in `func` raises `KeyboardInterrupt`. Code of `func` that goes on is not waited for.
        """
        results: list[T | None] = [None] * len(tasks)
        failures: dict[int, Exception] = {}

        def attempt(index: int) -> None:
            delays = running.retry_delays(auto_retry)
            while True:
                try:
                    results[index] = threads.result_of(lambda: func(tasks[index]))
                    break
                except Exception as error:  # the caller's code: whatever it raises must not stop the others
                    threads.check()
                    delay = None if running.is_mistake(error) else next(delays, None)
                    running.reports.report(error, f"task {tasks[index].task_id} failed{running.retry_note(delay)}")
                    if delay is None:
                        failures[index] = error
                        break
                self._sleep(delay)
            progress.step(failed=index in failures)

        with ProgressBar(len(tasks), "episodes", shown=None if self.verbose else False) as progress:
            self._each(range(len(tasks)), attempt, running.workers_for(len(tasks), max_workers))
        return running.all_or_raise(results, failures)

    def run_group(  # noqa: PLR0913 - the public signature
        self,
        task: Task,
        func: running.Agent,
        n: int,
        *,
        discard_episode_timeout: float | None = None,
        episode_type: EpisodeKind = "train",
        max_workers: int | None = None,
        sampler: str = "",
        replace_infra: int = 0,
    ) -> list[WorkflowOutput | None]:
        """Run `n` episodes of one task: claim them in one request, run them at once, and end them in one request.

        `func(task, credentials)` returns the outcome or just the reward; it may be a coroutine function. An episode
        whose agent raises is aborted (for an `InfraError`, as an infrastructure failure) and is None in the result. Up
        to `replace_infra` of those that infrastructure is to blame for, or that the hive has taken back, are played
        again, as episodes of their own, so that a broken environment leaves no hole in the group. Episodes that are
        done, or wait for one of `max_workers`, are kept while others go on. What was lost is logged, and counted by the
        kind of its error in `lost_episodes`. Raises `EpisodesFailed` when all fail.
        """
        check_task(task)
        claimed = self.begin_episodes(n, discard_episode_timeout, episode_type, task_id=task.task_id, sampler=sampler)
        claim = GroupClaim(discard_episode_timeout=discard_episode_timeout, episode_type=episode_type, sampler=sampler)
        group = SingleGroup(self._core, task, claim, claimed, replace_infra)
        return self._played(group, lambda episode: func(task, episode), max_workers)

    def _played(
        self,
        group: GroupRun[ClaimT, GivenT, OutcomeT],
        play: Callable[[ClaimT], GivenT | Awaitable[GivenT]],
        max_workers: int | None,
    ) -> list[OutcomeT | None]:
        """Play the episodes of a group to its end. Where that fails, none of them stays open."""

        def attempt(index: int) -> None:
            try:
                group.succeeded(index, threads.result_of(lambda: play(group.begin(index))))
            except Exception as error:  # the caller's code: the rest of the group goes on
                threads.check()
                group.failed(index, error)

        def fill(index: int) -> None:
            if index not in group.failures:
                attempt(index)
            while index in group.failures and self._run(group.replace(index)):
                threads.note_claimed(group.episodes(index))
                attempt(index)

        left: Sequence[int] = range(len(group))
        try:
            with self._beating(lambda: self._run(group.keep()), group.keep_every_s):
                while left:
                    self._each(left, fill, running.workers_for(len(left), max_workers or len(left)))
                    left = self._run(group.end())
        except BaseException:
            self._run(group.give_up())
            raise
        group.tell()
        with self._lost_lock:
            self.lost_episodes += group.lost
        return group.outcome()

    def run_joint_group(  # noqa: PLR0913 - those of `run_group`
        self,
        task: Task,
        func: JointAgent,
        n: int,
        engines: Mapping[str, str],
        *,
        discard_episode_timeout: float | None = None,
        episode_type: EpisodeKind = "train",
        max_workers: int | None = None,
        replace_infra: int = 0,
    ) -> list[JointResult | None]:
        """Run `n` joint episodes of one task, as `run_group` runs episodes.

        `func(task, joint)` returns the outcome or the reward of each role; it may be a coroutine function.
        """
        check_task(task)
        claimed = self.begin_joint_episodes(n, engines, discard_episode_timeout, episode_type, task_id=task.task_id)
        claim = GroupClaim(discard_episode_timeout=discard_episode_timeout, episode_type=episode_type, engines=engines)
        group = JointGroup(self._core, task, claim, claimed, replace_infra)
        return self._played(group, lambda joint: func(task, joint), max_workers)

    def _each(self, indices: Sequence[int], attempt: Callable[[int], None], workers: int) -> None:
        """Call `attempt` for each index in threads. When this is interrupted, their episodes are given up, and agents'
        own code has a few seconds to end."""
        agents = threads.AgentThreads(indices, attempt, workers)
        try:
            agents.run()
        except BaseException:
            if agents.is_inner:
                agents.interruption.tell()
            else:
                agents.interruption.tell(self._connections.end)
                self._give_up(agents.interruption)
                agents.leave()
                self._give_up(agents.interruption)  # what a thread had just claimed
            raise

    def _give_up(self, interruption: threads.Interruption) -> None:
        if episodes := self._core.still_begun(interruption.take_claimed()):
            self._run(self._core.give_up(episodes))


def start_engines(pairs: Sequence[tuple[SwarmClient, JobLike]], force_restart: bool = False) -> None:
    """Bring several engines to ROLLING at the same time. Raises an `ExceptionGroup` of the errors."""
    with ThreadPoolExecutor(max(1, len(pairs))) as pool:
        started = [
            pool.submit(client.auto_sync_train_config_and_start_engine, job, force_restart) for client, job in pairs
        ]
    errors = [error for future in started if isinstance(error := future.exception(), Exception)]
    if errors:
        raise ExceptionGroup(f"{len(errors)} of {len(pairs)} engines did not start", errors)
