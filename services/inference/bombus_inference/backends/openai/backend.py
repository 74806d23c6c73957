"""A server elsewhere as an engine: somebody else runs it, and this replica speaks for it to the hive.

Before its weights change, its open requests are let finish: no answer ever mixes versions, so each has exactly one.
"""

import asyncio
import logging
import os
from collections.abc import Mapping

import httpx
import msgspec

from bombus.errors import Code, EngineFault
from bombus.hive.generation import Fault, Generate
from bombus_inference.backends.answers import FrameAssembler
from bombus_inference.backends.http_calls import BackendFailed, FrameBatches, HttpCalls
from bombus_inference.backends.limits import CHOICES_MAX, Limits
from bombus_inference.backends.openai.probe import find_missing
from bombus_inference.backends.openai.servers import Server, detect_server
from bombus_inference.backends.protocol import NOTHING_LOADED, STOPPING, UNLOADED, Deliver, Policy, ReportStage
from bombus_inference.backends.wire import WeightLabel
from bombus_inference.model_files import read_config
from bombus_inference.settings import ComputeSettings, OpenAISettings

log = logging.getLogger(__name__)

DRAINED = Fault(why="the server's weights change, and this call took too long", code=Code.NO_REPLICA, retry=True)


class OpenAIBackend:
    loads_adapters = False

    def __init__(self, engine: ComputeSettings, settings: OpenAISettings, deliver: Deliver) -> None:
        self.run = 0
        self.version = -1
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.lost = asyncio.Event()
        self._engine = engine
        self._settings = settings
        self._client = httpx.AsyncClient(
            base_url=settings.url, headers=_headers(settings), timeout=None, limits=httpx.Limits(max_connections=None)
        )
        self._calls = HttpCalls(deliver, engine.max_running + engine.max_waiting)
        self._limits = Limits(0, 0, 0, 0)
        self._server: Server | None = None
        self._label = ""  # what the server calls the weights that it has from us
        self._swaps = 0

    # ---- requests ---------------------------------------------------------------------------------------------

    def add(self, ticket: int, request: Generate) -> None:
        server = self._server
        if server is None or self.version < 0:
            self._calls.refuse(ticket, NOTHING_LOADED)
            return
        self._calls.add(ticket, request, self.run, self._limits, lambda asked, prompt: self._ask(server, asked, prompt))

    def abort(self, ticket: int) -> None:
        self._calls.abort(ticket)

    async def _ask(self, server: Server, request: Generate, prompt: list[int]) -> FrameBatches:
        answer = FrameAssembler(request, self.version, lambda: True)
        async for some in server.ask(request, prompt, self._limits.tokens_max(request, prompt)):
            for seen in some:
                if seen.label and self._label and seen.label != self._label:
                    raise BackendFailed(f"somebody else changed the server's weights: they are {seen.label!r} now")
                if frames := answer.take(seen.delta(request.sampling.top_logprobs)):
                    yield frames

    # ---- weights ----------------------------------------------------------------------------------------------

    async def load(self, policy: Policy, report_stage: ReportStage) -> None:
        """Weights go by the server's own route, from a folder that it must see as well."""
        if self.version >= 0 and self.run != policy.run:
            await self.unload()
        config = await asyncio.to_thread(read_config, policy.folder)
        server = self._server or await detect_server(self._client, self._settings.model)
        self._check_may_serve(server, policy)
        await self._drain()
        self.version = -1  # what it serves from here on is not known until it has said so
        await report_stage(f"loading version {policy.version} into {self._settings.url}")
        await self._load(server, policy)
        if self._server is None:
            missing = await find_missing(server, policy.folder, config.vocabulary)
            if missing:
                raise EngineFault(f"{self._settings.url} lacks what training needs: {'; '.join(missing)}")
        longest = self._engine.length_within(policy.max_model_len, config.context, server.context or config.context)
        if self._server is None and longest == server.context < policy.max_model_len:
            log.warning(
                "sequences end at %d tokens and not at the job's %d: the server at %s takes no longer ones",
                *(longest, policy.max_model_len, self._settings.url),
                extra={"run": policy.run},
            )
        self._limits = Limits(longest, config.vocabulary, CHOICES_MAX, self._engine.max_waiting)
        self._server, self.run, self.version = server, policy.run, policy.version

    def _check_may_serve(self, server: Server, policy: Policy) -> None:
        if server.can_load:
            return
        if policy.version > 0:
            raise EngineFault(
                f"{self._settings.url} has no way to load new weights, so it can serve version 0 alone and not "
                f"{policy.version}: start vLLM with VLLM_SERVER_DEV_MODE=1, or use the vllm backend"
            )
        log.warning("%s has no way to load weights: it is taken to serve the job's model as it is", self._settings.url)

    async def _drain(self) -> None:
        """No answer is open afterwards. What takes too long is ended, and may be tried elsewhere."""
        if self.version < 0:
            return
        version, self.version = self.version, -1  # takes nothing new in
        if not await self._calls.drained(self._settings.drain_s):
            log.warning("%d calls of version %d are ended", len(self._calls), version)
            self._calls.end_all(DRAINED)

    async def _load(self, server: Server, policy: Policy) -> None:
        if not server.can_load:
            return
        self._label = str(WeightLabel(policy.run, policy.version))
        self._swaps += 1
        try:
            await server.load(policy.folder.absolute(), self._label, self._settings.update_s)
        except (BackendFailed, httpx.HTTPError, msgspec.MsgspecError) as error:
            raise EngineFault(
                f"{self._settings.url} could not load {policy.folder}, which it must see under the same path: "
                f"{str(error) or type(error).__name__}"
            ) from error

    async def unload(self) -> None:
        self.version = -1
        self._server = None  # it may be another by the next run
        self._calls.end_all(UNLOADED)

    async def stop(self) -> None:
        self.version = -1
        await self._calls.stop(STOPPING)
        await self._client.aclose()

    async def metrics(self) -> Mapping[str, float]:
        return {"swaps_total": self._swaps, "running": len(self._calls)}


def _headers(settings: OpenAISettings) -> dict[str, str]:
    """Raises `EngineFault` when the key's variable is not set."""
    if not settings.api_key_env:
        return {}
    if not os.environ.get(settings.api_key_env):
        raise EngineFault(f"the variable {settings.api_key_env} is not set: it must hold the server's key")
    return {"authorization": f"Bearer {os.environ[settings.api_key_env]}"}
