"""vLLM's own server as a child process: starts it, waits until it is ready, reads its output, and ends it.

The server listens on a unix socket in a folder that only our user can enter. No other user can therefore reach its
development routes, which load any weights from any path.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

from bombus.errors import EngineFault, Refused
from bombus.machine.hardware import gpu_environment
from bombus.machine.hive_keys import KEY_VARIABLES
from bombus.weights.adapters import VLLM_RANKS, read_adapter_config
from bombus.weights.deltas import FULL_FILE
from bombus.weights.models import cache_folder
from bombus_inference.backends.limits import TOP_LOGPROBS_MAX
from bombus_inference.backends.protocol import Policy, ReportStage
from bombus_inference.backends.vllm import keeper as vllm_keeper
from bombus_inference.backends.vllm.adapter_files import adaptable_layers
from bombus_inference.model_files import read_shapes
from bombus_inference.settings import ComputeSettings, VllmSettings

log = logging.getLogger(__name__)

LINES_KEPT = 500
LINE_BYTES_MAX = 1 << 20
POLL_S = 0.2
REPORT_EVERY_S = 10.0
STOP_S = vllm_keeper.GRACE_S + 5.0
REASON_CHARS_MAX = 400
MODEL, ADAPTER = "policy", "adapter"  # names in vLLM
ADAPTERS_IN_MEMORY = 4  # as a multiple of `max_loras`; the others are reread when a request names them
PASS_TOKENS = 512
NO_TOKENIZER = "--skip-tokenizer-init"  # vLLM argument that makes structured output unavailable
EXTENSION = Path(__file__).with_name("weight_swap.py")
# If the child inherited these, it would import our packages instead of its own.
NOT_INHERITED = {*KEY_VARIABLES, "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "VLLM_CPU_KVCACHE_SPACE"}

_error_level = re.compile(r"\b(ERROR|CRITICAL)\b")
_line_prefix = re.compile(r"^\(.*? pid=\d+\) (?:(?:ERROR|CRITICAL) .*?\] )?")
_exception = re.compile(r"^(\w+\.)*\w*(Error|Exception|Interrupt): .")


def has_tokenizer(policy: Policy) -> bool:
    """Return whether the policy's folder has a tokenizer, which vLLM needs for structured output."""
    return (policy.folder / "tokenizer.json").exists()


def serves_beside(policy: Policy, compute: ComputeSettings) -> bool:
    """Return whether adapters are served beside the policy, in which case they are applied to the policy's model."""
    return policy.beside and policy.version == 0 and policy.adapter is None and compute.adapters_bytes > 0


