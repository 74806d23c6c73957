"""`bombus replay batch` and `train` on the log of a real trainer: the same bytes, or the reason why not."""

import argparse
import asyncio
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from bombus.bus import Bus
from bombus.config.documents import parse_job
from bombus.hive import inbox
from bombus.hive.state import Phase
from bombus.replay.archive import FileSource
from bombus.replay.episode.story import read_story
from bombus.replay.episode.tree import read_transcript
from bombus.replay.export import export
from bombus.replay.logged_run import read_run
from bombus.replay.source import BusSource
from bombus_trainer.data.samples import Sample
from bombus_trainer.replay import batch as replay_batch
from bombus_trainer.replay import train as replay_train
from bombus_trainer.replay.batch import batch_samples
from bombus_trainer.replay.train import changed
from tests.conftest import SMALL_STREAMS
from tests.trainer.sample_reading import load_samples
from tests.trainer.trainer_hive import ENGINE, staged

STEPS = 4  # only the checkpoints of the last two are kept


class Finished:
    """A run of four steps: its folder, its log as a file, and step 2's samples as read from the bus."""

    def __init__(self, folder: Path, hive: str, samples: list[Sample]) -> None:
        self.folder = folder
        self.log = folder / "log.bombus"
        self.engines = folder / "trainer"
        self.hive = hive
        self.samples = samples

    def run(self, command: str, *words: str) -> int:
        module = {"batch": replay_batch, "train": replay_train}[command]
        parser = argparse.ArgumentParser()
        module.add_arguments(parser)
        code: int = module.run(parser.parse_args(["--log", str(self.log), *words]))
        return code


