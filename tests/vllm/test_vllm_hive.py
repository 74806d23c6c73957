"""GRPO through a whole hive on the bundled model, with vLLM as its replica."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import psutil
import pytest
from openai import OpenAI
from transformers import PreTrainedModel

from bombus import Job, SwarmClient, Task, WorkflowOutput
from bombus.bus import Bus
from bombus.bus.follow import Follower
from bombus.hive.events import AnyEvent, StepCompleted, WeightsLoaded, WeightsReady
from bombus.hive.generation import FrameReader, Generate, encode_request
from bombus.hive.records import SamplingParams, pack_tokens
from bombus.hive.state import EngineState, Phase
from bombus.weights.merging import merge_files
from bombus.weights.models import load_model
from tests.inference.backends.small_engines import Answer, Completion, reference_logprobs
from tests.replica_access import replica_headers
from tests.vllm.hive import VllmHive, vllm_hive

BOOT_S = 900.0
STEP_S = 600.0
AGREE = 1e-4  # nats, fp32 against fp32
PROMPT = list(range(100, 130))
JOB = Job(
    model="smollm2",
    batch_size=2,
    num_repeat=2,
    lr=1e-3,
    bombus={
        "model": {"dtype": "float32"},
        "rollout": {
            "max_prompt_length": 128,
            "max_response_length": 384,
            "max_response_length_in_one_turn": 16,
            "max_model_len": 512,
        },
        "trainer": {"lora_rank": 8, "max_tokens_per_bin": 512},
    },
)


class Log:
    """The hive's log: its state, and its events."""

    def __init__(self, bus: Bus, kept: Path) -> None:
        self.bus = bus
        self.events: list[AnyEvent] = []
        self.folders: dict[int, Path] = {}
        self.bases: dict[int, Path] = {}  # base models, of versions that are adapters
        self.follower = Follower(bus, on_event=lambda _, event: self._take(event))
        self._kept = kept

    def _take(self, event: AnyEvent) -> None:
        self.events.append(event)
        if isinstance(event, WeightsReady):  # the trainer removes old ones
            self.folders[event.version] = _link(Path(event.weights.where), self._kept / f"v{event.version}")
            if event.weights.adapter_of is not None:
                self.bases[event.version] = Path(event.weights.adapter_of.where)

    def model(self, version: int) -> PreTrainedModel:
        folder = self.folders[version]
        if version in self.bases:
            with TemporaryDirectory() as merged:
                merge_files(self.bases[version], folder, Path(merged) / "model")
                return load_model(Path(merged) / "model")
        return load_model(folder)

    @property
    def engine(self) -> EngineState:
        return self.follower.hive.engine("main")

    async def until(self, holds: Callable[[EngineState], bool], timeout_s: float) -> None:
        await self.follower.wait_for(lambda _: holds(self.engine), timeout_s)

    def of(self, kind: type[AnyEvent]) -> list[AnyEvent]:
        return [event for event in self.events if isinstance(event, kind)]


def _link(place: Path, into: Path) -> Path:
    into.mkdir()
    for file in place.iterdir():
        os.link(file, into / file.name)
    return into


