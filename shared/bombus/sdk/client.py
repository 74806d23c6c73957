"""`SwarmClient`: the client of a hive for threaded code."""

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing, contextmanager
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import httpx

from bombus import telemetry
from bombus.sdk import running, threads, transport
from bombus.sdk.claimed import ClaimedEpisodes
from bombus.sdk.core import finished
from bombus.sdk.errors import SwarmError
from bombus.sdk.groups import MultiModelGroup, SingleGroup
from bombus.sdk.heartbeat import Heartbeat
from bombus.sdk.job import JobLike
from bombus.sdk.multi_model import HiveCore, MultiModelAgent, MultiModelResult
from bombus.sdk.playing import Playing
from bombus.sdk.requests import NoReply, ServerReply, ServerRequest
from bombus.sdk.types import EpisodeKind, MultiModelEpisode, Task, WorkflowOutput

log = logging.getLogger("bombus")

KEPT_ALIVE_S = 5.0  # how long to wait for a heartbeat that is still in progress when the block ends

P = ParamSpec("P")
T = TypeVar("T")


class _ThreadRuntime:
    """Waits in the caller's thread, and runs agents in threads. Its coroutines never wait for an event loop."""

    def __init__(
        self, pools: transport.HttpPools[httpx.Client], claimed: ClaimedEpisodes, sleep: Callable[[float], None]
    ) -> None:
        self._pools = pools
        self._room = threading.Semaphore(transport.CONNECTIONS_MAX)
        self._claimed = claimed
        self._sleep = sleep
        self._connections = transport.OpenConnections()

    async def send(self, request: ServerRequest) -> ServerReply | NoReply:
        with (
            self._room,
            self._pools.client() as http,
            telemetry.span("sdk.request", None, {"url.path": request.path}, "CLIENT"),
        ):
            return transport.sent(http, request, {"trace": self._connections.note})

    async def sleep(self, seconds: float) -> None:
        self._sleep(seconds)
        threads.check()

    def check(self) -> None:
        threads.check()

    def note_claimed(self, episodes: Sequence[str]) -> None:
        threads.note_claimed(episodes)

    async def result_of(self, agent: Callable[[], T | Awaitable[T]]) -> T:
        return threads.result_of(agent)

    async def each(
        self, indices: Sequence[int], attempt: Callable[[int], Coroutine[Any, Any, None]], workers: int
    ) -> None:
        """Call `attempt` for each index, in threads.

        If this is interrupted, the threads' episodes are given up, and the agents' own code gets a few seconds to end.
        """
        agents = threads.AgentThreads(indices, lambda index: finished(attempt(index)), workers)
        try:
            agents.run()
        except BaseException:
            if agents.is_inner:
                agents.interruption.tell()
            else:
                agents.interruption.tell(self._connections.end)
                await self._give_up(agents.interruption)
                agents.leave()
                await self._give_up(agents.interruption)  # episodes that a thread had just claimed
            raise

    async def _give_up(self, interruption: threads.Interruption) -> None:
        if episodes := self._claimed.still_open(interruption.take_claimed()):
            await self._claimed.give_up(episodes, self.send)

    @asynccontextmanager
    async def beating(self, touch: Callable[[], Coroutine[Any, Any, object]], every_s: float) -> AsyncIterator[None]:
        with beating(lambda: finished(touch()), every_s):
            yield


@contextmanager
def beating(touch: Callable[[], object], every_s: float) -> Iterator[None]:
    """Call `touch` every `every_s` seconds in a separate thread while the block runs."""
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


def _carried_out(operation: Coroutine[Any, Any, T]) -> T:
    with closing(operation):
        threads.check()
        return finished(operation)


