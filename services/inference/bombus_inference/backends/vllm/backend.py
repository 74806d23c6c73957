"""The vllm backend: one child process per run, whose weights change in place while its requests wait.

To change weights, pause what is running, load the files, set their label, drop every key and value that the old ones
computed (running requests compute theirs again), and resume. No token of the new weights exists before the resume, so
every token that has arrived by then is the old version's. For later tokens vLLM reports the version of each at the end
of the answer.
"""

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import httpx

from bombus.errors import Code, EngineFault, Refused
from bombus.hive.generation import Fault, Generate
from bombus.hive.records import SamplingParams, pack_tokens
from bombus.host.environments import environment_python
from bombus.weights.adapters import ADAPTER_FILE
from bombus.weights.deltas import FULL_FILE
from bombus_inference.backends.answers import FrameAssembler
from bombus_inference.backends.http_calls import JSON, BackendFailed, FrameBatches, HttpCalls, check_answer, server_sent
from bombus_inference.backends.limits import CHOICES_MAX, NO_ADAPTERS, Limits
from bombus_inference.backends.protocol import (
    NOTHING_LOADED,
    STOPPING,
    UNLOADED,
    AdapterUse,
    Deliver,
    Policy,
    ReportStage,
    with_precision,
)
from bombus_inference.backends.vllm.prometheus import vllm_metrics
from bombus_inference.backends.vllm.server import (
    ADAPTER,
    MODEL,
    NO_TOKENIZER,
    VllmServer,
    has_tokenizer,
    vllm_arguments,
    vllm_environment,
)
from bombus_inference.backends.vllm.wire import parse_deltas, request_body
from bombus_inference.backends.wire import WeightLabel
from bombus_inference.model_files import Shapes, check_same_shapes, read_config, read_shapes
from bombus_inference.settings import ComputeSettings, VllmSettings

log = logging.getLogger(__name__)

GENERATE = "/inference/v1/generate"
HEALTHY_S = 120.0  # a child that lived for so long is restarted after the shortest pause
RESTART_S = 1.0
RESTART_S_MAX = 60.0
SCRAPE_S = 5.0

_NOT_COMPILED = (
    "the engine failed at a request whose answer has a form ({}); it may not be able to hold answers to this schema"
)
DIED = Fault(why="the replica's vLLM died and is started again", code=Code.NO_REPLICA, retry=True)


def _changing_file(policy: Policy) -> Path:
    """Return the file whose tensors change from version to version."""
    return policy.folder / FULL_FILE if policy.adapter is None else policy.adapter / ADAPTER_FILE


def _base_model(policy: Policy) -> Path | None:
    return None if policy.adapter is None else policy.folder


@dataclass(frozen=True)
class _Child:
    """What a child is started with. `constrains`: whether it loads the model's tokenizer."""

    policy: Policy
    compute: ComputeSettings
    max_model_len: int
    constrains: bool


