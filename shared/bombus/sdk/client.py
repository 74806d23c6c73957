"""`SwarmClient`: a hive's client for code with threads."""

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx

from bombus import telemetry
from bombus.sdk import running, transport
from bombus.sdk.core import Core, EpisodeEnd, Lost, Plan, Reply, Send
from bombus.sdk.errors import SwarmError
from bombus.sdk.job import JobLike, job_document
from bombus.sdk.progress import Progress
from bombus.sdk.types import Credentials, EpisodeKind, PoolInformation, Task, ThrottlePolicy, WorkflowOutput

log = logging.getLogger("bombus")

T = TypeVar("T")


class SwarmClient:
    """One client of one engine. Threads may share it.

    `retry_s` is how long a request is tried again while the server is away or busy. `engine` is for hives that train
    several models. `api_key` is for hives that ask for one: their client key, or their admin key to start and stop
    engines too. It may be part of the address (`http://host:10086/k/<key>`), or come from `$BOMBUS_ADMIN_KEY` or
    `$BOMBUS_CLIENT_KEY`.
    `transport` and `sleep` are for tests. What can go wrong is in `bombus.sdk.errors`.
    """

    def __init__(
        self,
        server_url: str,
        verbose: bool = True,
        *,
        engine: str | None = None,
        api_key: str | None = None,
        retry_s: float = 120.0,
        transport_: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        telemetry.configure("client")
        self.server_url, key = transport.address(server_url, api_key)
        self.verbose = verbose
        self._core = Core(self.server_url, time.monotonic, random.random, retry_s=retry_s)
        self._http = httpx.Client(transport=transport_, **transport.client_options(self.server_url, engine, key))
        self._sleep = sleep

    @property
    def client_uuid(self) -> str:
        return self._core.client_uuid

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> "SwarmClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, plan: Plan[T]) -> T:
        came: Reply | Lost | None = None
        while True:
            try:
                wanted = plan.send(came)
            except StopIteration as done:
                result: T = done.value
                return result
            if isinstance(wanted, Send):
                came = self._send(wanted)
            else:
                self._sleep(wanted.seconds)
                came = None

    def _send(self, send: Send) -> Reply | Lost:
        with telemetry.span("sdk.request", path=send.path):
            try:
                response = self._http.request(**transport.request_options(send))
            except httpx.TransportError as error:
                return Lost(f"no answer from {self._http.base_url} ({type(error).__name__}: {error})")
        return transport.reply_of(response)

    # ---- episodes ---------------------------------------------------------------------------------------------

    def begin_episode(
        self,
        discard_episode_timeout: float = 240.0,
        episode_type: EpisodeKind = "train",
        throttle_policy: ThrottlePolicy | None = None,
        *,
        max_wait_s: float | None = None,
        max_episode_time: float | None = None,
    ) -> tuple[str, Credentials]:
        """Claim an episode, waiting until there is one; returns its id and what a harness needs.

        The server takes it away when no call and no touch has come for `discard_episode_timeout` seconds. After
        `max_episode_time` (twice that) `end_episode` aborts it. Raises `EngineOffline`, `NoEpisode`.
        """
        return self._run(
            self._core.begin_episode(
                discard_episode_timeout, episode_type, throttle_policy, max_wait_s, max_episode_time
            )
        )

    def begin_episodes(
        self,
        n: int,
        discard_episode_timeout: float = 240.0,
        episode_type: EpisodeKind = "train",
        *,
        task_id: str = "",
        max_wait_s: float | None = None,
        max_episode_time: float | None = None,
    ) -> list[Credentials]:
        """Claim `n` episodes in one request, all or none. As `begin_episode`."""
        return self._run(
            self._core.begin_episodes(n, discard_episode_timeout, episode_type, task_id, max_wait_s, max_episode_time)
        )

    def end_episode(self, task: Task, episode_uuid: str, workflow_output: WorkflowOutput) -> None:
        """Report how an episode went. The same report again is harmless; another one raises `OtherOutcome`."""
        self._run(self._core.end_episodes([(task, episode_uuid, workflow_output)]))

    def end_episodes(self, ends: Sequence[EpisodeEnd]) -> None:
        """Report (task, episode id, output) of several episodes in one request, all or none."""
        self._run(self._core.end_episodes(ends))

    def abort_episode(self, episode_uuid: str, *, infra: bool = False, detail: str = "") -> None:
        """Give an episode up. `infra` says that no model is to blame."""
        self._run(self._core.abort_episodes([episode_uuid], infra, detail))

    def abort_episodes(self, episode_uuids: Sequence[str], *, infra: bool = False, detail: str = "") -> None:
        self._run(self._core.abort_episodes(episode_uuids, infra, detail))

    def can_continue_episode(self, episode_uuid: str) -> bool:
        """Whether the episode is still ours."""
        return self._run(self._core.can_continue_episode(episode_uuid))

    def touch_episodes(self, episode_uuids: Sequence[str]) -> list[str]:
        """Say that these episodes live; returns those that are over."""
        return self._run(self._core.touch_episodes(episode_uuids))

    @contextmanager
    def keep_alive(self, *episode_uuids: str, every_s: float = 30.0) -> Iterator[None]:
        """While the block runs the episodes do not go idle: for tools that take their time."""
        over = threading.Event()

        def beat() -> None:
            while not over.wait(every_s):
                try:
                    self.touch_episodes(episode_uuids)
                except SwarmError as error:
                    log.warning("a sign of life was not heard: %s", error)

        thread = threading.Thread(target=beat, name="bombus-keep-alive", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()

    # ---- the engine -------------------------------------------------------------------------------------------

    def get_engine_status(self) -> tuple[str, dict[str, Any]]:
        """The phase and details of it; ("ENGINE.CANNOT_CONNECT", ...) when the server does not answer."""
        return self._run(self._core.get_engine_status())

    def get_global_step(self) -> int:
        """How many optimizer steps the engine has made."""
        return int(self._run(self._core.get_json("/get_engine_status"))["global_step"])

    def get_rollout_stat(self) -> PoolInformation:
        """How far the next batch is."""
        return self._run(self._core.get_rollout_stat())

    def sync_train_config(self, agent_jet_job: JobLike) -> None:
        """Give the engine its job while it is OFFLINE. Raises `BadConfig`, `WrongPhase`."""
        self._run(self._core.sync_train_config(job_document(agent_jet_job)))

    def start_engine(self) -> None:
        """Start the engine and wait until it is ROLLING. Raises `WrongPhase`, `EngineOffline` with the reason."""
        self._run(self._core.start_engine())

    def stop_engine(self) -> None:
        """Stop the engine and wait until it is OFFLINE. Its open episodes are aborted."""
        self._run(self._core.stop_engine())

    def auto_sync_train_config_and_start_engine(self, agent_jet_job: JobLike, force_restart: bool = False) -> None:
        """Bring the engine to ROLLING: start it with this job if it is OFFLINE, else join the job that it runs.

        A job that runs and differs is a warning, and `OtherModel` when it trains another model. `force_restart` stops
        it, and starts this one.
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
        """`{input, output}` of the newest complete call, of one episode or of all."""
        return self._run(self._core.post_json("/replay_latest_llm_call", {"episode_uuid": episode_uuid}))

    def push_verbose_log(self, tag: str, message: str) -> bool:
        """Put a line into the server's log; False when it had enough of them for this second."""
        return bool(self._run(self._core.post_json("/push_verbose_log", {"tag": tag, "message": message}))["success"])

    # ---- running many ------------------------------------------------------------------------------------------

    def run_episodes_until_all_complete(
        self,
        tasks: Sequence[Task],
        func: Callable[[Task], T],
        max_workers: int | None = None,
        auto_retry: bool = True,
    ) -> list[T | None]:
        """`func(task)` for every task, many at once; the results in the order of the tasks.

        `func` begins and ends its own episode. With `auto_retry` one that raises is run again, up to twice, after
        a while. Raises `EpisodesFailed` when all are through and some failed for good.
        """
        results: list[T | None] = [None] * len(tasks)
        failures: dict[int, Exception] = {}

        def attempt(index: int) -> None:
            delays = running.retry_delays(auto_retry)
            while True:
                try:
                    results[index] = func(tasks[index])
                    break
                except Exception as error:  # the caller's code: whatever it raises must not stop the others
                    delay = next(delays, None)
                    log.warning("task %s failed%s: %r", tasks[index].task_id, running.again(delay), error)
                    if delay is None:
                        failures[index] = error
                        break
                self._sleep(delay)
            progress.step(failed=index in failures)

        with Progress(len(tasks), "episodes", shown=None if self.verbose else False) as progress:
            self._each(range(len(tasks)), attempt, running.workers_for(len(tasks), max_workers))
        return running.all_or_raise(results, failures)

    def run_group(
        self,
        task: Task,
        func: running.Agent,
        n: int,
        *,
        discard_episode_timeout: float = 240.0,
        episode_type: EpisodeKind = "train",
        max_workers: int | None = None,
    ) -> list[WorkflowOutput | None]:
        """Run `n` episodes of one task: claimed in one request, run at once, ended in one request.

        `func(task, credentials)` returns the outcome or just the reward. An episode whose agent raises is aborted
        (`InfraError`: without blame) and is None in the result. Raises `EpisodesFailed` when all of them did.
        """
        claimed = self.begin_episodes(n, discard_episode_timeout, episode_type, task_id=task.task_id)
        outcome = running.GroupOutcome(task, claimed)

        def attempt(index: int) -> None:
            try:
                outcome.scored(index, func(task, claimed[index]))
            except Exception as error:  # the caller's code: the rest of the group goes on
                outcome.failed(index, error)

        try:
            self._each(range(n), attempt, running.workers_for(n, max_workers or n))
        except BaseException:
            self.abort_episodes([one.episode_uuid for one in claimed], detail="the client was interrupted")
            raise
        for episode, infra, detail in outcome.aborts():
            self.abort_episode(episode, infra=infra, detail=detail)
        self.end_episodes(outcome.ends())
        return outcome.result()

    def _each(self, indices: Sequence[int], attempt: Callable[[int], None], workers: int) -> None:
        with ThreadPoolExecutor(workers, thread_name_prefix="bombus-episode") as pool:
            try:
                for _ in pool.map(attempt, indices):
                    pass
            except BaseException:  # Ctrl-C: what has not begun does not begin
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def start_engines(pairs: Sequence[tuple[SwarmClient, JobLike]], force_restart: bool = False) -> None:
    """Bring several engines to ROLLING at the same time. Raises an `ExceptionGroup` of what went wrong."""
    with ThreadPoolExecutor(max(1, len(pairs))) as pool:
        started = [
            pool.submit(client.auto_sync_train_config_and_start_engine, job, force_restart) for client, job in pairs
        ]
    errors = [error for future in started if isinstance(error := future.exception(), Exception)]
    if errors:
        raise ExceptionGroup(f"{len(errors)} of {len(pairs)} engines did not start", errors)
