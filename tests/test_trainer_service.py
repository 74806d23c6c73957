"""The trainer on a real bus under a real coordinator; gateway, replica and clients are played."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from bombus import inbox
from bombus.bus import Bus
from bombus.events import NotedCall, Weights
from bombus.follow import Follower
from bombus.inbox import EpisodeResult
from bombus.records import CallRef, digest, encode_record
from bombus.run_config import RunConfig
from bombus.state import EngineState, Phase
from bombus_coordinator.shell import Coordinator
from bombus_trainer import checkpoint
from bombus_trainer.checkpoint import Facts
from bombus_trainer.executor import Executor
from bombus_trainer.options import TrainerOptions
from bombus_trainer.reading import read_batch
from bombus_trainer.service import Trainer
from bombus_trainer.settings import TrainerSettings
from tests.trainer_given import call, tiny_model_folder

ENGINE = "main"
REPLICA = "r1"
WAIT_S = 30.0


class Stage:
    """A hive with a coordinator, ready to be configured. `engine` is the fold as everybody sees it."""

    def __init__(self, bus: Bus, folder: Path) -> None:
        self.bus = bus
        self.folder = folder
        self.options = TrainerOptions(engine=ENGINE, folder=folder / "trainer", retry_s=0.01, retry_s_max=0.02)
        self.follower = Follower(bus)
        self.trainers: list[asyncio.Task[None]] = []
        self._ids = itertools.count()

    @property
    def engine(self) -> EngineState:
        return self.follower.hive.engine(ENGINE)

    def id(self) -> str:
        return f"test-{next(self._ids)}"

    async def until(self, phase: Phase, version: int = -1) -> None:
        await self.follower.wait_for(lambda _: self.engine.phase == phase and self.engine.version >= version, WAIT_S)

    def job(self, **trainer: object) -> RunConfig:
        return RunConfig.model_validate(
            {
                "model": {"path": str(self.folder / "model")},
                "rollout": {"num_repeat": 2},
                "collection": {"batch_size": 2},
                "trainer": {"lr": 0.01, "lora_rank": 0, **trainer},
            }
        )

    async def start(self, job: RunConfig) -> None:
        configure = inbox.Configure(
            id=self.id(),
            engine=ENGINE,
            config=job.to_json(),
            config_digest=job.digest,
            collection=job.to_collection(),
            model=job.model.path,
        )
        await self.bus.ask(configure)
        await self.restart()

    async def restart(self) -> None:
        answer = await self.bus.ask(inbox.Start(id=self.id(), engine=ENGINE))
        await self.follower.wait_position(answer.position)

    def train(self, name: str = "") -> asyncio.Task[None]:
        task = asyncio.create_task(Trainer(self.bus, self.options, name).run())
        self.trainers.append(task)
        return task

    async def replica(self) -> None:
        """Serves whatever is newest, at once."""
        while True:
            await self.say(
                inbox.ReplicaAlive(
                    id=self.id(),
                    engine=ENGINE,
                    replica=REPLICA,
                    url="http://replica",
                    run=self.engine.run,
                    version=self.engine.version,
                )
            )
            await self._something_newer(self.engine.run, self.engine.version)

    async def _something_newer(self, run: int, version: int) -> None:
        try:
            await self.follower.wait_for(lambda _: (self.engine.run, self.engine.version) != (run, version), 1.0)
        except TimeoutError:
            pass

    async def say(self, fact: inbox.Message) -> None:
        await self.bus.send(fact)

    async def play_batch(self, spoil: str = "") -> None:
        """Two tasks of two episodes, of two turns each; `spoil` breaks the reference of that task's last call."""
        for task in ("t1", "t2"):
            claim = inbox.Claim(id=self.id(), engine=ENGINE, claim=self.id(), client="c", count=2, wait_s=5.0)
            granted = await self.bus.ask(claim)
            assert isinstance(granted, inbox.Granted)
            results = []
            for number, episode in enumerate(granted.episodes):
                first = call(f"{episode}-a", list(range(18)), [20 + number, 21], episode=episode)
                second = call(f"{episode}-b", [5, 6], [30 + number, 31, 32], parent=first, episode=episode)
                for record in (first, second):
                    body = encode_record(record)
                    ack = await self.bus.publish(self.bus.subjects.call(ENGINE, episode), body, msg_id=record.id)
                    spoiled = task == spoil and record is second
                    ref = CallRef(ack.seq, record.id, b"x" * 16 if spoiled else digest(body))
                    noted = NotedCall(episode, ref, record.prompt_tokens, 2, oldest=0, newest=0)
                    await self.say(inbox.CallRecorded(id=self.id(), engine=ENGINE, run=self.engine.run, call=noted))
                results.append(EpisodeResult(episode=episode, task=task, reward=float(number)))
            await self.bus.ask(inbox.End(id=self.id(), engine=ENGINE, client="c", results=tuple(results)))