@pytest.fixture(params=["merged", "adapter"])
def hive(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[VllmHive]:
    arguments = ["--dtype", "float32", "--vllm-eager", "--kv-cache-mb", "512", "--max-model-len", "512"]
    trainer = ("--weights-lora", request.param)
    with vllm_hive(tmp_path, *arguments, "--max-running", "8", trainer=trainer) as hive:
        yield hive


@pytest.fixture
async def log(hive: VllmHive, tmp_path: Path) -> AsyncIterator[Log]:
    async with await Bus.connect(hive.nats, "main", name="test") as bus:
        log = Log(bus, tmp_path)
        following = asyncio.create_task(log.follower.run())
        yield log
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


def agent(task: Task, credentials: "object") -> WorkflowOutput:
    """Rewards differ within a group, so that there is something to learn."""
    model = OpenAI(base_url=credentials.base_url, api_key=credentials.api_key)  # type: ignore[attr-defined]
    messages = [{"role": "user", "content": task.main_query}]
    reply = model.chat.completions.create(model="any", messages=messages, max_tokens=16)  # type: ignore[arg-type]
    return WorkflowOutput(reward=float(len(reply.choices[0].message.content or "")))


def roll(hive: VllmHive) -> None:
    """Run the episodes of one batch."""
    with SwarmClient(hive.url) as client:
        tasks = [Task(task_id=name, main_query=f"Tell me about {name}.") for name in ("bees", "bumblebees")]
        client.run_episodes_until_all_complete(tasks, lambda task: client.run_group(task, agent, 2))


def start(hive: VllmHive) -> None:
    with SwarmClient(hive.url) as client:
        client.auto_sync_train_config_and_start_engine(JOB)


async def ask(log: Log, tokens: int, stream: bool) -> Completion:
    """Send the replica a request like a gateway."""
    (replica,) = log.engine.replicas.values()
    sampling = SamplingParams(max_tokens=tokens, seed=1)
    request = Generate(
        id="r", engine="main", run=log.engine.run, prompt=pack_tokens(PROMPT), sampling=sampling, stream=stream
    )
    answer, reader = Answer(), FrameReader()
    url, content, headers = f"{replica.url}/generate", encode_request(request), await replica_headers(log.bus)
    async with (
        httpx.AsyncClient(timeout=STEP_S, headers=headers) as client,
        client.stream("POST", url, content=content) as response,
    ):
        async for chunk in response.aiter_raw():
            for frame in reader.feed(chunk):
                answer.take(frame)
    return answer.only


async def until_it_has_both(log: Log, stream: bool) -> Completion:
    """Send one request after another until one was open during a change of weights. Returns its completion."""
    while True:
        made = await ask(log, 400, stream)
        if len(set(made.versions)) > 1:
            return made


def worst(log: Log, made: Completion) -> float:
    """Return the largest difference between vLLM's logprobs and transformers' with each token's version."""
    difference = 0.0
    for version in set(made.versions):
        rows = reference_logprobs(log.model(version), PROMPT, made.tokens)
        for at, (token, its, logprob) in enumerate(zip(made.tokens, made.versions, made.logprobs)):
            if its == version:
                difference = max(difference, abs(float(rows[at, token]) - logprob))
    return difference


async def test_two_steps_of_grpo_with_the_weights_changed_in_place_under_running_requests(
    hive: VllmHive, log: Log, capsys: pytest.CaptureFixture[str]
) -> None:
    await asyncio.to_thread(start, hive)
    await log.until(lambda engine: engine.phase == Phase.ROLLING, BOOT_S)
    before = hive.engine()
    await asyncio.to_thread(roll, hive)
    crossing = [asyncio.create_task(until_it_has_both(log, stream)) for stream in (True, False)]
    await log.until(lambda engine: engine.phase == Phase.ROLLING and engine.version == 1, STEP_S)
    made = await asyncio.gather(*crossing)
    for one in made:
        assert one.versions == sorted(one.versions)
        assert set(one.versions) == {0, 1}
    await asyncio.to_thread(roll, hive)
    await log.until(lambda engine: engine.phase == Phase.ROLLING and engine.version == 2, STEP_S)
    after = await ask(log, 24, False)
    assert set(after.versions) == {2}
    assert hive.engine() == before, "the weights changed twice, and the processes are the same"

    differences = [await asyncio.to_thread(worst, log, one) for one in (*made, after)]
    steps = [event.metrics for event in log.of(StepCompleted) if isinstance(event, StepCompleted)]
    means = [metrics["kl_sampler_abs"] for metrics in steps]
    with capsys.disabled():
        print(f"\nworst differences {differences}, means against the trainer {means}")
    assert len(steps) == 2
    assert max(differences) < AGREE
    assert max(means) < AGREE

    before[0].kill()  # the server, whose engine would live on
    await log.until(lambda engine: not engine.replicas, 60)
    assert psutil.wait_procs(before, timeout=10)[1] == []
    await log.until(lambda engine: any(one.version == 2 for one in engine.replicas.values()), BOOT_S)
    assert set((await ask(log, 4, False)).versions) == {2}
    loaded = [event.version for event in log.of(WeightsLoaded) if isinstance(event, WeightsLoaded)]
    assert loaded == [0, 1, 2, 2], "loading the version again is reported again"

    family = hive.engine()
    await asyncio.to_thread(hive.stop, "inference")
    assert psutil.wait_procs(family, timeout=10)[1] == [], "Ctrl-C leaves no process"
