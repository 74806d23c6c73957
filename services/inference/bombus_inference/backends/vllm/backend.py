"""The vllm backend: one child process per run. The child's weights change in place, while its requests wait.

In an operations run the weights do not change, and adapters are served beside them.

To change weights, the backend pauses running requests, loads the files, sets the label of the new weights, drops all
keys and values that the old weights computed (running requests recompute theirs), and resumes. Nothing is sampled from
the new weights before the backend resumes, so every token that has arrived by then is from the old version. For later
tokens, vLLM reports the version of each token at the end of the answer.
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
from bombus.hive.events import CanaryCheck
from bombus.hive.generation import Fault, Generate
from bombus.hive.records import SamplingParams, pack_tokens
from bombus.machine.environments import environment_python
from bombus.weights.adapters import ADAPTER_FILE
from bombus.weights.deltas import FULL_FILE
from bombus_inference.backends.adapter_folders import check_address
from bombus_inference.backends.answers import FrameAssembler
from bombus_inference.backends.http_calls import JSON, BackendFailed, HttpCalls, check_answer
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
from bombus_inference.backends.vllm.adapter_files import AdapterRules
from bombus_inference.backends.vllm.adapters import VllmAdapters
from bombus_inference.backends.vllm.answering import GENERATE, Answering, ServedVersion
from bombus_inference.backends.vllm.prometheus import vllm_metrics
from bombus_inference.backends.vllm.server import (
    ADAPTER,
    MODEL,
    NO_TOKENIZER,
    VllmServer,
    has_tokenizer,
    serves_beside,
    vllm_arguments,
    vllm_environment,
)
from bombus_inference.backends.vllm.wire import parse_deltas, request_body
from bombus_inference.backends.wire import WeightLabel
from bombus_inference.model_files import Shapes, check_same_shapes, read_config, read_shapes
from bombus_inference.settings import ComputeSettings, VllmSettings

log = logging.getLogger(__name__)

HEALTHY_S = 120.0  # a child that ran at least this long is restarted after the shortest pause
RESTART_S = 1.0
RESTART_S_MAX = 60.0
SCRAPE_S = 5.0

DIED = Fault(why="the replica's vLLM died and is being restarted", code=Code.NO_REPLICA, retry=True)


def _changing_file(policy: Policy) -> Path:
    """Return the file whose tensors change from version to version."""
    return policy.folder / FULL_FILE if policy.adapter is None else policy.adapter / ADAPTER_FILE


def _base_model(policy: Policy) -> Path | None:
    return None if policy.adapter is None else policy.folder


@dataclass(frozen=True)
class _Child:
    """The configuration of a child. `constrains` says whether the child loads the model's tokenizer."""

    policy: Policy
    compute: ComputeSettings
    max_model_len: int
    constrains: bool

    @property
    def beside(self) -> bool:
        """Whether the child serves adapters beside the policy."""
        return serves_beside(self.policy, self.compute)


def _with_less(child: _Child, fault: EngineFault) -> _Child:
    """Return `child` without the feature whose failure, judging by `fault`, kept it from starting. Raises `fault` if
    that was not due to such a feature."""
    if child.constrains and "tokeniz" in str(fault).lower():
        log.warning("vLLM is started without the model's tokenizer, so structured output is unavailable: %s", fault)
        return replace(child, constrains=False)
    if child.beside and "lora" in str(fault).lower():
        log.warning("vLLM is started without adapters besides the policy: %s", fault)
        return replace(child, policy=replace(child.policy, beside=False))
    raise fault