def _blocking(
    operation: Callable[Concatenate[HiveCore, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["SwarmClient", P], T]:
    """Return the `SwarmClient` method that runs an operation in its caller's thread."""

    @wraps(operation)
    def method(client: "SwarmClient", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return _carried_out(operation(client._core, *args, **kwargs))

    return method


class SwarmClient:
    """A client of one engine. Threads may share it.

    `retry_s` is how long a request is retried while the server is away or busy. `engine` is for hives that train
    several models. `api_key` is for hives that require one: either the hive's client key or, to start and stop engines
    as well, its admin key. The key may also be part of the address (`http://host:10086/k/<key>`), or come from
    `$BOMBUS_ADMIN_KEY` or `$BOMBUS_CLIENT_KEY`. `transport_` and `sleep` are for tests. The errors that methods raise
    are in `bombus.sdk.errors`.
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
        options = transport.client_options(self.server_url, engine, key)
        claimed = ClaimedEpisodes(self.server_url, time.monotonic)
        self._pools = transport.HttpPools(lambda: httpx.Client(transport=transport_, **options))
        self._heartbeat = Heartbeat(claimed, options) if transport_ is None else None
        runtime = _ThreadRuntime(self._pools, claimed, sleep)
        self._core = HiveCore(
            self.server_url,
            runtime,
            claimed,
            random.random,
            on_claimed=self._heartbeat.begin if self._heartbeat is not None else None,
            retry_s=retry_s,
            verbose=verbose,
        )
        self._playing = Playing(self._core, runtime)

    @property
    def verbose(self) -> bool:
        return self._core.verbose

    @verbose.setter
    def verbose(self, verbose: bool) -> None:
        self._core.verbose = verbose

    @property
    def lost_episodes(self) -> Counter[str]:
        """Return how many of the groups' episodes were lost, by error type. The caller may replace the counter."""
        return self._playing.lost

    @lost_episodes.setter
    def lost_episodes(self, lost: Counter[str]) -> None:
        self._playing.lost = lost

    @property
    def client_uuid(self) -> str:
        return self._core.client_uuid

    @property
    def missed_at(self) -> float:
        """Return when the hive last failed to reply, or replied with a 502 to 504 or a 500 without a code.

        The time is in `time.monotonic` seconds, or minus infinity if this has never happened.
        """
        return self._core.missed_at

    def close(self) -> None:
        """Abort the episodes that are still open, and close the connections."""
        try:
            if self._heartbeat is not None:
                self._heartbeat.end()
        finally:
            for http in self._pools.made:
                http.close()

    def __enter__(self) -> "SwarmClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- operations that take one or a few requests: see `ClientCore` and `HiveCore` for code and documentation ------

    begin_episode = _blocking(HiveCore.begin_episode)
    begin_episodes = _blocking(HiveCore.begin_episodes)
    end_episode = _blocking(HiveCore.end_episode)
    end_episodes = _blocking(HiveCore.end_episodes)
    abort_episode = _blocking(HiveCore.abort_episode)
    abort_episodes = _blocking(HiveCore.abort_episodes)
    can_continue_episode = _blocking(HiveCore.can_continue_episode)
    take_datums = _blocking(HiveCore.take_datums)
    touch_episodes = _blocking(HiveCore.touch_episodes)
    watch_episodes = _blocking(HiveCore.watch_episodes)
    episode_usage = _blocking(HiveCore.episode_usage)
    replay_latest_llm_call = _blocking(HiveCore.replay_latest_llm_call)

    begin_multi_model_episode = _blocking(HiveCore.begin_multi_model_episode)
    begin_multi_model_episodes = _blocking(HiveCore.begin_multi_model_episodes)
    end_multi_model_episode = _blocking(HiveCore.end_multi_model_episode)
    end_multi_model_episodes = _blocking(HiveCore.end_multi_model_episodes)
    abort_multi_model_episode = _blocking(HiveCore.abort_multi_model_episode)
    touch_multi_model_episodes = _blocking(HiveCore.touch_multi_model_episodes)

    get_engine_status = _blocking(HiveCore.get_engine_status)
    get_global_step = _blocking(HiveCore.get_global_step)
    get_rollout_stat = _blocking(HiveCore.get_rollout_stat)
    sync_train_config = _blocking(HiveCore.sync_train_config)
    start_engine = _blocking(HiveCore.start_engine)
    stop_engine = _blocking(HiveCore.stop_engine)
    resume_engine = _blocking(HiveCore.resume_engine)
    auto_sync_train_config_and_start_engine = _blocking(HiveCore.auto_sync_train_config_and_start_engine)
    wait_for_status = _blocking(HiveCore.wait_for_status)
    agree_sync_weight = _blocking(HiveCore.agree_sync_weight)
    push_verbose_log = _blocking(HiveCore.push_verbose_log)

    # ---- what differs in threads ------------------------------------------------------------------------------

    @contextmanager
    def keep_alive(self, *episode_uuids: str, every_s: float = 30.0) -> Iterator[None]:
        """Keep episodes from going idle while the block runs, such as during slow tools."""
        with beating(lambda: self.touch_episodes(episode_uuids), every_s):
            yield

    @contextmanager
    def keep_multi_model_alive(self, *episodes: MultiModelEpisode, every_s: float = 30.0) -> Iterator[None]:
        """Keep multi-model episodes from going idle while the block runs, such as during slow tools."""
        with beating(lambda: self.touch_multi_model_episodes(episodes), every_s):
            yield

    def run_episodes_until_all_complete(
        self,
        tasks: Sequence[Task],
        func: Callable[[Task], T],
        max_workers: int | None = None,
        auto_retry: bool = True,
    ) -> list[T | None]:
        """Call `func(task)` for every task, many at the same time, and return the results in the order of the tasks.

        `func` begins and ends its own episode. With `auto_retry`, a call that raises is repeated up to twice, after a
        pause. Raises `EpisodesFailed` once all tasks are done if some of them failed for good.

        If this method is interrupted (Ctrl-C), the episodes that `func` has begun are aborted, and every operation of
        this client in `func` raises `KeyboardInterrupt`. Code in `func` that keeps running is given only a few seconds
        to end.
        """
        return _carried_out(self._playing.run_tasks(tasks, func, max_workers, auto_retry))

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
        """Run `n` episodes of one task: claim them in one request, run them at the same time, and end them in one
        request.

        `func(task, credentials)` returns the outcome or just the reward; it may be a coroutine function. An episode
        whose agent raises is aborted (for an `InfraError`, as an infrastructure failure), and its result is None. Up to
        `replace_infra` episodes that failed because of infrastructure, or that the hive took back, are replaced by new
        episodes, so that a broken environment leaves no hole in the group. Episodes that are done, or wait for one of
        `max_workers`, are kept alive while others run. Lost episodes are logged, and counted by error type in
        `lost_episodes`. Raises `EpisodesFailed` if all of them fail.
        """
        claim = partial(
            self._core.begin_episodes,
            discard_episode_timeout=discard_episode_timeout,
            episode_type=episode_type,
            task_id=task.task_id,
            sampler=sampler,
        )
        return _carried_out(
            self._playing.run_group(SingleGroup, task, func, n, claim, replace_infra, max_workers=max_workers)
        )

    def run_multi_model_group(  # noqa: PLR0913 - those of `run_group`
        self,
        task: Task,
        func: MultiModelAgent,
        n: int,
        engines: Mapping[str, str],
        *,
        discard_episode_timeout: float | None = None,
        episode_type: EpisodeKind = "train",
        max_workers: int | None = None,
        replace_infra: int = 0,
    ) -> list[MultiModelResult | None]:
        """Run `n` multi-model episodes of one task, in the same way as `run_group` runs episodes.

        `func(task, episode)` returns the outcome or the reward of each role; it may be a coroutine function.
        """
        claim = partial(
            self._core.begin_multi_model_episodes,
            engines=engines,
            discard_episode_timeout=discard_episode_timeout,
            episode_type=episode_type,
            task_id=task.task_id,
        )
        return _carried_out(
            self._playing.run_group(MultiModelGroup, task, func, n, claim, replace_infra, max_workers=max_workers)
        )


def start_engines(pairs: Sequence[tuple[SwarmClient, JobLike]], force_restart: bool = False) -> None:
    """Bring several engines to ROLLING at the same time. Raises their errors as an `ExceptionGroup`."""
    with ThreadPoolExecutor(max(1, len(pairs))) as pool:
        started = [
            pool.submit(client.auto_sync_train_config_and_start_engine, job, force_restart) for client, job in pairs
        ]
    errors = [error for future in started if isinstance(error := future.exception(), Exception)]
    if errors:
        raise ExceptionGroup(f"{len(errors)} of {len(pairs)} engines did not start", errors)
