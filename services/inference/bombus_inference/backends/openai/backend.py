"""The openai backend: an external server, run by someone else and represented in the hive by this replica.

Open requests finish before the server's weights change, so no answer mixes versions.
"""

import asyncio
import logging
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import httpx
import msgspec

from bombus.endpoints.servers import LoadFailed
from bombus.errors import Code, EngineFault, Refused
from bombus.hive.events import CanaryCheck
from bombus.hive.generation import Fault, Generate
from bombus.weights.canary import ELSEWHERE, canary_sequences, compare
from bombus_inference.backends.answers import FrameAssembler
from bombus_inference.backends.http_calls import BackendFailed, FrameBatches, HttpCalls
from bombus_inference.backends.limits import CHOICES_MAX, NO_ADAPTERS, Limits
from bombus_inference.backends.openai.probe import find_missing
from bombus_inference.backends.openai.servers import Server, detect_server
from bombus_inference.backends.protocol import (
    NOTHING_LOADED,
    STOPPING,
    UNLOADED,
    AdapterUse,
    Deliver,
    Policy,
    ReportStage,
)
from bombus_inference.backends.wire import WeightLabel
from bombus_inference.model_files import read_config
from bombus_inference.settings import ComputeSettings, OpenAISettings

log = logging.getLogger(__name__)

DRAINED = Fault(why="the server's weights are changing, and this call took too long", code=Code.NO_REPLICA, retry=True)


