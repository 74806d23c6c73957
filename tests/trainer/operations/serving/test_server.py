"""A run of operations on the real bus: what clients see of their models, and what they do not see of each other."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from bombus.bus import Bus, snapshots
from bombus.bus.headers import MSG_ID
from bombus.bus.snapshots import Snapshot
from bombus.config.job import RunConfig
from bombus.hive import inbox
from bombus.hive.events import EngineStopped, ModelEnd, OperationCompleted
from bombus.hive.state import FOLD, Phase
from bombus.operations import (
    Category,
    CheckpointKind,
    CheckpointLoaded,
    CheckpointSaved,
    EndModel,
    Failed,
    LoadWeights,
    ModelEnded,
    ModelReady,
    Operation,
    Rejected,
    Result,
    Scores,
    StepTaken,
    encode_operation,
)
from bombus.weights.checkpoints import MANIFEST
from bombus_trainer.backend import BackendLost
from bombus_trainer.operations.checkpoints import ModelCheckpoint
from bombus_trainer.operations.executor import OperationExecutor
from bombus_trainer.operations.settings import ExecutorSettings
from bombus_trainer.service import Trainer
from bombus_trainer.settings import TrainerSettings
from tests.effort import long_only
from tests.trainer.operations.serving.serving_hive import (
    BASE,
    LARGE,
    SMALL,
    TrainingClient,
    create,
    merged,
    sampler,
    serving,
    steps,
    stopped,
    training,
)
from tests.trainer.operations.small_models import datum, forward_backward, optim_step, random_data
from tests.trainer.trainer_hive import ENGINE, served


@pytest.fixture
async def client(bus: Bus, tmp_path: Path) -> AsyncIterator[TrainingClient]:
    async with serving(bus, tmp_path) as client:
        yield client


def address(result: Result) -> str:
    """Return the hash of the weights that were saved."""
    assert isinstance(result, CheckpointSaved), result
    return result.address


async def weights(client: TrainingClient, model: str, name: str = "now") -> str:
    return address(await client.do(model, sampler(name)))


async def test_the_loss_of_a_repeated_batch_falls_and_the_log_shows_the_model(client: TrainingClient) -> None:
    client.stage.train()
    ready = await client.do("m", create())
    assert isinstance(ready, ModelReady)
    assert client.stage.engine.phase == Phase.ROLLING
    losses = []
    for _ in range(4):
        scores = await client.do("m", forward_backward(datum([1, 2, 3, 4]), datum([5, 6, 7])))
        assert isinstance(scores, Scores)
        losses.append(scores.loss)
        taken = await client.do("m", optim_step(learning_rate=5e-2))
        assert isinstance(taken, StepTaken)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 1.0
    model = client.model("m")
    assert (model.step, model.executed, model.waiting, model.base) == (4, 9, 0, BASE)
    assert model.adapter is not None
    assert (model.adapter.rank, model.parameters) == (4, ready.parameters)
    (first, *_) = [each for each in client.stage.events if isinstance(each, OperationCompleted) and each.number == 2]
    assert first.metrics["loss"] == losses[0]
    assert first.metrics["tokens"] == 7.0


async def test_the_base_is_published_once_for_replicas_and_training_changes_nothing_of_it(
    client: TrainingClient,
) -> None:
    trainer = client.stage.train()
    await client.do("m", create())
    ready = client.stage.engine.weights
    assert ready is not None
    assert (ready.version, client.stage.engine.phase) == (0, Phase.ROLLING)
    assert {"config.json", "tokenizer.json"} <= {file.name for file in Path(ready.weights.where).iterdir()}
    given = load_file(client.stage.folder / "model" / "model.safetensors")
    found = served(ready.weights)
    assert all(torch.equal(found[name], value) for name, value in given.items())
    for operation in steps(1, 2):
        await client.do("m", operation)
    await stopped(trainer)
    client.stage.train()
    await client.do("m", optim_step())
    assert client.stage.engine.weights == ready
    assert served(ready.weights).keys() == found.keys()


async def test_models_of_different_rank_that_take_turns_are_what_each_is_alone(client: TrainingClient) -> None:
    client.stage.train()
    first: list[Operation] = [create(SMALL), *steps(100, 3), sampler("end")]
    second: list[Operation] = [create(LARGE), *steps(200, 2), sampler("end")]
    for number, operation in merged(first, second):
        await client.send("ab"[number], operation)
    together = {model: address((await client.results(model))[-1]) for model in "ab"}
    executed = [each.model for each in client.stage.events if isinstance(each, OperationCompleted)]
    assert executed[2:14] == ["a", "b"] * 6, "models with something waiting take turns"
    for model, operations in (("c", first), ("d", second)):
        for operation in operations:
            await client.send(model, operation)
    assert address((await client.results("c"))[-1]) == together["a"]
    assert address((await client.results("d"))[-1]) == together["b"]


async def test_a_model_that_has_much_to_do_does_not_hold_up_another(client: TrainingClient) -> None:
    trainer = client.stage.train()
    await client.do("busy", create())
    await client.do("quick", create(LARGE))
    await stopped(trainer)
    for operation in steps(1, 3):
        await client.send("busy", operation)
    await client.send("quick", forward_backward(*random_data(1, 2)))
    client.stage.train()
    await client.results("quick")
    await client.results("busy")
    executed = [each.model for each in client.stage.events if isinstance(each, OperationCompleted)]
    assert executed[2:] == ["busy", "quick", *["busy"] * 8]


async def test_the_same_operation_sent_twice_is_executed_once(client: TrainingClient) -> None:
    client.stage.train()
    for model, times in (("once", 1), ("twice", 2)):
        for number, operation in enumerate([create(), *steps(1, 2), sampler("end")]):
            for _ in range(times):
                await client.send(model, operation, key=str(number))
    once, twice = [await client.results(model) for model in ("once", "twice")]
    assert twice[:-1] == once[:-1]
    assert address(twice[-1]) == address(once[-1])
    assert client.model("twice").executed == 8


async def test_a_failed_gradient_is_not_stepped_with_and_what_comes_after_it_is_untouched(
    client: TrainingClient,
) -> None:
    client.stage.train()
    for operation in (
        create(),
        forward_backward(*random_data(1, 3)),
        forward_backward(datum([1, 99])),
        optim_step(),
        forward_backward(*random_data(2, 3)),
        optim_step(),
    ):
        await client.send("m", operation)
    _, _, refused, spoiled, _, step = await client.results("m")
    assert isinstance(refused, Failed)
    assert "datum 0 has the token id 99" in refused.error
    assert isinstance(spoiled, Failed)
    assert "no step was taken: a forward_backward since step 0 failed (datum 0 has" in spoiled.error
    assert isinstance(step, StepTaken)
    assert (step.step, client.stage.engine.clients.failed) == (1, 2)


async def test_what_cannot_be_read_or_was_rejected_fails_in_words_and_the_run_goes_on(client: TrainingClient) -> None:
    client.stage.train()
    await client.do("m", create())
    unreadable = await client.result("m", await client.send_body("m", "forward_backward", b"\xc1 nonsense"))
    assert isinstance(unreadable, Failed)
    assert unreadable.category is Category.SERVER
    assert "this operation cannot be read" in unreadable.error
    assert "gateway and trainer must run the same version" in unreadable.error
    assert isinstance(await client.do("m", optim_step()), Failed), "it may have been part of the gradient"
    failure = Failed(error="data is not a list: send a list", category=Category.USER)
    assert await client.do("m", Rejected(failure=failure, counts=True)) == failure
    assert isinstance(await client.do("m", optim_step()), Failed)
    disguised = encode_operation(optim_step())
    forward = forward_backward(*random_data(1, 1), forward_only=True)
    announced = await client.result("m", await client.send_body("m", "forward", disguised, forward))
    assert isinstance(announced, Failed)
    assert "announced as one that leaves the model as it is" in announced.error
    taken = await client.do("m", optim_step())
    assert isinstance(taken, StepTaken)
    assert taken.step == 1


async def test_a_model_that_cannot_be_created_is_closed_and_its_name_can_be_used_again(client: TrainingClient) -> None:
    client.stage.train()
    refused = await client.do("m", create(SMALL.__class__(rank=100_000, alpha=1.0)))
    assert isinstance(refused, Failed)
    closed = client.model("m").closed
    assert closed is not None
    assert closed.reason == ModelEnd.NOT_CREATED
    assert isinstance(await client.do("m", create()), ModelReady)
    assert isinstance(await client.do("m", forward_backward(*random_data(1, 2))), Scores)


async def test_what_was_saved_by_name_is_loaded_and_continued_bit_for_bit(client: TrainingClient) -> None:
    client.stage.train()
    await client.do("a", create())
    for operation in (*steps(1, 2), training("half")):
        await client.send("a", operation)
    await client.results("a")
    for operation in (*steps(50, 2), sampler("end")):
        await client.send("a", operation)
    whole = address((await client.results("a"))[-1])

    await client.do("b", create(checkpoint="a/training/half", with_optimizer=True))
    await client.do("c", create())
    loaded = await client.do("c", LoadWeights(checkpoint="a/training/half", with_optimizer=True))
    assert isinstance(loaded, CheckpointLoaded)
    assert (loaded.checkpoint, loaded.step) == ("a/training/half", 2)
    assert loaded.loaded == client.queued("c", "1").loaded == client.queued("b", "0").loaded != ""
    for model in "bc":
        for operation in (*steps(50, 2), sampler("end")):
            await client.send(model, operation)
        assert address((await client.results(model))[-1]) == whole

    kept = client.stage.engine.clients.kept["a/training/half"].noted.saved
    root = client.stage.options.folder / "saved" / client.stage.bus.subjects.hive / ENGINE
    assert Path(kept.folder) == root / "a" / "training" / "half", "apart from the run, which it outlives"
    outside = await client.do("a", training("../../elsewhere"))
    assert isinstance(outside, Failed)
    assert "cannot be the name of a checkpoint" in outside.error


@pytest.mark.parametrize("checkpoint_s", [0.0, 600.0])
async def test_a_model_of_all_weights_goes_on_after_a_crash_and_begins_again_from_its_base(
    bus: Bus, tmp_path: Path, checkpoint_s: float
) -> None:
    async with serving(bus, tmp_path, checkpoint_s=checkpoint_s) as client:
        trainer = client.stage.train()
        await client.do("m", create(None))
        fresh = await weights(client, "m", "fresh")
        refused = await client.do("n", create())
        assert isinstance(refused, Failed)
        assert "there can be no other" in refused.error
        for operation in steps(1, 2):
            await client.send("m", operation)
        await client.results("m")
        trained = await weights(client, "m", "trained")
        await stopped(trainer)
        trainer = client.stage.train()
        assert await weights(client, "m", "again") == trained != fresh
        ended = await client.do("m", EndModel(save_as="last", reset_weights=True))
        assert isinstance(ended, ModelEnded)
        assert client.model("m").closed is None
        await stopped(trainer)
        client.stage.train()
        assert await weights(client, "m", "reset") == fresh
        loaded = await client.do("m", LoadWeights(checkpoint="m/training/last-11", with_optimizer=True))
        assert isinstance(loaded, CheckpointLoaded)
        assert loaded.step == 2
        assert await weights(client, "m", "loaded") == trained


async def test_a_model_that_begins_again_twice_is_saved_both_times(client: TrainingClient) -> None:
    client.stage.train()
    await client.do("m", create(None))
    for _ in range(2):  # the operations 2 and 3
        assert isinstance(await client.do("m", EndModel(save_as="last", reset_weights=True)), ModelEnded)
    assert list(client.stage.engine.clients.kept) == ["m/training/last-2", "m/training/last-3"]


async def test_a_checkpoint_that_is_removed_goes_from_the_disk_and_its_name_is_free(client: TrainingClient) -> None:
    client.stage.train()
    await client.do("m", create())
    first = await client.do("m", training("x"))
    assert isinstance(first, CheckpointSaved)
    assert isinstance(await client.do("m", training("x")), Failed), "the name is taken"
    remove = inbox.RemoveWeights(id=client.stage.id(), engine=ENGINE, model="m", use="training", name="x")
    await client.stage.bus.inbox.request(remove)
    second = await client.do("m", training("x"))
    assert isinstance(second, CheckpointSaved)
    assert Path(second.folder, MANIFEST).exists()
    await client.stage.bus.inbox.request(msgspec.structs.replace(remove, id=client.stage.id()))
    missing = await client.do("m", LoadWeights(checkpoint="m/training/x"))
    assert isinstance(missing, Failed)
    assert "there is no checkpoint m/training/x" in missing.error
    assert not Path(second.folder).exists()


@long_only
async def test_a_checkpoint_that_is_removed_while_no_trainer_is_there_goes_when_the_next_one_begins_at_a_snapshot(
    client: TrainingClient, bus: Bus
) -> None:
    trainer = client.stage.train()
    await client.do("m", create())
    first = await client.do("m", training("x"))
    assert isinstance(first, CheckpointSaved)
    await stopped(trainer)
    remove = inbox.RemoveWeights(id=client.stage.id(), engine=ENGINE, model="m", use="training", name="x")
    answer = await bus.inbox.request(remove)
    await client.stage.follower.wait_position(answer.position)
    last = await bus.last(bus.subjects.events_stream)
    assert last is not None
    hive = client.stage.follower.hive
    snapshot = Snapshot(fold=FOLD, position=last.seq, event_id=last.headers[MSG_ID], answered=0, hive=hive)
    await snapshots.store(bus, snapshots.encode(snapshot), last.seq)
    client.stage.train()
    await client.do("m", forward_backward(*random_data(5, 2)))
    assert not Path(first.folder).exists()
    assert isinstance(await client.do("m", training("x")), CheckpointSaved), "its name is free"


async def test_a_model_is_ended_by_its_client_and_saved_when_its_session_ends(client: TrainingClient) -> None:
    client.stage.train()
    for model in ("done", "left"):
        await client.do(model, create())
    ended = await client.do("done", EndModel(save_as="last"))
    assert isinstance(ended, ModelEnded)
    await client.until_ended("done")
    await client.stage.bus.inbox.request(
        inbox.CloseSession(id=client.stage.id(), engine=ENGINE, session=client.session)
    )
    await client.until_ended("left")
    closed = client.model("left").closed
    assert closed is not None
    assert closed.reason == ModelEnd.ENDED
    kept = client.stage.engine.clients.kept
    assert {name: each.noted.saved.use for name, each in kept.items()} == {
        "done/training/last": CheckpointKind.TRAINING,
        "left/training/ended-2": CheckpointKind.TRAINING,
    }
    assert all(Path(each.noted.saved.folder, MANIFEST).exists() for each in kept.values())


async def test_only_the_newest_recovery_checkpoint_is_kept_and_it_has_the_gradient_of_the_step_to_come(
    bus: Bus, tmp_path: Path
) -> None:
    async with serving(bus, tmp_path, checkpoint_s=0.0) as client:
        client.stage.train()
        await client.do("m", create())
        await client.until_checkpointed("m", 1)
        await client.do("m", forward_backward(*random_data(1, 2)))
        await client.do("m", optim_step())
        await client.until_checkpointed("m", 3)
        checkpoint = client.model("m").checkpoint
        assert checkpoint is not None
        await client.do("m", sampler("after"))
        await client.until_checkpointed("m", 4)
        places = client.stage.options.folder.glob("covers/*/main/run-1/m/training/*")
        newest = client.model("m").checkpoint
        assert newest is not None
        await client.do("m", forward_backward(*random_data(1, 2), forward_only=True))
        assert [str(path) for path in places] == [newest.folder]
        await client.do("m", forward_backward(*random_data(1, 2)))
        await client.until_checkpointed("m", 6)
        assert client.model("m").held_bytes == 0


async def test_a_trainer_that_begins_again_goes_on_where_the_log_is(bus: Bus, tmp_path: Path) -> None:
    """With a recovery checkpoint, with a gradient since, and with one that failed: nothing that was executed is
    published again."""
    operations: list[Operation] = [create(), *steps(1, 2), forward_backward(*random_data(9, 3))]
    failing = [forward_backward(datum([99])), optim_step(), *steps(70, 1), forward_backward(*random_data(8, 3))]
    rest: list[Operation] = [optim_step(), *steps(30, 1), sampler("end")]
    async with serving(bus, tmp_path, checkpoint_bytes=1500) as client:
        trainer = client.stage.train()
        for operation in (*operations, *failing, *rest):
            await client.send("whole", operation)
        wanted = await client.results("whole")
        for part in (operations, failing, rest):
            for operation in part:
                await client.send("cut", operation)
            before = await client.results("cut")
            await stopped(trainer)
            trainer = client.stage.train()
        found = await client.results("cut")
        assert found[: len(before)] == before
        assert found[:-1] == wanted[:-1]
        assert address(found[-1]) == address(wanted[-1])
        numbers = [each.number for each in client.stage.events if isinstance(each, OperationCompleted)]
        assert len(numbers) == 2 * len(found)


async def test_a_checkpoint_that_was_loaded_may_be_replaced_before_the_trainer_begins_again(
    client: TrainingClient,
) -> None:
    trainer = client.stage.train()
    for operation in (create(), *steps(1, 1), training("x"), *steps(2, 1), LoadWeights(checkpoint="m/training/x")):
        await client.send("m", operation)
    await client.results("m")
    loaded = await weights(client, "m", "loaded")
    await client.do("other", create())
    for operation in steps(3, 1):
        await client.do("other", operation)
    replaced = client.stage.options.folder / "saved" / client.stage.bus.subjects.hive / ENGINE / "m/training/x"
    await client.until_checkpointed("m", 9)
    replaced.rename(replaced.with_name("gone"))
    await stopped(trainer)
    client.stage.train()
    assert await weights(client, "m", "again") == loaded


async def test_a_stopped_run_ends_its_models_and_the_next_one_begins_without_them(client: TrainingClient) -> None:
    client.stage.train()
    await client.do("m", create())
    await client.stage.bus.inbox.request(inbox.Stop(id=client.stage.id(), engine=ENGINE))
    await client.until_ended("m")
    assert any(isinstance(each, EngineStopped) for each in client.stage.events)
    assert isinstance(await client.do("n", create()), ModelReady)
    assert (client.stage.engine.run, client.stage.engine.phase) == (2, Phase.ROLLING)
    assert isinstance(await client.do("m", create()), ModelReady), "the name is free again"


@long_only
async def test_a_recovery_checkpoint_that_is_away_suspends_the_run_until_it_is_back(bus: Bus, tmp_path: Path) -> None:
    async with serving(bus, tmp_path, checkpoint_s=0.0) as client:
        stage = client.stage
        trainer = stage.train()
        for operation in (create(), *steps(1, 1)):
            await client.do("m", operation)
        await client.until_checkpointed("m", 4)
        before = await weights(client, "m")
        await client.until_checkpointed("m", 5)
        await stopped(trainer)
        recovery = stage.options.folder / "covers"
        recovery.rename(away := stage.folder / "unmounted")
        stage.train()
        await stage.follower.wait_for(lambda _: bool(stage.engine.suspended), 30.0)
        assert "model m cannot continue from its recovery checkpoint at" in stage.engine.suspended
        for left in sorted(recovery.rglob("*"), reverse=True):
            left.rmdir()
        recovery.rmdir()
        away.rename(recovery)
        answer = await stage.bus.inbox.request(inbox.Resume(id=stage.id(), engine=ENGINE))
        await stage.follower.wait_position(answer.position)
        assert await weights(client, "m", "again") == before


async def two_checkpointed(client: TrainingClient) -> asyncio.Task[None]:
    """Let two models be trained and checkpointed, and return their trainer."""
    trainer = client.stage.train()
    for model, adapter in (("a", SMALL), ("b", LARGE)):
        for operation in (create(adapter), *steps(1, 1)):
            await client.do(model, operation)
        await client.until_checkpointed(model, 4)
    return trainer


def checkpoint_of(client: TrainingClient, model: str) -> Path:
    checkpoint = client.model(model).checkpoint
    assert checkpoint is not None
    return Path(checkpoint.folder)


async def test_a_recovery_checkpoint_that_is_damaged_holds_up_its_model_alone_until_it_is_mended(
    bus: Bus, tmp_path: Path
) -> None:
    async with serving(bus, tmp_path, checkpoint_s=0.0, retry_s_max=0.2) as client:
        stage = client.stage
        await stopped(await two_checkpointed(client))
        facts = checkpoint_of(client, "a") / MANIFEST
        whole = facts.read_bytes()
        facts.write_bytes(whole[:-1])
        waiting = await client.send("a", sampler("now"))
        stage.train()
        await weights(client, "b")
        await stage.follower.wait_for(lambda _: bool(client.model("a").suspended), 30.0)
        assert "is not the one named in the log" in client.model("a").suspended
        assert client.queued("a", waiting).waits
        assert stage.engine.suspensions == 0
        facts.write_bytes(whole)
        address(await client.result("a", waiting))
        assert client.model("a").suspended == ""


async def test_a_model_is_tried_again_while_another_always_has_something_to_do(bus: Bus, tmp_path: Path) -> None:
    async with serving(bus, tmp_path, checkpoint_s=0.0, retry_s_max=0.2) as client:
        stage = client.stage
        await stopped(await two_checkpointed(client))
        facts = checkpoint_of(client, "a") / MANIFEST
        whole = facts.read_bytes()
        facts.write_bytes(whole[:-1])
        waiting = await client.send("a", sampler("now"))
        batch = forward_backward(*random_data(1, 2), forward_only=True)
        others = [await client.send("b", batch) for _ in range(250)]
        stage.train()
        await stage.follower.wait_for(lambda _: bool(client.model("a").suspended), 30.0)
        facts.write_bytes(whole)
        address(await client.result("a", waiting))
        assert client.queued("b", others[-1]).waits


@long_only
async def test_while_a_model_cannot_be_made_again_only_what_it_may_need_stays_on_the_disk(
    bus: Bus, tmp_path: Path
) -> None:
    async with serving(bus, tmp_path, checkpoint_s=0.0, retry_s_max=0.2) as client:
        stage = client.stage
        trainer = await two_checkpointed(client)
        folders: dict[str, Path] = {}
        for model, save in (("a", training("own")), ("b", training("named")), ("b", sampler("other"))):
            result = await client.do(model, save)
            assert isinstance(result, CheckpointSaved)
            folders[f"{model}/{save.checkpoint}/{save.name}"] = Path(result.folder)
        await client.do("a", forward_backward(*random_data(2, 2)))
        await client.until_checkpointed("a", 6)
        await stopped(trainer)
        await client.send("a", LoadWeights(checkpoint="b/training/named"))
        facts = checkpoint_of(client, "a") / MANIFEST
        whole = facts.read_bytes()
        facts.write_bytes(whole[:-1])
        last = await client.send("b", optim_step())
        stage.train()
        await client.result("b", last)
        await stage.follower.wait_for(lambda _: bool(client.model("a").suspended), 30.0)
        for name in folders:
            model, use, saved = name.split("/")
            remove = inbox.RemoveWeights(id=stage.id(), engine=ENGINE, model=model, use=use, name=saved)
            await bus.inbox.request(remove)
        free = await client.do("b", sampler("other"))
        assert isinstance(free, CheckpointSaved), "its name is free"
        assert folders["a/training/own"].exists()
        assert folders["b/training/named"].exists()
        await client.do("a", EndModel())
        await client.do("b", optim_step())
        assert not folders["a/training/own"].exists()
        assert not folders["b/training/named"].exists()


@long_only
async def test_what_its_owner_removes_while_a_suspended_model_waits_to_load_it_is_not_loaded(
    bus: Bus, tmp_path: Path
) -> None:
    async with serving(bus, tmp_path, checkpoint_s=0.0, retry_s_max=0.2) as client:
        stage = client.stage
        trainer = await two_checkpointed(client)
        kept = await client.do("b", training("named"))
        assert isinstance(kept, CheckpointSaved)
        await stopped(trainer)
        load = await client.send("a", LoadWeights(checkpoint="b/training/named"), reads="b/training/named")
        facts = checkpoint_of(client, "a") / MANIFEST
        whole = facts.read_bytes()
        facts.write_bytes(whole[:-1])
        stage.train()
        await stage.follower.wait_for(lambda _: bool(client.model("a").suspended), 30.0)
        remove = inbox.RemoveWeights(id=stage.id(), engine=ENGINE, model="b", use="training", name="named")
        await bus.inbox.request(remove)
        await client.do("b", optim_step())
        facts.write_bytes(whole)
        failed = await client.result("a", load)
        assert isinstance(failed, Failed)
        assert failed.category is Category.USER
        assert "b/training/named was removed while this operation waited for its model" in failed.error
        assert isinstance(await client.do("a", forward_backward(*random_data(2, 2))), Scores), "and the model goes on"
        assert not Path(kept.folder).exists()


async def test_a_model_whose_recovery_checkpoint_is_lost_is_ended_by_its_client_but_cannot_be_saved(
    bus: Bus, tmp_path: Path
) -> None:
    async with serving(bus, tmp_path, checkpoint_s=0.0) as client:
        await stopped(await two_checkpointed(client))
        shutil.rmtree(checkpoint_of(client, "a"))
        waiting = await client.send("a", optim_step())
        client.stage.train()
        unsaved = await client.do("a", EndModel(save_as="x"))
        assert isinstance(unsaved, Failed)
        assert "cannot be saved, because it cannot be rebuilt now" in unsaved.error
        assert isinstance(await client.do("a", EndModel()), ModelEnded)
        assert "has ended" in client.queued("a", waiting).error
        await weights(client, "b")
        assert isinstance(await client.do("a", create(LARGE)), ModelReady), "its name is free"
        await weights(client, "a", "again")


@long_only
async def test_a_model_whose_recovery_checkpoint_is_lost_goes_on_from_a_checkpoint_of_its_client(
    bus: Bus, tmp_path: Path
) -> None:
    async with serving(bus, tmp_path, checkpoint_s=600.0, checkpoint_bytes=1 << 30) as client:
        stage = client.stage
        trainer = stage.train()
        for operation in (create(), *steps(1, 1)):
            await client.do("m", operation)
        await client.do("m", training("early"))
        stage.options = stage.options.model_copy(update={"checkpoint_s": 0.0})
        await stopped(trainer)
        trainer = stage.train()
        await client.do("m", forward_backward(*random_data(7, 2)))
        await client.do("m", optim_step())
        await client.until_checkpointed("m", 7)
        await stopped(trainer)
        stage.options = stage.options.model_copy(update={"checkpoint_s": 600.0})
        trainer = stage.train()
        for operation in (training("late"), *steps(2, 1), training("half"), forward_backward(*random_data(8, 2))):
            await client.do("m", operation)
        await client.do("m", training("with-a-gradient"))
        before = await weights(client, "m")
        await stopped(trainer)
        shutil.rmtree(checkpoint_of(client, "m"))
        stage.train()
        assert await weights(client, "m", "again") == before
        await client.do("m", optim_step())
        calm = [create(), *steps(1, 1), forward_backward(*random_data(7, 2)), optim_step(), *steps(2, 1)]
        for operation in (*calm, forward_backward(*random_data(8, 2)), optim_step()):
            await client.do("calm", operation)
        assert await weights(client, "m", "end") == await weights(client, "calm", "end")
        assert stage.engine.suspensions == 0


@long_only
@pytest.mark.parametrize("checkpoint_s", [0.0, 600.0])
async def test_what_was_saved_before_a_model_began_again_is_not_taken_for_what_came_after(
    bus: Bus, tmp_path: Path, checkpoint_s: float
) -> None:
    async with serving(bus, tmp_path, checkpoint_s=0.0) as client:
        stage = client.stage
        trainer = stage.train()
        await client.do("m", create(None))
        fresh = await weights(client, "m", "fresh")
        for operation in steps(1, 1):
            await client.do("m", operation)
        await client.until_checkpointed("m", 5)
        await stopped(trainer)
        stage.options = stage.options.model_copy(update={"checkpoint_s": checkpoint_s})
        trainer = stage.train()
        assert isinstance(await client.do("m", EndModel(save_as="last", reset_weights=True)), ModelEnded)
        checkpointed = 5 if checkpoint_s else 6
        await client.until_checkpointed("m", checkpointed)
        await stopped(trainer)
        assert client.model("m").checkpointed == checkpointed
        (checkpoint_of(client, "m") / MANIFEST).write_text("damaged")
        stage.train()
        if checkpoint_s:  # operation 6 is executed again on what it has saved
            assert await weights(client, "m", "again") == fresh
            assert not client.model("m").suspended
        else:
            await stage.follower.wait_for(lambda _: bool(client.model("m").suspended), 30.0)


@long_only
async def test_a_model_whose_loaded_checkpoint_was_replaced_before_a_recovery_checkpoint_waits_and_has_no_other_weights(
    bus: Bus, tmp_path: Path
) -> None:
    """Its recovery checkpoints cannot be written, because a file is in the way of their folder."""
    async with serving(bus, tmp_path, checkpoint_s=0.0, retry_s_max=0.2) as client:
        stage = client.stage
        trainer = stage.train()
        for operation in (create(), *steps(1, 1), training("x")):
            await client.do("b", operation)
        stage.options = stage.options.model_copy(update={"retry_s_max": 3600.0})
        await stopped(trainer)
        trainer = stage.train()
        await client.do("b", optim_step())
        in_the_way = stage.options.folder / "covers" / bus.subjects.hive / ENGINE / "run-1" / "a"
        in_the_way.write_text("no folder")
        await client.do("a", create(checkpoint="b/training/x", with_optimizer=True))
        await client.do("a", LoadWeights(checkpoint="b/training/x", with_optimizer=True))
        loaded = await weights(client, "a")
        for operation in steps(2, 1):
            await client.do("b", operation)
        saved = Path(stage.engine.clients.kept["b/training/x"].noted.saved.folder)
        old = saved.rename(saved.with_name("old"))
        assert isinstance(await client.do("b", training("x")), CheckpointSaved)
        await stopped(trainer)
        stage.options = stage.options.model_copy(update={"retry_s_max": 0.2})
        stage.train()
        await stage.follower.wait_for(lambda _: bool(client.model("a").suspended), 30.0)
        assert "b/training/x is no longer the one that operation 0 of model a loaded" in client.model("a").suspended
        shutil.rmtree(saved)
        old.rename(saved)
        in_the_way.unlink()
        assert await weights(client, "a", "again") == loaded


async def test_an_engine_without_a_configuration_says_what_it_lacks(bus: Bus, tmp_path: Path) -> None:
    async with serving(bus, tmp_path, configured=False) as client:
        client.stage.train()
        await client.send("m", create())
        await client.until_ended("m")
        assert "configure it with a job whose model.path names one" in client.stage.engine.failure


async def test_two_trainers_do_not_execute_anything_twice(client: TrainingClient) -> None:
    client.stage.train("one")
    await client.do("m", create())
    client.stage.train("two")
    for operation in (*steps(1, 2), sampler("end")):
        await client.send("m", operation)
    found = await client.results("m")
    await client.do("n", create())
    for operation in (*steps(1, 2), sampler("end")):
        await client.send("n", operation)
    assert address((await client.results("n"))[-1]) == address(found[-1])


class FailingDevice(OperationExecutor):
    """Its device fails when a recovery checkpoint is written."""

    def save_for_recovery(self, model: str, name: str) -> ModelCheckpoint:
        raise torch.AcceleratorError("illegal memory access")


async def test_a_device_that_fails_outside_an_operation_ends_the_process_and_suspends_nothing(
    bus: Bus, tmp_path: Path
) -> None:
    async with serving(bus, tmp_path, checkpoint_bytes=1) as client:
        stage = client.stage

        def load_base(job: RunConfig, settings: ExecutorSettings) -> OperationExecutor:
            return FailingDevice(Path(job.model.path), TrainerSettings.of_job(job, "cpu", 1024), settings)

        trainer = asyncio.create_task(Trainer(bus, stage.options, load_base=load_base).run())
        await client.send("m", create())
        with pytest.raises(ExceptionGroup) as ended:
            await trainer
        assert ended.group_contains(BackendLost, match="the device failed: illegal memory access")
        assert stage.engine.suspensions == 0
        stage.train()
        assert isinstance(await client.do("m", forward_backward(datum([1, 2, 3]))), Scores)
