"""The trainer on a real bus with a real coordinator; the tests act as gateway, replica and clients."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import MambaConfig, MambaForCausalLM

from bombus.bus import Blobs, Bus
from bombus.config.job import RunConfig
from bombus.datums.reading import BusCallReader
from bombus.hive import inbox
from bombus.hive.describe import line_of
from bombus.hive.events import StepCompleted, Weights, WeightsReady
from bombus.hive.fates import Fate
from bombus.hive.state import Phase
from bombus.weights.adapters import ADAPTER_FILE
from bombus_trainer.backend import BackendLost, TrainerBackend
from bombus_trainer.backends.torch.executor import Executor
from bombus_trainer.data.reading import read_batch
from bombus_trainer.publish.export import VersionTarget, export
from bombus_trainer.publish.step_checkpoint import StepFacts, read_step
from bombus_trainer.service import Trainer
from bombus_trainer.settings import TrainerSettings
from tests.trainer.sample_reading import load_samples
from tests.trainer.small_batches import VOCAB
from tests.trainer.trainer_hive import ENGINE, WAIT_S, Stage, served, staged


@pytest.fixture
async def stage(bus: Bus, tmp_path: Path) -> AsyncIterator[Stage]:
    async with staged(bus, tmp_path) as stage:
        yield stage


@pytest.mark.parametrize("wanted", [True, False])
async def test_a_version_has_a_canary_if_the_job_wants_one(stage: Stage, wanted: bool) -> None:
    stage.train()
    await stage.start(stage.job(canary=wanted))
    await stage.until(Phase.ROLLING, version=0)
    assert stage.engine.weights is not None
    assert (stage.engine.weights.canary is not None) == wanted


async def test_an_engine_boots_and_a_batch_becomes_the_next_policy_version(stage: Stage) -> None:
    stage.train()
    await stage.start(stage.job())
    await stage.until(Phase.ROLLING, version=0)
    first = stage.engine.weights
    assert first is not None
    before = served(first.weights)
    original = load_file(stage.folder / "model" / "model.safetensors")
    assert all(torch.equal(before[name], value) for name, value in original.items())
    files = msgspec.msgpack.decode(await Blobs(stage.bus).get(first.weights.tokenizer), type=dict[str, bytes])
    assert files["tokenizer.json"] == (stage.folder / "model" / "tokenizer.json").read_bytes()

    await stage.play_batch()
    await stage.until(Phase.ROLLING, version=1)
    done, second = stage.engine.step_done, stage.engine.weights
    assert done is not None
    assert second is not None
    assert done.metrics["reward_mean"] == 0.5
    assert done.metrics["tokens_trained"] == 4 * 5
    assert any(not torch.equal(value, before[name]) for name, value in served(second.weights).items())
    assert read_step(Path(done.checkpoint), done.checkpoint_digest).facts.step == 1


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
    """Act as a trainer that boots the run."""
    run = stage.engine.run
    opened = await stage.bus.inbox.request(inbox.TrainerOpens(id=stage.id(), engine=ENGINE, run=run, trainer="played"))
    assert isinstance(opened, inbox.Done)
    executor = Executor(stage.folder / "model", TrainerSettings.of_job(stage.job()))
    weights = export(executor, VersionTarget(stage.folder / "played", 0, opened.epoch))
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
    executor.train_step(list((await read_batch(BusCallReader(stage.bus), batch)).groups), 1)
    ready = stage.engine.weights
    assert ready is not None
    same = served(ready.weights)
    assert all(torch.equal(same[name], value) for name, value in executor.policy.dense_weights())


async def test_r11_weights_of_a_completed_step_that_never_reached_the_log_are_published_from_its_checkpoint(
    stage: Stage,
) -> None:
    await stage.start(stage.job())
    executor, epoch, _ = await play_trainer(stage)
    await stage.play_batch()
    await stage.follower.wait_for(lambda _: stage.engine.batch is not None, WAIT_S)
    batch = stage.engine.batch
    assert batch is not None
    metrics = executor.train_step(list((await read_batch(BusCallReader(stage.bus), batch)).groups), 1)
    facts = StepFacts(engine=ENGINE, run=1, step=1, trainer_epoch=epoch, attempt=1, config_digest="", metrics=metrics)
    saved = executor.save(stage.folder / "played", facts)
    await stage.say(
        inbox.StepDone(
            id=stage.id(),
            engine=ENGINE,
            run=1,
            step=1,
            trainer_epoch=epoch,
            checkpoint=str(saved.path),
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
    assert all(torch.equal(same[name], value) for name, value in executor.policy.dense_weights())


@pytest.mark.parametrize(("steps", "kept", "again"), [(5, 2, 1), (5, 1, 3), (3, 0, 3), (1, 0, 1)])
async def test_r11_without_its_newest_checkpoints_a_run_goes_on_from_what_is_left(
    stage: Stage, caplog: pytest.LogCaptureFixture, steps: int, kept: int, again: int
) -> None:
    trainer = stage.train()
    await stage.start(stage.job(checkpoint_every=2))
    for version in range(steps + 1):
        await stage.until(Phase.ROLLING, version)
        if version < steps:
            await stage.play_batch(shift=version)
    trainer.cancel()
    await asyncio.gather(trainer, return_exceptions=True)
    found = sorted(stage.options.folder.glob("checkpoints/*/main/run-1/step-*"))
    assert [place.name[:13] for place in found] == ["step-00000002", "step-00000004"][: len(found)]
    for place in found[kept:]:
        shutil.rmtree(place)
    stage.train()
    await stage.play_batch(shift=9)
    await stage.until(Phase.ROLLING, steps + 1)
    done = stage.engine.step_done
    assert done is not None
    assert (done.metrics["steps_made_again"], done.metrics["made_again_differs"]) == (again, 0.0)
    passed_over = [record.message for record in caplog.records if record.message.endswith("going back further")]
    assert len(passed_over) == len(found[kept:]), "a step that left no checkpoint is not looked for"


async def test_r11_a_run_whose_steps_cannot_be_made_again_is_suspended_with_one_sentence(stage: Stage) -> None:
    trainer = stage.train()
    await stage.start(stage.job())
    for version in range(4):
        await stage.until(Phase.ROLLING, version)
        if version < 3:
            await stage.play_batch(shift=version)
    trainer.cancel()
    await asyncio.gather(trainer, return_exceptions=True)
    for place in stage.options.folder.glob("checkpoints/*/main/run-1/step-*"):
        shutil.rmtree(place)
    stage.train(options=stage.options.model_copy(update={"load_patience_s": 0.0}))
    await stage.follower.wait_for(lambda _: bool(stage.engine.suspended), WAIT_S)
    assert "step-00000003-epoch-1-attempt-3 cannot be read: No such file" in stage.engine.suspended


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


async def test_r11_a_trainer_that_was_superseded_cannot_end_the_run_of_its_successor(stage: Stage) -> None:
    stage.train("old")
    await stage.start(stage.job())
    await stage.until(Phase.ROLLING, version=0)
    stage.train("new")
    await stage.follower.wait_for(lambda _: stage.engine.trainer_epoch == 2, WAIT_S)
    for epoch in (1, 2):
        broke = inbox.EngineBroke(id=stage.id(), engine=ENGINE, run=1, reason=f"said {epoch}", trainer_epoch=epoch)
        await stage.say(broke)
    await stage.follower.wait_for(lambda _: bool(stage.engine.failure), WAIT_S)
    assert stage.engine.failure == "said 2"


async def test_a_model_that_cannot_be_loaded_ends_the_run_with_one_sentence(stage: Stage) -> None:
    stage.train()
    job = stage.job()
    await stage.start(job.model_copy(update={"model": job.model.model_copy(update={"path": "/nowhere/at/all"})}))
    await stage.follower.wait_for(lambda _: bool(stage.engine.failure), WAIT_S)
    assert stage.engine.failure == "there is no model at /nowhere/at/all: a model's folder must have a config.json"


async def test_an_update_that_is_not_finite_is_left_out_and_too_many_such_steps_in_a_row_suspend_the_run(
    stage: Stage,
) -> None:
    trainer = stage.train()
    await stage.start(stage.job(normalise_by_std=False, max_nonfinite_steps=2))
    temperatures = (1e-45, 1.0, 1e-45, 1e-45)  # the lowest float32: logits over it are not finite
    for step, temperature in enumerate(temperatures, start=1):
        await stage.until(Phase.ROLLING, version=step - 1)
        if step == len(temperatures):  # the count is on the log: it survives a restart
            trainer.cancel()
            await asyncio.gather(trainer, return_exceptions=True)
            stage.train()
        await stage.play_batch(shift=step, temperature=temperature)
    await stage.follower.wait_for(lambda _: bool(stage.engine.suspended), WAIT_S)
    assert stage.engine.suspended.startswith("losses or gradients of the last 2 steps were not finite")
    assert stage.engine.failure == ""
    completed = [event for event in stage.events if isinstance(event, StepCompleted)]
    assert [event.metrics["updates_left_out"] for event in completed] == [1, 0, 1, 1]
    assert [event.metrics["nonfinite_steps"] for event in completed] == [1, 0, 1, 2]
    assert line_of(completed[0]).endswith("1 update left out for not being finite")
    sha256 = [event.weights.sha256 for event in stage.events if isinstance(event, WeightsReady)]
    assert [before == after for before, after in pairwise(sha256)] == [True, False, True, True]
    assert stage.engine.step_failures == 0
    await stage.bus.inbox.request(inbox.Resume(id=stage.id(), engine=ENGINE))
    await stage.until(Phase.ROLLING, version=4)
    await stage.play_batch(shift=5, temperature=1e-45)
    await stage.until(Phase.ROLLING, version=5)
    completed = [event for event in stage.events if isinstance(event, StepCompleted)]
    assert completed[-1].metrics["nonfinite_steps"] == 1, "a run that was resumed is borne with as long as a new one"
    assert stage.engine.suspended == ""


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


async def test_r14_of_an_asynchronous_run_no_episode_over_the_bound_is_trained_whatever_was_noted_of_it(
    stage: Stage,
) -> None:
    stage.train()
    await stage.start(stage.job(max_staleness=1))
    await stage.until(Phase.ROLLING, version=0)
    for step, versions in enumerate(((0, 0), (0, 1), (0, 1)), start=1):
        await stage.play_batch(shift=step, noted=step - 1, versions=versions)
        await stage.until(Phase.ROLLING, version=step)
    events = [event for event in stage.events if isinstance(event, StepCompleted)]
    completed = [event.metrics for event in events]
    assert [metrics["staleness_max"] for metrics in completed] == [0, 1, 1]
    assert [metrics["stale_share"] for metrics in completed] == [0, 0.5, 1]
    assert [metrics["episodes_left_out"] for metrics in completed] == [0, 0, 2]
    assert events[-1].tokens is not None
    stale = list(events[-1].tokens.left_out.values())
    assert stale == [Fate.DROPPED_STALE] * 2, "of version 0 in step 3: 2 versions old"
    assert all(metrics["seconds_waited"] > 0 for metrics in completed)


async def test_a_second_run_that_resumes_nothing_begins_with_the_model_as_it_was_loaded(stage: Stage) -> None:
    stage.train()
    await stage.start(stage.job(lora_rank=2, resume="never"))
    await stage.until(Phase.ROLLING, version=0)
    await stage.play_batch()
    await stage.until(Phase.ROLLING, version=1)
    await stage.bus.inbox.request(inbox.Stop(id=stage.id(), engine=ENGINE))
    await stage.restart()
    await stage.until(Phase.ROLLING, version=0)
    ready = stage.engine.weights
    assert stage.engine.run == 2
    assert ready is not None
    assert ready.weights.adapter_of is not None
    original = load_file(stage.folder / "model" / "model.safetensors")
    assert all(torch.equal(value, original[name]) for name, value in served(ready.weights.adapter_of).items())
    added = load_file(Path(ready.weights.where) / ADAPTER_FILE)
    assert not any(value.any() for name, value in added.items() if ".lora_B." in name)


async def test_a_job_has_the_samples_of_each_step_written_below_its_runs_folder(stage: Stage) -> None:
    stage.train()
    await stage.start(stage.job(save_debug_rollout_data="mine/rollout_{rollout_id}.pt"))
    for version in range(3):
        await stage.until(Phase.ROLLING, version)
        if version < 2:
            await stage.play_batch()
    folder = stage.options.folder / "rollouts" / stage.bus.subjects.hive / ENGINE / "run-1" / "mine"
    assert sorted(path.name for path in folder.iterdir()) == ["rollout_1.pt", "rollout_2.pt"]
    samples = load_samples(folder / "rollout_2.pt")
    assert [(sample.prompt.split()[-1], sample.reward) for sample in samples] == [("w17", 0.0), ("w17", 1.0)] * 2
    assert samples[1].response.split() == ["w21", "w21", "w5", "w6", "w31", "w31", "w32"]
    assert samples[1].loss_mask == [1, 1, 0, 0, 1, 1, 1]
    assert stage.engine.step_done is not None
    assert stage.engine.step_done.metrics["debug_rollouts_failed"] == 0.0


async def test_debug_rollout_data_that_cannot_be_written_does_not_cost_the_step(stage: Stage) -> None:
    folder = stage.options.folder / "rollouts" / stage.bus.subjects.hive / ENGINE / "run-1"
    folder.mkdir(parents=True)
    (folder / "mine").write_text("a file where a folder should be")
    stage.train()
    await stage.start(stage.job(save_debug_rollout_data="mine/rollout_{rollout_id}.pt"))
    await stage.until(Phase.ROLLING, version=0)
    await stage.play_batch()
    await stage.until(Phase.ROLLING, version=1)
    assert stage.engine.step_done is not None
    assert stage.engine.step_done.metrics["debug_rollouts_failed"] == 1.0
    assert stage.engine.step_failures == 0


async def test_a_job_that_names_a_path_elsewhere_for_debug_rollout_data_is_refused_in_one_sentence(
    stage: Stage,
) -> None:
    stage.train()
    await stage.start(stage.job(save_debug_rollout_data="/etc/rollout_{rollout_id}.pt"))
    await stage.follower.wait_for(lambda _: bool(stage.engine.failure), WAIT_S)
    assert stage.engine.failure == (
        "trainer.save_debug_rollout_data = '/etc/rollout_{rollout_id}.pt' is refused: the path must be below the run's "
        "folder; start the trainer with --debug-root to allow others"
    )


def other_tokenizer(folder: Path, words: int, template: str = "{{ messages }}") -> Path:
    """Save a tokenizer of so many words with a chat template, without a model."""
    folder.mkdir()
    Tokenizer(WordLevel({f"v{token}": token for token in range(words)}, unk_token="v0")).save(
        str(folder / "tokenizer.json")
    )
    (folder / "chat_template.jinja").write_text(template)
    return folder


async def test_a_tokenizer_that_is_not_the_models_ends_the_run_in_one_sentence(stage: Stage) -> None:
    wrong = other_tokenizer(stage.folder / "wrong", VOCAB + 10)
    job = stage.job()
    stage.train()
    await stage.start(job.model_copy(update={"model": job.model.model_copy(update={"tokenizer": str(wrong)})}))
    await stage.follower.wait_for(lambda _: bool(stage.engine.failure), WAIT_S)
    assert stage.engine.phase == Phase.OFFLINE
    assert stage.engine.failure == (
        f"the tokenizer of {str(wrong)!r} does not fit the model {job.model.path!r}: its token 'v73' has the id 73, "
        "but the model's ids end at 63; set model.tokenizer to the model's own"
    )
    await stage.start(job)  # the same trainer goes on with a correct job
    await stage.until(Phase.ROLLING, version=0)


async def test_an_architecture_that_is_not_computed_and_a_context_that_is_too_short_end_the_run_at_boot(
    stage: Stage,
) -> None:
    mamba = stage.folder / "mamba"
    shutil.copytree(stage.folder / "model", mamba)
    shape = MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=8)
    MambaForCausalLM(shape).save_pretrained(mamba)
    job = stage.job()
    stage.train()
    await stage.start(job.model_copy(update={"model": job.model.model_copy(update={"path": str(mamba)})}))
    await stage.follower.wait_for(lambda _: bool(stage.engine.failure), WAIT_S)
    assert stage.engine.phase == Phase.OFFLINE
    assert stage.engine.failure.startswith("this model's architecture (mamba) cannot be trained here: ")

    longer = job.rollout.model_copy(update={"max_model_len": 1 << 20})
    await stage.start(job.model_copy(update={"rollout": longer}))
    await stage.follower.wait_for(lambda _: "max_model_len" in stage.engine.failure, WAIT_S)
    assert stage.engine.phase == Phase.OFFLINE
    assert "set rollout.max_model_len to at most" in stage.engine.failure


async def test_a_model_without_a_chat_template_ends_the_run_at_boot_unless_the_job_wants_none(stage: Stage) -> None:
    base = str(other_tokenizer(stage.folder / "base", VOCAB, template=""))
    job = stage.job()
    stage.train()
    await stage.start(job.model_copy(update={"model": job.model.model_copy(update={"tokenizer": base})}))
    await stage.follower.wait_for(lambda _: bool(stage.engine.failure), WAIT_S)
    assert stage.engine.phase == Phase.OFFLINE
    assert stage.engine.failure == (
        f"{job.model.path!r} has no chat template: set model.chat_template in the job to one, or to none for plain "
        "completions only"
    )
    plain = job.model.model_copy(update={"tokenizer": base, "chat_template": "none"})
    await stage.start(job.model_copy(update={"model": plain}))
    await stage.until(Phase.ROLLING, version=0)


async def test_gateways_get_the_jobs_own_tokenizer_if_it_fits(stage: Stage) -> None:
    fitting = other_tokenizer(stage.folder / "fitting", VOCAB)
    job = stage.job()
    stage.train()
    await stage.start(job.model_copy(update={"model": job.model.model_copy(update={"tokenizer": str(fitting)})}))
    await stage.until(Phase.ROLLING, version=0)
    assert stage.engine.weights is not None
    blob = await Blobs(stage.bus).get(stage.engine.weights.weights.tokenizer)
    files = msgspec.msgpack.decode(blob, type=dict[str, bytes])
    assert files["tokenizer.json"] == (fitting / "tokenizer.json").read_bytes()
    assert files["config.json"] == (stage.folder / "model" / "config.json").read_bytes()


async def test_a_backend_that_is_not_this_trainers_ends_the_run_and_says_how_to_get_it(stage: Stage) -> None:
    stage.train()
    await stage.start(stage.job(backend="verl", processes=2))
    await stage.follower.wait_for(lambda _: bool(stage.engine.failure), WAIT_S)
    assert stage.engine.phase == Phase.OFFLINE
    assert stage.engine.failure == (
        "trainer.backend is verl, but verl is not installed in this trainer's environment: run `bombus install verl`, "
        "and start the trainer with --backend verl"
    )


class Lost(Executor):
    """Acts as a model in training that a fault has ended."""

    def __init__(self, job: RunConfig, fault: Exception) -> None:
        super().__init__(Path(job.model.path), TrainerSettings.of_job(job))
        self._fault = fault

    def train_step(self, *_: object, **__: object) -> dict[str, float]:
        raise self._fault


@pytest.mark.parametrize("fault", [BackendLost("rank 1: no room"), torch.AcceleratorError("no room")])
async def test_r11_a_trainer_that_has_lost_a_rank_or_its_device_says_so_and_ends_and_another_makes_the_step(
    stage: Stage, fault: Exception
) -> None:
    def load(job: RunConfig) -> TrainerBackend:
        return Lost(job, fault)

    trainer = asyncio.create_task(Trainer(stage.bus, stage.options, load=load).run())
    await stage.start(stage.job())
    await stage.until(Phase.ROLLING, version=0)
    await stage.play_batch()
    with pytest.raises(ExceptionGroup) as ended:
        await trainer
    assert ended.group_contains(BackendLost, match="no room")
    await stage.follower.wait_for(lambda _: stage.engine.step_failures == 1, WAIT_S)
    stage.train()
    await stage.until(Phase.ROLLING, version=1)