@pytest.fixture
async def stage(bus: Bus, tmp_path: Path) -> AsyncIterator[Stage]:
    tiny_model_folder(tmp_path / "model")
    stage = Stage(bus, tmp_path)
    coordinator = Coordinator(bus)
    tasks = [asyncio.create_task(each) for each in (coordinator.lead(), stage.follower.run())]
    await coordinator.leading.wait()
    tasks.append(asyncio.create_task(stage.replica()))
    yield stage
    for task in (*tasks, *stage.trainers):
        task.cancel()
    await asyncio.gather(*tasks, *stage.trainers, return_exceptions=True)


def served(weights: Weights) -> dict[str, torch.Tensor]:
    file = Path(weights.where) / "model.safetensors"
    assert sha256(file.read_bytes()).hexdigest() == weights.sha256
    return load_file(file)


async def test_an_engine_boots_and_a_batch_becomes_the_next_policy_version(stage: Stage) -> None:
    stage.train()
    await stage.start(stage.job())
    await stage.until(Phase.ROLLING, version=0)
    first = stage.engine.weights
    assert first is not None
    before = served(first.weights)
    original = load_file(stage.folder / "model" / "model.safetensors")
    assert all(torch.equal(before[name], value) for name, value in original.items())
    files = msgspec.msgpack.decode(await stage.bus.get_blob(first.weights.tokenizer), type=dict[str, bytes])
    assert files["tokenizer.json"] == b"{}"

    await stage.play_batch()
    await stage.until(Phase.ROLLING, version=1)
    done, second = stage.engine.step_done, stage.engine.weights
    assert done is not None
    assert second is not None
    assert done.metrics["reward_mean"] == 0.5
    assert done.metrics["tokens_trained"] == 4 * 5
    assert any(not torch.equal(value, before[name]) for name, value in served(second.weights).items())
    assert checkpoint.load(Path(done.checkpoint), done.checkpoint_digest).facts.step == 1


async def test_r15_only_two_versions_and_two_checkpoints_are_kept(stage: Stage) -> None:
    trainer = stage.train()
    await stage.start(stage.job())
    for version in range(4):
        await stage.until(Phase.ROLLING, version)
        if version < 3:
            await stage.play_batch()
    trainer.cancel()
    await asyncio.gather(trainer, return_exceptions=True)
    kept = {what: sorted(stage.options.folder.glob(f"{what}/*/main/run-1/*")) for what in ("weights", "checkpoints")}
    assert [place.name[:16] for place in kept["checkpoints"]] == ["step-00000002-ep", "step-00000003-ep"]
    assert [place.name[:16] for place in kept["weights"]][-2:] == ["version-00000002", "version-00000003"]


async def play_trainer(stage: Stage) -> tuple[Executor, int, Weights]:
    """Be a trainer that boots the run."""
    run = stage.engine.run
    opened = await stage.bus.ask(inbox.TrainerOpens(id=stage.id(), engine=ENGINE, run=run, trainer="played"))
    assert isinstance(opened, inbox.Done)
    executor = Executor(stage.folder / "model", TrainerSettings.of_job(stage.job()))
    weights = executor.export(stage.folder / "played", 0, opened.epoch)
    await stage.say(
        inbox.WeightsSaved(id=stage.id(), engine=ENGINE, run=run, step=0, trainer_epoch=opened.epoch, weights=weights)
    )
    await stage.until(Phase.ROLLING, version=0)
    return executor, opened.epoch, weights


async def test_r11_a_batch_that_a_dead_trainer_left_is_trained_once(stage: Stage) -> None:
    await stage.start(stage.job())
    executor, _, _ = await play_trainer(stage)
    await stage.play_batch()
    await stage.follower.wait_for(lambda _: stage.engine.batch is not None, WAIT_S)
    batch = stage.engine.batch
    assert batch is not None
    stage.train()
    await stage.until(Phase.ROLLING, version=1)
    assert stage.engine.step_done is not None
    assert stage.engine.step_done.trainer_epoch == 2
    executor.train_step(list((await read_batch(stage.bus, batch)).groups), 1)
    ready = stage.engine.weights
    assert ready is not None
    same = served(ready.weights)
    assert all(torch.equal(same[name], value) for name, value in executor.model.dense_weights())