def vllm_arguments(
    policy: Policy, socket: Path, compute: ComputeSettings, vllm: VllmSettings, max_model_len: int
) -> list[str]:
    """Return the arguments with which Python starts vLLM's server for a policy.

    The server samples exactly as requested and reports logprobs of the distribution that it samples from. If the policy
    has an adapter, vLLM knows it as `ADAPTER`, and `weight_swap` can replace it. Adapters that are served beside the
    policy are loaded later. Raises `EngineFault` if vLLM cannot serve the policy's adapter.
    """
    arguments = ["-m", "vllm.entrypoints.openai.api_server"]
    options: dict[str, object] = {
        "model": policy.folder,
        "served-model-name": MODEL,
        "uds": socket,
        "dtype": compute.precision,
        "max-model-len": max_model_len,
        "max-num-seqs": compute.max_running,
        "tensor-parallel-size": vllm.tensor_parallel,
        "logprobs-mode": "processed_logprobs",  # logprobs of the distribution that was sampled from
        "max-logprobs": TOP_LOGPROBS_MAX + 1,
        "worker-extension-cls": f"{EXTENSION.stem}.WeightSwap",
        "generation-config": "vllm",  # not the model's own configuration, which would change how tokens are sampled
        # The first request that needs a backend chooses it for all later requests; only xgrammar supports what we send.
        "structured-outputs-config": '{"backend": "xgrammar"}',
    }
    if compute.kv_cache_bytes is not None or compute.device == "cpu":  # on a GPU, vLLM measures the free memory
        options["kv-cache-memory-bytes"] = compute.cache_bytes
    if vllm.gpu_memory_utilization is not None:
        options["gpu-memory-utilization"] = vllm.gpu_memory_utilization
    targets: set[str] = set()
    if policy.adapter is not None:
        config = read_adapter_config(policy.adapter)
        targets = {layer.rpartition(".")[2] for layer in config.target_modules}
        options |= {
            "max-lora-rank": _lora_rank_max(config.r),
            "max-loras": 1,
            "lora-modules": f"{ADAPTER}={policy.adapter}",
        }
    beside = serves_beside(policy, compute)
    if beside:
        options |= {
            "max-lora-rank": _lora_rank_max(vllm.max_lora_rank),
            "max-loras": vllm.max_loras + 1,  # one more for the adapter of zeros, which serves as the policy
            "max-cpu-loras": ADAPTERS_IN_MEMORY * vllm.max_loras + 1,
        }
        targets = {layer.rpartition(".")[2] for layer in adaptable_layers(read_shapes(policy.folder / FULL_FILE))}
        if compute.device == "cpu":  # on a CPU, vLLM copies the adapter for each token of a pass
            options["max-num-batched-tokens"] = max(PASS_TOKENS, compute.max_running)
    for name, value in options.items():
        arguments += [f"--{name}", str(value)]
    # The output layer is never among them: with LoRA on it, scoring a prompt crashes the engine (vLLM 0.32).
    arguments += ["--lora-target-modules", *sorted(targets)] if targets else []
    flags = ["enable-scale-out", "enable-prefix-caching", "enable-prompt-tokens-details"]
    flags += ["disable-uvicorn-access-log", *(["enforce-eager"] if vllm.eager else [])]
    flags += ["enable-lora"] if policy.adapter is not None or beside else []
    return arguments + [f"--{flag}" for flag in flags]


def _lora_rank_max(rank: int) -> int:
    """Return the lowest maximum rank that vLLM offers for adapters of this rank."""
    for step in VLLM_RANKS:
        if rank <= step:
            return step
    raise EngineFault(
        f"vLLM takes adapters of rank {VLLM_RANKS[-1]} at most, but this one has rank {rank}: train with a lower "
        "trainer.lora_rank, or start the trainer with --weights-lora merged"
    )


def vllm_environment(compute: ComputeSettings, vllm: VllmSettings) -> dict[str, str]:
    """Return the child's environment, which enables the routes that change weights, disables usage reports, and keeps
    internal ports local.

    On `cuda:N` the child gets GPU N and, if several GPUs share the model, the GPUs after it. Raises `EngineFault` if
    these GPUs are not available.
    """
    variables = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    variables |= {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    # Compiled code is kept outside the child's temporary files, which are removed; otherwise every start would
    # recompile.
    variables.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "torchinductor"))
    if compute.device == "cpu":
        # By default, vLLM pins its threads to cores, which trainers need too. One core is left for vLLM's other
        # processes, and waiting threads must not use it up by spinning.
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        variables["OMP_NUM_THREADS"] = str(compute.threads or max(1, (os.cpu_count() or 1) - 1))
        variables.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    elif ":" in compute.device:
        first = int(compute.device.partition(":")[2])
        try:
            variables |= gpu_environment(range(first, first + vllm.tensor_parallel))
        except Refused as error:
            raise EngineFault(f"vLLM cannot start on {compute.device}: {error.why}") from error
    return variables