class OpenAIBackend:
    loads_adapters = False
    constrains = False

    def __init__(self, compute: ComputeSettings, settings: OpenAISettings, deliver: Deliver) -> None:
        self.run = 0
        self.version = -1
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.lost = asyncio.Event()
        self._compute = compute
        self._settings = settings
        self._client = httpx.AsyncClient(
            base_url=settings.url, headers=_headers(settings), timeout=None, limits=httpx.Limits(max_connections=None)
        )
        self._calls = HttpCalls(deliver, compute.max_running + compute.max_waiting)
        self._limits = Limits(0, 0, 0, 0)
        self._server: Server | None = None
        self._label = ""  # the label under which the server loaded our weights
        self._swaps = 0

    @property
    def sequence_tokens(self) -> int:
        return self._limits.max_model_len

    # ---- requests ---------------------------------------------------------------------------------------------

    def add(self, ticket: int, request: Generate) -> None:
        server = self._server
        if server is None or self.version < 0:
            self._calls.refuse(ticket, NOTHING_LOADED)
            return
        self._calls.add(ticket, request, self.run, self._limits, partial(self._generate, server))

    def abort(self, ticket: int) -> None:
        self._calls.abort(ticket)

    async def _generate(self, server: Server, request: Generate, prompt: list[int]) -> FrameBatches:
        tokens_max = self._limits.tokens_max(request, prompt)
        assembler = FrameAssembler(request, self.version, lambda: True, tokens_max - len(prompt))
        async for choices in server.generate(request, prompt, tokens_max):
            for choice in choices:
                if choice.label and self._label and choice.label != self._label:
                    raise BackendFailed(f"another client changed the server's weights: they are {choice.label!r} now")
                if frames := assembler.take(choice.delta(request.sampling.top_logprobs)):
                    yield frames

    # ---- adapters beside the policy ---------------------------------------------------------------------------

    async def load_adapter(self, address: str, folder: Path) -> bool:
        raise Refused(Code.UNSUPPORTED, NO_ADAPTERS)

    async def unload_adapter(self, address: str) -> None:
        raise Refused(Code.UNSUPPORTED, NO_ADAPTERS)

    async def adapters(self) -> list[AdapterUse]:
        return []

    # ---- weights ----------------------------------------------------------------------------------------------

    async def load(self, policy: Policy, report_stage: ReportStage) -> CanaryCheck | None:
        """Load the weights through the server's own route, from a folder that the server must also be able to read."""
        if self.version >= 0 and self.run != policy.run:
            await self.unload()
        config = await asyncio.to_thread(read_config, policy.folder)
        server = self._server or await detect_server(self._client, self._settings.model)
        self._check_may_serve(server, policy)
        await self._drain()
        self.version = -1  # until the server confirms the load, its version is unknown
        await report_stage(f"loading version {policy.version} into {self._settings.url}")
        await self._load(server, policy)
        if self._server is None:
            missing = await find_missing(server, policy.folder, config.vocabulary)
            if missing:
                raise EngineFault(f"{self._settings.url} lacks what training needs: {'; '.join(missing)}")
        longest = self._compute.length_within(policy.max_model_len, config.context, server.context or config.context)
        if self._server is None and longest == server.context < policy.max_model_len:
            log.warning(
                "sequences end at %d tokens, not at the job's %d: the server at %s does not accept longer ones",
                *(longest, policy.max_model_len, self._settings.url),
                extra={"run": policy.run},
            )
        self._limits = Limits(longest, config.vocabulary, CHOICES_MAX, self._compute.max_waiting)
        check = await self._checked(server, policy)
        self._server, self.run, self.version = server, policy.run, policy.version
        return check

    async def _checked(self, server: Server, policy: Policy) -> CanaryCheck | None:
        """Compare the logprobs that the server gives with those that are expected. Raises `CanaryFailed` if they
        differ.

        Return None if the server gives no logprobs, or if none are expected.
        """
        if policy.expected is None:
            return None
        found: list[float] = []
        try:
            for line in canary_sequences(self._limits.vocabulary):
                found += await server.score(line) or ()
        except (BackendFailed, Refused, httpx.HTTPError, msgspec.MsgspecError) as error:
            log.warning("version %d is served unchecked: %s", policy.version, str(error) or type(error).__name__)
            return None
        return compare(policy.expected, found, ELSEWHERE)

    def _check_may_serve(self, server: Server, policy: Policy) -> None:
        if server.can_load:
            return
        if policy.version > 0:
            raise EngineFault(
                f"{self._settings.url} has no way to load new weights, so it can serve only version 0, not "
                f"{policy.version}: start vLLM with VLLM_SERVER_DEV_MODE=1, or use the vllm backend"
            )
        log.warning("%s has no way to load weights: it is assumed to serve the job's model", self._settings.url)

    async def _drain(self) -> None:
        """Wait until no request is open. Requests that take too long end with a fault that allows a retry on another
        replica."""
        if self.version < 0:
            return
        version, self.version = self.version, -1  # accept no new requests
        if not await self._calls.drain(self._settings.drain_s):
            log.warning("ending %d calls of version %d, which took too long", len(self._calls), version)
            self._calls.end_all(DRAINED)

    async def _load(self, server: Server, policy: Policy) -> None:
        if not server.can_load:
            return
        self._label = str(WeightLabel(policy.run, policy.version))
        self._swaps += 1
        try:
            await server.load(policy.folder.absolute(), self._label, self._settings.update_s)
        except (LoadFailed, httpx.HTTPError) as error:
            raise EngineFault(
                f"{self._settings.url} could not load {policy.folder}, which it must see under the same path: "
                f"{str(error) or type(error).__name__}"
            ) from error

    async def unload(self) -> None:
        self.version = -1
        self._server = None  # the next run may use a different kind of server
        self._calls.end_all(UNLOADED)

    async def stop(self) -> None:
        self.version = -1
        await self._calls.stop(STOPPING)
        await self._client.aclose()

    async def metrics(self) -> Mapping[str, float]:
        return {"swaps_total": self._swaps, "running": len(self._calls)}


def _headers(settings: OpenAISettings) -> dict[str, str]:
    """Return the headers with the server's key. Raises `EngineFault` if the key's environment variable is not set."""
    if not settings.api_key_env:
        return {}
    if not os.environ.get(settings.api_key_env):
        raise EngineFault(f"the environment variable {settings.api_key_env} is not set: it must hold the server's key")
    return {"authorization": f"Bearer {os.environ[settings.api_key_env]}"}