async def train(url: str, hive: str, folder: Path, dtype: str, lora: bool = False) -> Finished:
    """Make a run. With `lora` only adapters are published."""
    async with await Bus.connect(url, hive, name="test") as bus:
        await bus.ensure_streams(SMALL_STREAMS)
        async with staged(bus, folder) as stage:
            stage.train(options=stage.options.model_copy(update={"weights_lora": "adapter"}) if lora else None)
            debug = "debug/{rollout_id}.pt"
            job = stage.job(
                save_debug_rollout_data=debug, mini_batch_num=2, max_tokens_per_bin=32, lora_rank=4 if lora else 0
            )
            await stage.start(job.model_copy(update={"model": job.model.model_copy(update={"dtype": dtype})}))
            for version in range(STEPS + 1):
                await stage.until(Phase.ROLLING, version)
                if version < STEPS:
                    await stage.play_batch(shift=version)
        source = BusSource(bus, "the bus")
        finished = Finished(folder, hive, await batch_samples(source, await read_run(source), 2))
        await export(source, finished.log)
        return finished


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def finished(nats_url: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Finished:
    folder = tmp_path_factory.mktemp(request.param)
    return asyncio.run(train(nats_url, f"replay-{request.param}", folder, request.param))


@pytest.fixture(scope="module")
def finished_lora(nats_url: str, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return asyncio.run(train(nats_url, "replay-lora", tmp_path_factory.mktemp("lora"), "bfloat16", lora=True))


@pytest.fixture(scope="module")
def resumed(nats_url: str, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Make two steps in one run, and two in the next, which goes on from there."""

    async def train_twice(folder: Path) -> Finished:
        async with await Bus.connect(nats_url, "replay-resumed", name="test") as bus:
            await bus.ensure_streams(SMALL_STREAMS)
            async with staged(bus, folder) as stage:
                stage.train()
                await stage.start(stage.job())
                for version in range(STEPS):
                    await stage.until(Phase.ROLLING, version)
                    await stage.play_batch(shift=version)
                    if version == 1:
                        await stage.until(Phase.ROLLING, 2)
                        await bus.inbox.request(inbox.Stop(id=stage.id(), engine=ENGINE))
                        await stage.restart()
                await stage.until(Phase.ROLLING, STEPS)
                assert stage.engine.run == 2
            finished = Finished(folder, "replay-resumed", [])
            await export(BusSource(bus, "the bus"), finished.log)
            return finished

    return asyncio.run(train_twice(tmp_path_factory.mktemp("resumed")))


def test_the_first_step_of_a_run_that_went_on_from_an_earlier_one_is_repeated_from_where_it_began(
    resumed: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    assert resumed.run("train", "--step", "3") == 0
    assert "starting from the checkpoint of step 2" in capsys.readouterr().out
    shutil.rmtree(resumed.engines / "checkpoints" / "replay-resumed" / ENGINE / "run-1")
    assert resumed.run("train", "--step", "3") == 1
    said = capsys.readouterr().err
    assert "run 2 began at the checkpoint of step 2 of run 1, but no checkpoint of it up to step 2 is left" in said
    assert resumed.run("train", "--step", "2") == 1
    assert "run 2 of engine main has no batch for step 2 in this log; it has 3 to 4" in capsys.readouterr().err


@contextmanager
def damaged(path: Path) -> Iterator[None]:
    """Flip one bit of a file."""
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    try:
        yield
    finally:
        path.write_bytes(whole)


def test_a_step_repeated_from_its_checkpoint_gives_the_same_bytes(
    finished: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    assert finished.run("train", "--step", "4") == 0
    said = capsys.readouterr().out
    assert "starting from the checkpoint of step 3" in said
    assert "step 4 matches: its weights are identical to version 4" in said


def test_a_repeated_run_that_published_adapters_gives_the_same_adapters(
    finished_lora: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    assert finished_lora.run("train", "--step", "2") == 0
    assert capsys.readouterr().out.count("the bytes match those in the log") == 2
    with damaged(finished_lora.folder / "model" / "model.safetensors"):
        assert finished_lora.run("train", "--step", "1") == 1
    assert "the model as loaded here differs from version 0" in capsys.readouterr().out


def test_where_no_checkpoint_is_kept_the_steps_before_are_repeated_too(
    finished: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    assert finished.run("train", "--step", "2") == 0
    said = capsys.readouterr().out
    assert "starting from the model as loaded: no checkpoint up to step 1 is kept" in said
    assert said.count("the bytes match those in the log") == 2


def test_a_damaged_checkpoint_is_reported_and_not_used(finished: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    (state,) = finished.engines.glob("checkpoints/*/main/run-1/step-00000003-*/state.safetensors")
    with damaged(state):
        assert finished.run("train", "--step", "4") == 0
    said = capsys.readouterr().out
    assert "is damaged: state.safetensors does not match its manifest: it is skipped" in said
    assert "starting from the model as loaded" in said


def test_a_different_model_is_reported_and_the_bytes_do_not_agree(
    finished: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    with damaged(finished.folder / "model" / "model.safetensors"):
        assert finished.run("train", "--step", "1") == 1
    said = capsys.readouterr().out
    assert "the model as loaded here differs from version 0" in said
    assert "step 1 does not match: in the log it has sha256 " in said
    assert "the machine that made the step is not known, as there is no checkpoint of it" in said


def test_a_different_number_of_threads_is_given_as_the_reason(
    finished: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    before = torch.get_num_threads()
    try:
        with damaged(finished.folder / "model" / "model.safetensors"):
            assert finished.run("train", "--step", "1", "--threads", str(before + 1)) == 1
        assert f"it was made with {before} threads, here with {before + 1}" in capsys.readouterr().out
    finally:
        torch.set_num_threads(before)


def test_the_machines_are_compared_while_the_checkpoint_names_the_first(
    finished: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    (state,) = finished.engines.glob("checkpoints/*/main/run-1/step-00000003-*/state.safetensors")
    before = torch.get_num_threads()
    try:
        with damaged(finished.folder / "model" / "model.safetensors"), damaged(state):
            assert finished.run("train", "--step", "4") == 1
            assert "the machine is the same (cpu: " in capsys.readouterr().out
            assert finished.run("train", "--step", "4", "--threads", str(before + 1)) == 1
            assert f"{before + 1} threads): reordered sums differ in their last bits" in capsys.readouterr().out
    finally:
        torch.set_num_threads(before)


def test_a_branch_without_changes_is_the_run_itself(finished: Finished, tmp_path: Path) -> None:
    assert finished.run("train", "--from", "3", "--to", "4", "--out", str(tmp_path / "b")) == 0
    report = json.loads((tmp_path / "b" / "metrics.json").read_text())
    (served,) = finished.engines.glob("weights/*/main/run-1/version-00000004-*/model.safetensors")
    assert (tmp_path / "b" / "model" / "model.safetensors").read_bytes() == served.read_bytes()
    assert [row["step"] for row in report["steps"]] == [3, 4]
    for row in report["steps"]:
        assert row["branch"]["loss"] == row["log"]["loss"]


def test_a_branch_with_another_learning_rate_has_other_weights_which_transformers_loads(
    finished: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "b"
    changes = ["--set", "lr=0.02", "--set", "trainer.clip_low=0.1"]
    assert finished.run("train", "--from", "2", "--to", "3", *changes, "--out", str(out)) == 0
    assert "on the way: step 1" in capsys.readouterr().out
    report = json.loads((out / "metrics.json").read_text())
    assert report["set"] == ["lr=0.02", "trainer.clip_low=0.1"]
    (first, _) = report["steps"]
    assert (first["branch"]["lr"], first["log"]["lr"]) == (0.02, 0.01)
    (served,) = finished.engines.glob("weights/*/main/run-1/version-00000003-*")
    ours, theirs = (AutoModelForCausalLM.from_pretrained(place).state_dict() for place in (out / "model", served))
    assert any(not torch.equal(value, theirs[name]) for name, value in ours.items())


def test_a_branch_with_another_loss_has_its_defaults() -> None:
    job = parse_job({"bombus": {"trainer": {"adv_estimator": "dr_grpo", "clip_high": 0.28, "lr": 0.5}}})
    branch = changed(job, ["loss=gspo"]).trainer
    assert (branch.clip_low, branch.clip_high, branch.lr) == (3e-4, 0.28, 0.5)
    assert (branch.adv_estimator, branch.loss_aggregation) == ("dr_grpo", "constant")
    assert changed(job, ["adv_estimator=grpo"]).trainer.loss_aggregation == "episode"
    assert changed(job, ["loss=importance_sampling"]).trainer.correction == "none"
    assert changed(job, []) == job


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--step", "9"], "has no batch for step 9 in this log; it has 1 to 4"),
        (["--step", "1", "--run", "7"], "has no run 7 of engine main, only 1"),
        (["--step", "1", "--engine", "other"], "has no engine other, only main"),
        (["--step", "1", "--set", "lr=1"], "belong to a branch"),
        (["--from", "1", "--to", "2"], "a branch needs --from A --to B --out DIR"),
        (
            ["--from", "1", "--to", "2", "--out", "OUT", "--set", "lrr=1"],
            "--set lrr is unknown; did you mean bombus.trainer.lr?",
        ),
        (["--from", "1", "--to", "2", "--out", "OUT", "--set", "lr=7"], "--set lr = 7 is refused: it must be a number"),
        (["--from", "1", "--to", "2", "--out", "OUT", "--set", "collection.batch_size=7"], "pass a trainer setting"),
        (["--from", "1", "--to", "2", "--out", "FULL"], "is not empty: name another --out"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_a_sentence(
    finished: Finished, words: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"OUT": str(tmp_path / "out"), "FULL": str(finished.folder)}
    assert finished.run("train", *(places.get(word, word) for word in words)) in (1, 2)
    assert why in capsys.readouterr().err


# ---- batches ----------------------------------------------------------------------------------------------------


async def test_a_batch_from_a_file_equals_that_from_the_bus_and_the_one_that_the_trainer_wrote(
    finished: Finished,
) -> None:
    with FileSource.open(finished.log) as source:
        found = await batch_samples(source, await read_run(source), 2)
    assert found == finished.samples
    assert [sample.label for sample in found] == ["answer 0", "answer 1"] * 2
    (path,) = finished.engines.glob("rollouts/*/main/run-1/debug/2.pt")
    without = [replace(each, label=None, metadata={"bombus": each.metadata["bombus"]}) for each in found]
    assert load_samples(path) == without  # a trainer reads batches, not what clients said of their episodes


async def test_the_differences_of_the_tokens_of_episodes_are_those_that_the_metrics_of_their_step_sum_up(
    finished: Finished,
) -> None:
    with FileSource.open(finished.log) as source:
        logged = await read_run(source)
        for step in range(1, STEPS + 1):
            members = [member.episode for group in logged.step(step).batch.groups for member in group.episodes]
            read = [await read_transcript(source, await read_story(source, name)) for name in members]
            tokens = [token for each in read for turn in each.turns for reply in turn.replies for token in reply.tokens]
            found = [abs(token.difference) for token in tokens if token.difference is not None]
            assert len(found) == sum(token.trained for token in tokens) == 20
            done = logged.step(step).done
            assert done is not None
            assert sum(found) / len(found) == pytest.approx(done.metrics["kl_sampler_abs"], rel=2e-3)
            assert max(found) == pytest.approx(done.metrics["kl_sampler_abs_max"], rel=2e-3)


def test_batch_writes_a_file_and_says_what_is_in_it(
    finished: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "batch.pt"
    assert finished.run("batch", "2", "--out", str(out)) == 0
    assert load_samples(out) == finished.samples
    assert "4 samples of 4 episodes, 20 trained tokens, mean reward 0.500" in capsys.readouterr().out
    assert finished.run("batch", "2", "--out", str(tmp_path / "batch.csv")) == 2
    assert "must be a file ending in .pt or .parquet" in capsys.readouterr().err
    assert finished.engines.is_dir()
    assert finished.samples[0].metadata["bombus"]["engine"] == ENGINE