class VllmServer:
    """One vLLM process, from start to end. `ended` is set when it has ended for any reason."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self._folder = Path(tempfile.mkdtemp(prefix="bombus-vllm-"))
        self.socket = self._folder / "engine.sock"
        self.adapters = self._folder / "adapters"
        transport = httpx.AsyncHTTPTransport(uds=str(self.socket), limits=httpx.Limits(max_connections=None))
        self.client = httpx.AsyncClient(transport=transport, base_url="http://vllm", timeout=None)
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._process: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """The process id of the keeper, which is vLLM's parent."""
        assert self._process is not None
        return self._process.pid

    async def start(
        self, command: Sequence[str], variables: Mapping[str, str], start_s: float, report_stage: ReportStage
    ) -> None:
        """Start vLLM and return once it answers. If it does not answer, end it and raise `EngineFault` with
        `last_words`."""
        keeper = [sys.executable, "-I", str(Path(vllm_keeper.__file__)), str(os.getpid())]
        log.debug("starting %s", " ".join(command))
        try:
            await self._spawn([*keeper, *command], variables)
            async with asyncio.timeout(start_s):
                await self._until_ready(report_stage)
            self._lines.clear()
        except TimeoutError:
            await self.stop()
            raise EngineFault(
                f"vLLM was not ready within {start_s:.0f} s; its last output: {self.last_words()}"
            ) from None
        except BaseException:
            await asyncio.shield(self.stop())
            raise

    async def _spawn(self, command: Sequence[str], variables: Mapping[str, str]) -> None:
        modules = self._folder / "modules"
        modules.mkdir()
        shutil.copy(EXTENSION, modules)
        self.adapters.mkdir()
        variables = {**variables, "PYTHONPATH": str(modules), "TMPDIR": str(self._folder)}
        # Do not use an asyncio pipe: the process would count as ended only once all its children had closed the pipe.
        ours, theirs = os.pipe()
        output = asyncio.StreamReader(limit=LINE_BYTES_MAX)
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(output), os.fdopen(ours, "rb", buffering=0)
        )
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command, env=variables, cwd=self._folder, start_new_session=True,
                stdin=asyncio.subprocess.DEVNULL, stdout=theirs, stderr=asyncio.subprocess.STDOUT,
            )  # fmt: skip
        finally:
            os.close(theirs)
        self._watching = asyncio.create_task(self._watch(self._process, output))

    async def stop(self) -> None:
        """End vLLM and all processes that it started. Returns when none of them is left."""
        process = self._process
        if process is not None:
            if process.returncode is None:
                process.terminate()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(STOP_S):
                        await process.wait()
            _kill_group(process.pid)
            if self._watching is not None:
                await self._watching
        await self.client.aclose()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    def last_words(self) -> str:
        """Return why vLLM died according to its output: the first exception, or else the last line.

        Later exceptions are usually consequences of the first. Exceptions in warnings are ignored, and so is everything
        printed before the server was ready.
        """
        lines = [_line_prefix.sub("", line) for line in self._lines]
        first = next((at for at, line in enumerate(lines) if _exception.match(line)), len(lines) - 1)
        more = itertools.takewhile(lambda line: line.startswith(" "), lines[first + 1 :])
        return " ".join([*lines[first : first + 1], *map(str.strip, more)])[:REASON_CHARS_MAX] or "nothing"

    async def _until_ready(self, report_stage: ReportStage) -> None:
        loop = asyncio.get_running_loop()
        began = reported = loop.time()
        log.info("vLLM is starting: it loads the weights and compiles, which takes minutes the first time")
        await report_stage("starting vLLM")
        while not await self.is_healthy():
            if self.ended.is_set():
                raise EngineFault(f"vLLM did not start; its last output: {self.last_words()}")
            if loop.time() - reported >= REPORT_EVERY_S:
                reported = loop.time()
                log.info("vLLM is starting, %.0f s so far", reported - began)
                await report_stage(f"starting vLLM: {reported - began:.0f} s so far")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self.ended.wait()

    async def is_healthy(self) -> bool:
        """Return whether vLLM answers and reports that its engine is running."""
        try:
            return (await self.client.get("/health", timeout=5.0)).status_code == 200
        except httpx.HTTPError:
            return False

    async def _watch(self, process: asyncio.subprocess.Process, output: asyncio.StreamReader) -> None:
        reading = asyncio.create_task(self._read(output))
        await process.wait()
        _kill_group(process.pid)  # in case the keeper itself was killed
        await reading
        self.ended.set()

    async def _read(self, output: asyncio.StreamReader) -> None:
        """Copy vLLM's output to our log until all processes that write to it have ended."""
        while True:
            try:
                line = await output.readline()
            except ValueError:  # the line is longer than LINE_BYTES_MAX
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            if text:
                self._lines.append(text)
                log.log(logging.WARNING if _error_level.search(text) else logging.DEBUG, "vLLM: %s", text)


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