class VllmBackend:
    """Runs one child at a time. While it starts, and after it died, nothing is served."""

    loads_adapters = True

    def __init__(self, compute: ComputeSettings, vllm: VllmSettings, deliver: Deliver) -> None:
        self.run = 0
        self.version = -1
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.lost = asyncio.Event()
        self._compute = compute
        self._vllm = vllm
        self._calls = HttpCalls(deliver, compute.max_running + compute.max_waiting)
        self._limits = Limits(0, 0, 0, 0)
        self._server: VllmServer | None = None
        self._watching: asyncio.Task[None] | None = None
        self._shapes: Shapes = {}  # of the tensors that change
        self._base_model: Path | None = None  # the model under the adapters, if the run trains adapters
        self._swaps = 0  # increased before anything changes
        self._steady = asyncio.Event()  # set while no weights are being changed
        self._steady.set()
        self._starts = 0
        self._pause_s = 0.0

    @property
    def pid(self) -> int | None:
        """The process id of the child's keeper, None if there is no child."""
        return None if self._server is None else self._server.pid

    @property
    def sequence_tokens(self) -> int:
        return self._limits.max_model_len

    @property
    def constrains(self) -> bool:
        return self._limits.constrains

    # ---- requests ---------------------------------------------------------------------------------------------

    def add(self, ticket: int, request: Generate) -> None:
        server = self._server
        if server is None or self.version < 0:
            self._calls.refuse(ticket, NOTHING_LOADED)
            return
        self._calls.add(ticket, request, self.run, self._limits, partial(self._generate, server))

    def abort(self, ticket: int) -> None:
        self._calls.abort(ticket)

    async def _generate(self, server: VllmServer, request: Generate, prompt: list[int]) -> FrameBatches:
        """Yield the frames of an answer. Raises `BackendFailed` or `Refused`."""
        try:
            async with contextlib.aclosing(self._frames(server, request, prompt)) as made:
                async for frames in made:
                    yield frames
        except BackendFailed as error:
            # Grammars are compiled in the engine, where some fail that were checked before: at every replica.
            if request.constraint is not None and await server.is_healthy():
                raise Refused(Code.UNSUPPORTED, _NOT_COMPILED.format(error)) from error
            raise

    async def _frames(self, server: VllmServer, request: Generate, prompt: list[int]) -> FrameBatches:
        await self._steady.wait()
        swaps, run = self._swaps, self.run
        tokens_max = self._limits.tokens_max(request, prompt)
        assembler = FrameAssembler(request, self.version, lambda: self._swaps == swaps, tokens_max - len(prompt))
        body = request_body(request, prompt, tokens_max, self._model)
        async with server.client.stream("POST", GENERATE, content=body, headers=JSON) as response:
            await check_answer(response)
            if not request.stream:
                for delta in parse_deltas(await response.aread(), run, request.sampling.top_logprobs):
                    yield assembler.take(delta)
                return
            async for event in server_sent(response):
                for delta in parse_deltas(event, run, request.sampling.top_logprobs):
                    if frames := assembler.take(delta):
                        yield frames

    # ---- adapters beside the policy ---------------------------------------------------------------------------

    async def load_adapter(self, address: str, folder: Path) -> bool:
        raise Refused(Code.UNSUPPORTED, NO_ADAPTERS)

    async def unload_adapter(self, address: str) -> None:
        raise Refused(Code.UNSUPPORTED, NO_ADAPTERS)

    async def adapters(self) -> list[AdapterUse]:
        return []

    # ---- weights ----------------------------------------------------------------------------------------------

    async def load(self, policy: Policy, report_stage: ReportStage) -> None:
        server = self._server
        same = self.run == policy.run and self._base_model == _base_model(policy)
        if server is not None and self.version >= 0 and same:
            await self._change(server, policy)
        else:
            await self._end_server(UNLOADED)
            await self._start(policy, report_stage)

    async def unload(self) -> None:
        await self._end_server(UNLOADED)

    async def stop(self) -> None:
        await self._calls.stop(STOPPING)
        await self._end_server(STOPPING)

    async def _start(self, policy: Policy, report_stage: ReportStage) -> None:
        """Start a new child with these weights. Raises `EngineFault`."""
        config = await asyncio.to_thread(read_config, policy.folder)
        shapes = await asyncio.to_thread(read_shapes, _changing_file(policy))
        compute = await asyncio.to_thread(with_precision, self._compute, policy)
        longest = compute.length_within(policy.max_model_len, config.context)
        await asyncio.sleep(self._pause_s)
        began = asyncio.get_running_loop().time()
        self._base_model = _base_model(policy)
        child = _Child(policy, compute, longest, has_tokenizer(policy))
        try:
            server = await self._started(child, report_stage)
        except EngineFault as fault:
            if not child.constrains or "tokeniz" not in str(fault).lower():
                raise
            log.warning("vLLM starts without the model's tokenizer, so answers cannot be held to a form: %s", fault)
            child = replace(child, constrains=False)
            server = await self._started(child, report_stage)
        self._starts += 1
        self._server, self._shapes = server, shapes
        choices_max = min(CHOICES_MAX, self._compute.max_running)
        self._limits = Limits(longest, config.vocabulary, choices_max, self._compute.max_waiting, child.constrains)
        self.run, self.version = policy.run, policy.version
        self._watching = asyncio.create_task(self._watch(server))
        log.info("vLLM started in %.1f s", asyncio.get_running_loop().time() - began, extra={"run": policy.run})

    async def _started(self, child: _Child, report_stage: ReportStage) -> VllmServer:
        """Start a child, and generate a token with it. Raises `EngineFault`."""
        python = self._vllm.python or environment_python("vllm")
        policy, compute = child.policy, child.compute
        server = VllmServer()
        try:
            words = vllm_arguments(policy, server.socket, compute, self._vllm, child.max_model_len)
            command = [str(python), *words, *([] if child.constrains else [NO_TOKENIZER])]
            await server.start(command, vllm_environment(compute, self._vllm), self._vllm.start_s, report_stage)
            await self._check(server, WeightLabel(policy.run, policy.version))
        except BaseException as error:
            if isinstance(error, EngineFault):
                self._pause_s = self._longer_pause_s()
            await asyncio.shield(server.stop())
            raise
        return server

    async def _check(self, server: VllmServer, label: WeightLabel) -> None:
        """Generate one token in the usual way, so that a vLLM that cannot do this is found out at the start."""
        request = Generate(id="check", engine="", run=label.run, prompt=pack_tokens([0]), sampling=SamplingParams())
        try:
            await self._post(server, "/update_weight_version", json={"new_version": str(label)})
            response = await server.client.post(
                GENERATE, content=request_body(request, [0], 2, self._model), headers=JSON
            )
            await check_answer(response)
            made = parse_deltas(response.content, label.run, 0)
            if [delta.versions for delta in made] != [[label.version]]:
                raise BackendFailed("the versions are not the ones that it was given")
            FrameAssembler(request, label.version, lambda: False, 1).take(made[0])
        except (BackendFailed, Refused, httpx.HTTPError, ValueError) as error:
            raise EngineFault(
                "this vLLM does not give what a trainer needs, which is the ids, logprobs and weight versions of the "
                f"tokens that it samples ({error}; its last words: {server.last_words()}): run `bombus install vllm` "
                "for one that does"
            ) from error

    async def _change(self, server: VllmServer, policy: Policy) -> None:
        """Change weights in place. A failure half-way ends the child, so nothing is served under a wrong label.

        The weights come from files, which works on every machine. To send tensors from GPU to GPU instead, only this
        method would change.
        """
        await asyncio.to_thread(check_same_shapes, self._shapes, _changing_file(policy))
        self._swaps += 1
        self._steady.clear()
        began = asyncio.get_running_loop().time()
        try:
            await self._post(server, "/pause?mode=keep")
            if policy.adapter is not None:
                change = {"method": "swap_adapter", "kwargs": {"name": ADAPTER, "path": str(policy.adapter)}}
            else:
                change = {"method": "reload_weights", "kwargs": {"weights_path": str(policy.folder)}}
            await self._post(server, "/collective_rpc", json=change)
            label = str(WeightLabel(policy.run, policy.version))
            await self._post(server, "/update_weight_version", json={"new_version": label})
            await self._post(server, "/reset_prefix_cache?reset_running_requests=true", expect=b'"success":true')
            await self._post(server, "/resume")
            self.version = policy.version
        except BaseException as error:
            await asyncio.shield(self._end_server(DIED))
            if isinstance(error, BackendFailed | httpx.HTTPError):
                raise EngineFault(f"vLLM could not change to version {policy.version} in place: {error}") from error
            raise
        finally:
            self._steady.set()
        milliseconds = round(1000 * (asyncio.get_running_loop().time() - began))
        log.info("changed weights in %d ms", milliseconds, extra={"run": policy.run, "version": policy.version})

    @property
    def _model(self) -> str:
        return MODEL if self._base_model is None else ADAPTER

    async def _post(
        self, server: VllmServer, path: str, json: Mapping[str, object] | None = None, expect: bytes = b""
    ) -> None:
        """Post and check the answer. Raises `BackendFailed` or `httpx.HTTPError`."""
        response = await server.client.post(path, json=json, timeout=self._vllm.update_s)
        if response.status_code != 200 or expect not in response.content:
            raise BackendFailed(f"{path} answered {response.status_code}: {response.text[:400]}")

    # ---- the child --------------------------------------------------------------------------------------------

    async def _watch(self, server: VllmServer) -> None:
        """Wait until the child ends by itself, then stop serving and set `lost`."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        await self._until_dead(server)
        healthy = loop.time() - began > HEALTHY_S
        self._pause_s = RESTART_S if healthy else self._longer_pause_s()
        log.error("vLLM died and is started again in %.0f s: %s", self._pause_s, server.last_words())
        self.version = -1
        self._calls.end_all(DIED)
        await server.stop()
        self._server = None
        self.lost.set()

    async def _until_dead(self, server: VllmServer) -> None:
        """Wait until it has ended, or has not been healthy for `health_s`, like a server whose engine has died."""
        loop = asyncio.get_running_loop()
        healthy_at = loop.time()
        while loop.time() - healthy_at < self._vllm.health_s:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._vllm.health_s / 8):
                    await server.ended.wait()
                    return
            if await server.is_healthy():
                healthy_at = loop.time()
        log.error("vLLM has not been healthy for %.0f s and is ended", self._vllm.health_s)

    def _longer_pause_s(self) -> float:
        return min(max(RESTART_S, 2 * self._pause_s), RESTART_S_MAX)

    async def _end_server(self, fault: Fault) -> None:
        self.version = -1
        self._calls.end_all(fault)
        server, self._server = self._server, None
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        if server is not None:
            self._pause_s = 0.0
            await server.stop()

    # ---- metrics ----------------------------------------------------------------------------------------------

    async def metrics(self) -> Mapping[str, float]:
        own: dict[str, float] = {"swaps_total": self._swaps, "engine_starts_total": self._starts}
        server = self._server
        if server is None:
            return own
        try:
            response = await server.client.get("/metrics", timeout=SCRAPE_S)
        except httpx.HTTPError as error:
            log.warning("vLLM's metrics cannot be read: %s", error)
            return own
        return own | vllm_metrics(response.text)
