"""`AsyncSwarmClient`: the client of a hive for asyncio."""

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Self, TypeVar, cast

import httpx

from bombus import telemetry
from bombus.sdk import running, transport
from bombus.sdk.claimed import ClaimedEpisodes
from bombus.sdk.errors import SwarmError
from bombus.sdk.groups import MultiModelGroup, SingleGroup
from bombus.sdk.heartbeat import Heartbeat
from bombus.sdk.multi_model import AsyncMultiModelAgent, HiveCore, MultiModelResult
from bombus.sdk.playing import Playing
from bombus.sdk.requests import NoReply, ServerReply, ServerRequest
from bombus.sdk.types import EpisodeKind, MultiModelEpisode, Task, WorkflowOutput

log = logging.getLogger("bombus")

T = TypeVar("T")


class _LoopRuntime:
    """Waits in the caller's event loop, and runs agents in tasks. `check` does nothing, because a cancelled task stops
    by itself."""

    def __init__(
        self, pools: transport.HttpPools[httpx.AsyncClient], sleep: Callable[[float], Awaitable[None]]
    ) -> None:
        self._pools = pools
        self._room = asyncio.Semaphore(transport.CONNECTIONS_MAX)
        self._sleep = sleep

    async def send(self, request: ServerRequest) -> ServerReply | NoReply:
        async with self._room:
            with (
                self._pools.client() as http,
                telemetry.span("sdk.request", None, {"url.path": request.path}, "CLIENT"),
            ):
                try:
                    response = await http.request(**transport.request_options(request))
                except httpx.RequestError as error:
                    return transport.no_reply(http.base_url, error)
        return transport.reply_of(response)

    async def sleep(self, seconds: float) -> None:
        await self._sleep(seconds)

    def check(self) -> None: ...

    def note_claimed(self, episodes: Sequence[str]) -> None: ...

    async def result_of(self, agent: Callable[[], T | Awaitable[T]]) -> T:
        return await running.contained(cast(Awaitable[T], agent()))

    async def each(
        self, indices: Sequence[int], attempt: Callable[[int], Coroutine[Any, Any, None]], workers: int
    ) -> None:
        slots = asyncio.Semaphore(workers)

        async def in_its_slot(index: int) -> None:
            async with slots:
                await attempt(index)

        async with asyncio.TaskGroup() as tasks:
            for index in indices:
                tasks.create_task(in_its_slot(index))

    @asynccontextmanager
    async def beating(self, touch: Callable[[], Coroutine[Any, Any, object]], every_s: float) -> AsyncIterator[None]:
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


class AsyncSwarmClient(HiveCore):
    """`SwarmClient` with `await`. Tasks of one event loop may share a client."""

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
        url, key = transport.address(server_url, api_key)
        options = transport.client_options(url, engine, key)
        claimed = ClaimedEpisodes(url, time.monotonic)
        self._pools = transport.HttpPools(lambda: httpx.AsyncClient(transport=transport_, **options))
        self._heartbeat = Heartbeat(claimed, options) if transport_ is None else None
        self._runtime = _LoopRuntime(self._pools, sleep)
        super().__init__(
            url,
            self._runtime,
            claimed,
            random.random,
            on_claimed=self._heartbeat.begin if self._heartbeat is not None else None,
            retry_s=retry_s,
            verbose=verbose,
        )
        self._playing = Playing(self, self._runtime)

    @property
    def lost_episodes(self) -> Counter[str]:
        """Return how many of the groups' episodes were lost, by error type. The caller may replace the counter."""
        return self._playing.lost

    @lost_episodes.setter
    def lost_episodes(self, lost: Counter[str]) -> None:
        self._playing.lost = lost

    async def close(self) -> None:
        """Abort the episodes that are still open, and close the connections."""
        try:
            if self._heartbeat is not None:
                await asyncio.to_thread(self._heartbeat.end)
        finally:
            for http in self._pools.made:
                await http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @asynccontextmanager
    async def keep_alive(self, *episode_uuids: str, every_s: float = 30.0) -> AsyncIterator[None]:
        async with self._runtime.beating(lambda: self.touch_episodes(episode_uuids), every_s):
            yield

    @asynccontextmanager
    async def keep_multi_model_alive(self, *episodes: MultiModelEpisode, every_s: float = 30.0) -> AsyncIterator[None]:
        async with self._runtime.beating(lambda: self.touch_multi_model_episodes(episodes), every_s):
            yield

    async def run_episodes_until_all_complete(
        self,
        tasks: Sequence[Task],
        func: Callable[[Task], Awaitable[T]],
        max_workers: int | None = None,
        auto_retry: bool = True,
    ) -> list[T | None]:
        """See `SwarmClient.run_episodes_until_all_complete`."""
        return await self._playing.run_tasks(tasks, func, max_workers, auto_retry)

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
        """See `SwarmClient.run_group`."""
        claim = partial(
            self.begin_episodes,
            discard_episode_timeout=discard_episode_timeout,
            episode_type=episode_type,
            task_id=task.task_id,
            sampler=sampler,
        )
        return await self._playing.run_group(SingleGroup, task, func, n, claim, replace_infra)

    async def run_multi_model_group(  # noqa: PLR0913 - the public signature
        self,
        task: Task,
        func: AsyncMultiModelAgent,
        n: int,
        engines: Mapping[str, str],
        *,
        discard_episode_timeout: float | None = None,
        episode_type: EpisodeKind = "train",
        replace_infra: int = 0,
    ) -> list[MultiModelResult | None]:
        """See `SwarmClient.run_multi_model_group`."""
        claim = partial(
            self.begin_multi_model_episodes,
            engines=engines,
            discard_episode_timeout=discard_episode_timeout,
            episode_type=episode_type,
            task_id=task.task_id,
        )
        return await self._playing.run_group(MultiModelGroup, task, func, n, claim, replace_infra)