async def test_r11_weights_of_a_completed_step_that_never_reached_the_log_are_published_from_its_checkpoint(
    stage: Stage,
) -> None:
    await stage.start(stage.job())
    executor, epoch, _ = await play_trainer(stage)
    await stage.play_batch()
    await stage.follower.wait_for(lambda _: stage.engine.batch is not None, WAIT_S)
    batch = stage.engine.batch
    assert batch is not None
    metrics = executor.train_step(list((await read_batch(stage.bus, batch)).groups), 1)
    facts = Facts(engine=ENGINE, run=1, step=1, trainer_epoch=epoch, attempt=1, config_digest="", metrics=metrics)
    saved = executor.save(stage.folder / "played", facts)
    await stage.say(
        inbox.StepDone(
            id=stage.id(),
            engine=ENGINE,
            run=1,
            step=1,
            trainer_epoch=epoch,
            checkpoint=saved.path,
            checkpoint_digest=saved.digest,
        )
    )
    stage.train()
    await stage.until(Phase.ROLLING, version=1)
    ready, done = stage.engine.weights, stage.engine.step_done
    assert ready is not None
    assert done is not None
    assert done.checkpoint_digest == saved.digest
    same = served(ready.weights)
    assert all(torch.equal(same[name], value) for name, value in executor.model.dense_weights())


async def test_r11_a_trainer_steps_aside_for_one_that_opened_after_it(stage: Stage) -> None:
    stage.train("old")
    await stage.start(stage.job())
    await stage.until(Phase.ROLLING, version=0)
    stage.train("new")
    await stage.follower.wait_for(lambda _: stage.engine.trainer == "new", WAIT_S)
    await stage.play_batch()
    await stage.until(Phase.ROLLING, version=1)
    assert stage.engine.trainer == "new"
    assert stage.engine.trainer_epoch == 2


async def test_a_model_that_cannot_be_loaded_ends_the_run_with_one_sentence(stage: Stage) -> None:
    stage.train()
    job = stage.job()
    await stage.start(job.model_copy(update={"model": job.model.model_copy(update={"path": "/nowhere/at/all"})}))
    await stage.follower.wait_for(lambda _: bool(stage.engine.failure), WAIT_S)
    assert stage.engine.failure == "there is no model at /nowhere/at/all: a model's folder has a config.json"


async def test_what_only_another_backend_can_do_ends_the_run(stage: Stage) -> None:
    stage.train()
    await stage.start(stage.job(backend="verl"))
    await stage.follower.wait_for(lambda _: bool(stage.engine.failure), WAIT_S)
    assert "it is the torch backend" in stage.engine.failure


async def test_r11_a_step_that_fails_three_times_stops_the_engine_with_the_reason(stage: Stage) -> None:
    stage.options.folder.mkdir()
    (stage.options.folder / "checkpoints").write_text("a file where a folder should be")
    stage.train()
    await stage.start(stage.job())
    await stage.until(Phase.ROLLING, version=0)
    await stage.play_batch()
    await stage.follower.wait_for(lambda _: bool(stage.engine.failure), WAIT_S)
    assert "step 1 failed 3 times" in stage.engine.failure
    assert "NotADirectoryError" in stage.engine.failure


async def test_r6_episodes_whose_calls_are_not_those_that_were_referenced_are_left_out(stage: Stage) -> None:
    stage.train()
    await stage.start(stage.job())
    await stage.until(Phase.ROLLING, version=0)
    await stage.play_batch(spoil="t2")
    await stage.until(Phase.ROLLING, version=1)
    done = stage.engine.step_done
    assert done is not None
    assert done.metrics["episodes_left_out"] == 2
    assert done.metrics["tokens_trained"] == 2 * 5


async def test_a_second_run_begins_with_the_model_as_it_was_loaded(stage: Stage) -> None:
    stage.train()
    await stage.start(stage.job(lora_rank=2))
    await stage.until(Phase.ROLLING, version=0)
    await stage.play_batch()
    await stage.until(Phase.ROLLING, version=1)
    await stage.bus.ask(inbox.Stop(id=stage.id(), engine=ENGINE))
    await stage.restart()
    await stage.until(Phase.ROLLING, version=0)
    ready = stage.engine.weights
    assert stage.engine.run == 2
    assert ready is not None
    original = load_file(stage.folder / "model" / "model.safetensors")
    assert all(torch.equal(value, original[name]) for name, value in served(ready.weights).items())