class VllmBackend:
    """Runs one child at a time. Nothing is served while the child starts, or after it has died."""

    loads_adapters = True

    def __init__(self, compute: ComputeSettings, vllm: VllmSettings, deliver: Deliver) -> None:
        self.run = 0
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.lost = asyncio.Event()
        self._compute = compute
        self._vllm = vllm
        self._calls = HttpCalls(deliver, compute.max_running + compute.max_waiting)
        self._limits = Limits(0, 0, 0, 0)
        self._server: VllmServer | None = None
        self._watching: asyncio.Task[None] | None = None
        self._shapes: Shapes = {}  # shapes of the tensors that change
        self._base_model: Path | None = None  # the model under the adapter, if the run trains one
        self._adapters: VllmAdapters | None = None  # adapters served beside the policy, if any
        self._answering: Answering | None = None
        self._served = ServedVersion()
        self._precision = ""
        self._starts = 0
        self._pause_s = 0.0

    @property
    def version(self) -> int:
        return self._served.number

    @property
    def pid(self) -> int | None:
        """The process id of the child's keeper; None if there is no child."""
        return None if self._server is None else self._server.pid

    @property
    def sequence_tokens(self) -> int:
        return self._limits.max_model_len

    @property
    def constrains(self) -> bool:
        return self._limits.constrains

    # ---- requests ---------------------------------------------------------------------------------------------

    def add(self, ticket: int, request: Generate) -> None:
        if self._answering is None or self.version < 0:
            self._calls.refuse(ticket, NOTHING_LOADED)
            return
        self._calls.add(ticket, request, self.run, self._limits, self._answering.answer)

    def abort(self, ticket: int) -> None:
        self._calls.abort(ticket)

    # ---- adapters beside the policy ---------------------------------------------------------------------------

    async def load_adapter(self, address: str, folder: Path) -> bool:
        check_address(address)
        return await self._beside().load(address, folder)

    async def unload_adapter(self, address: str) -> None:
        check_address(address)
        await self._beside().unload(address)

    async def adapters(self) -> list[AdapterUse]:
        return [] if self._adapters is None else self._adapters.listed()

    def _beside(self) -> VllmAdapters:
        """Return the adapters of the child. Raises `Refused` if it serves no adapters, or is not ready."""
        if not self._compute.adapters_bytes:
            raise Refused(Code.UNSUPPORTED, NO_ADAPTERS)
        if self._server is None or self.version < 0:
            raise Refused(Code.NO_REPLICA, NOTHING_LOADED.why)
        if self._adapters is None:
            raise Refused(Code.UNSUPPORTED, NO_ADAPTERS)
        return self._adapters

    async def _ask(self, server: VllmServer, path: str, body: dict[str, object]) -> httpx.Response:
        """Post to a child. Raises `httpx.HTTPError` if the request fails or the child has ended."""
        if server.ended.is_set() or server.client.is_closed:
            raise httpx.TransportError("it has ended")
        return await server.client.post(path, json=body, timeout=self._vllm.update_s)

    # ---- weights ----------------------------------------------------------------------------------------------

    async def load(self, policy: Policy, report_stage: ReportStage) -> CanaryCheck | None:
        server = self._server
        same = self.run == policy.run and self._base_model == _base_model(policy) and self._adapters is None
        if server is not None and self.version >= 0 and same:
            return await self._change(server, policy)
        await self._end_server(UNLOADED)
        return await self._start(policy, report_stage)

    async def unload(self) -> None:
        await self._end_server(UNLOADED)

    async def stop(self) -> None:
        await self._calls.stop(STOPPING)
        await self._end_server(STOPPING)

    async def _start(self, policy: Policy, report_stage: ReportStage) -> CanaryCheck | None:
        """Start a new child with these weights. Raises `EngineFault` if the child cannot be started or fails its
        checks."""
        config = await asyncio.to_thread(read_config, policy.folder)
        shapes = await asyncio.to_thread(read_shapes, _changing_file(policy))
        compute = await asyncio.to_thread(with_precision, self._compute, policy)
        longest = compute.length_within(policy.max_model_len, config.context)
        await asyncio.sleep(self._pause_s)
        began = asyncio.get_running_loop().time()
        self._base_model = _base_model(policy)
        child = _Child(policy, compute, longest, has_tokenizer(policy))
        while True:
            try:
                server, adapters = await self._started(child, shapes, report_stage)
                break
            except EngineFault as fault:
                child = _with_less(child, fault)
        self._starts += 1
        self._server, self._shapes, self._adapters = server, shapes, adapters
        choices_max = min(CHOICES_MAX, self._compute.max_running)
        self._limits = Limits(
            longest,
            config.vocabulary,
            choices_max,
            self._compute.max_waiting,
            child.constrains,
            scores=True,
            adapters=adapters is not None,
        )
        self.run, self._precision = policy.run, compute.precision
        self._answering = Answering(server, self.run, self._model, self._limits, self._served, adapters)
        try:
            check = await self._checked(policy)
        except BaseException:
            await asyncio.shield(self._end_server(UNLOADED))
            raise
        self._served.number = policy.version
        self._watching = asyncio.create_task(self._watch(server))
        log.info("vLLM started in %.1f s", asyncio.get_running_loop().time() - began, extra={"run": policy.run})
        return check

    async def _checked(self, policy: Policy) -> CanaryCheck | None:
        if policy.expected is None or self._answering is None:
            return None
        return await self._answering.score_canary(policy.expected, self._precision)

    async def _started(
        self, child: _Child, shapes: Shapes, report_stage: ReportStage
    ) -> tuple[VllmServer, VllmAdapters | None]:
        """Start a child and generate a token with it. Raises `EngineFault` if either fails."""
        python = self._vllm.python or environment_python("vllm")
        policy, compute = child.policy, child.compute
        server = VllmServer()
        try:
            words = vllm_arguments(policy, server.socket, compute, self._vllm, child.max_model_len)
            command = [str(python), *words, *([] if child.constrains else [NO_TOKENIZER])]
            await server.start(command, vllm_environment(compute, self._vllm), self._vllm.start_s, report_stage)
            await self._check(server, WeightLabel(policy.run, policy.version))
            adapters = await self._adapters_of(server, child, shapes) if child.beside else None
        except BaseException as error:
            if isinstance(error, EngineFault):
                self._pause_s = self._longer_pause_s()
            await asyncio.shield(server.stop())
            raise
        return server, adapters

    async def _adapters_of(self, server: VllmServer, child: _Child, shapes: Shapes) -> VllmAdapters:
        """Return the adapters for a new child, none of them loaded yet. Raises `EngineFault` if the child cannot serve
        any."""
        compute = child.compute
        rules = AdapterRules(shapes, self._vllm.max_lora_rank, compute.adapters_bytes, compute.precision)
        adapters = VllmAdapters(server.adapters, rules, partial(self._ask, server))
        await adapters.begin()
        return adapters

    async def _check(self, server: VllmServer, label: WeightLabel) -> None:
        """Generate one token in the usual way, to detect at startup a vLLM that cannot do so."""
        request = Generate(id="check", engine="", run=label.run, prompt=pack_tokens([0]), sampling=SamplingParams())
        try:
            await self._post(server, "/update_weight_version", json={"new_version": str(label)})
            response = await server.client.post(
                GENERATE, content=request_body(request, [0], 2, self._model, stream=False), headers=JSON
            )
            await check_answer(response)
            made = parse_deltas(response.content, label.run, 0)
            if [delta.versions for delta in made] != [[label.version]]:
                raise BackendFailed("the versions are not the ones that it was given")
            FrameAssembler(request, label.version, lambda: False, 1).take(made[0])
        except (BackendFailed, Refused, httpx.HTTPError, ValueError) as error:
            raise EngineFault(
                "this vLLM does not return what a trainer needs: the ids, logprobs and weight versions of the "
                f"tokens that it samples ({error}; its last output: {server.last_words()}): run `bombus install vllm` "
                "for one that does"
            ) from error

    async def _change(self, server: VllmServer, policy: Policy) -> CanaryCheck | None:
        """Change weights in place. A failure midway ends the child, so nothing is served under a wrong label.

        The weights come from files, which works on every machine. To send tensors from GPU to GPU instead, only this
        method would have to change.
        """
        await asyncio.to_thread(check_same_shapes, self._shapes, _changing_file(policy))
        self._served.swaps += 1
        self._served.steady.clear()
        began = asyncio.get_running_loop().time()
        try:
            await self._post(server, "/pause?mode=keep")
            if policy.adapter is not None:
                change = {"method": "swap_adapter", "kwargs": {"name": ADAPTER, "path": str(policy.adapter)}}
            else:
                change = {"method": "swap_model", "kwargs": {"weights_path": str(policy.folder)}}
            await self._post(server, "/collective_rpc", json=change)
            label = str(WeightLabel(policy.run, policy.version))
            await self._post(server, "/update_weight_version", json={"new_version": label})
            await self._post(server, "/reset_prefix_cache?reset_running_requests=true", expect=b'"success":true')
            await self._post(server, "/resume")
            check = await self._checked(policy)
            self._served.number = policy.version
        except BaseException as error:
            await asyncio.shield(self._end_server(DIED))
            if isinstance(error, BackendFailed | httpx.HTTPError):
                raise EngineFault(f"vLLM could not change to version {policy.version} in place: {error}") from error
            raise
        finally:
            self._served.steady.set()
        milliseconds = round(1000 * (asyncio.get_running_loop().time() - began))
        log.info("changed weights in %d ms", milliseconds, extra={"run": policy.run, "version": policy.version})
        return check

    @property
    def _model(self) -> str:
        return MODEL if self._base_model is None else ADAPTER

    async def _post(
        self, server: VllmServer, path: str, json: Mapping[str, object] | None = None, expect: bytes = b""
    ) -> None:
        """Send a POST request and check the response. Raises `BackendFailed` if the status is not 200 or `expect` is
        not in the body, and `httpx.HTTPError` if there is no response."""
        response = await server.client.post(path, json=json, timeout=self._vllm.update_s)
        if response.status_code != 200 or expect not in response.content:
            raise BackendFailed(f"{path} answered {response.status_code}: {response.text[:400]}")

    # ---- the child --------------------------------------------------------------------------------------------

    async def _watch(self, server: VllmServer) -> None:
        """Wait until the child dies, then stop serving and set `lost`."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        await self._until_dead(server)
        healthy = loop.time() - began > HEALTHY_S
        self._pause_s = RESTART_S if healthy else self._longer_pause_s()
        log.error("vLLM died and will be restarted in %.0f s: %s", self._pause_s, server.last_words())
        self._served.number = -1
        self._calls.end_all(DIED)
        await server.stop()
        self._server = self._adapters = self._answering = None
        self.lost.set()

    async def _until_dead(self, server: VllmServer) -> None:
        """Wait until the child has ended, or has been unhealthy for `health_s`, as when only its engine has died."""
        loop = asyncio.get_running_loop()
        healthy_at = loop.time()
        while loop.time() - healthy_at < self._vllm.health_s:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._vllm.health_s / 8):
                    await server.ended.wait()
                    return
            if await server.is_healthy():
                healthy_at = loop.time()
        log.error("vLLM has been unhealthy for %.0f s and will be stopped", self._vllm.health_s)

    def _longer_pause_s(self) -> float:
        return min(max(RESTART_S, 2 * self._pause_s), RESTART_S_MAX)

    async def _end_server(self, fault: Fault) -> None:
        self._served.number = -1
        self._calls.end_all(fault)
        server, self._server = self._server, None
        self._adapters = self._answering = None
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        if server is not None:
            self._pause_s = 0.0
            await server.stop()

    # ---- metrics ----------------------------------------------------------------------------------------------

    async def metrics(self) -> Mapping[str, float]:
        own: dict[str, float] = {"swaps_total": self._served.swaps, "engine_starts_total": self._starts}
        if self._adapters is not None:
            store = self._adapters.store
            own |= {"adapters": len(store), "adapter_bytes": store.bytes, "adapter_evictions_total": store.evictions}
        server = self._server
        if server is None:
            return own
        try:
            response = await server.client.get("/metrics", timeout=SCRAPE_S)
        except httpx.HTTPError as error:
            log.warning("vLLM's metrics cannot be read: %s", error)
            return own
        return own | vllm_metrics(response.text)
