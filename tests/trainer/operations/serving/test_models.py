"""Models in memory are what the log says, also after faults of the trainer itself."""

from pathlib import Path

import pytest
import torch

from bombus.errors import EngineFault, LogCorrupted
from bombus.hive.events import ModelCheckpointed
from bombus.hive.operations.state import ClientModel, Queued
from bombus.hive.records import BODY_BYTES_MAX, BodyRef, digest
from bombus.operations import (
    Array,
    Category,
    CheckpointKind,
    CheckpointSaved,
    CreateModel,
    DType,
    EndModel,
    Failed,
    LoadWeights,
    LossSpec,
    Operation,
    Rejected,
    Result,
    SaveWeights,
    Scores,
    StepTaken,
    decode_result,
    encode_operation,
    encode_result,
)
from bombus_trainer.backend import BackendLost
from bombus_trainer.operations.executor import OperationExecutor
from bombus_trainer.operations.serving.models import ServedModels
from bombus_trainer.operations.serving.outcomes import encoded
from bombus_trainer.operations.serving.rebuilding import NoneSurvived, Rebuild
from bombus_trainer.operations.serving.recovery_checkpoints import RecoveryCheckpoints
from bombus_trainer.operations.settings import ExecutorSettings
from tests.trainer.operations.serving.serving_hive import sampler, training
from tests.trainer.operations.small_models import BASE, SPEC, forward_backward, optim_step, random_data
from tests.trainer.small_batches import tiny_settings

GRADIENT = forward_backward(*random_data(1, 3))


class FaultyExecutor(OperationExecutor):
    """Raises `fault` after it has executed an operation, once."""

    fault: Exception | None = None

    def execute(self, model: str, operation: Operation, name: str = "") -> Result:
        result = super().execute(model, operation, name)
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault
        return result


def calm(model: ClientModel) -> Rebuild:
    return Rebuild(model, 1, 3, None)


class OneModel:
    """A model on a log of its own: what is executed gets a result, in order."""

    def __init__(self, base: Path, root: Path) -> None:
        settings = ExecutorSettings(checkpoints=root / "saved", recovery=root / "recovery", scratch=root / "scratch")
        self.executor = FaultyExecutor(base, tiny_settings(model={"path": BASE}), settings)
        self.models = ServedModels(
            self.executor, RecoveryCheckpoints(root / "recovery", 1), self.fetch, ("org/tiny", BASE), 0.0
        )
        self.model = ClientModel(name="m", session="s", base="org/tiny", run=1, opened_ns=5, begun=1)
        self.bodies: dict[BodyRef, bytes] = {}

    async def fetch(self, ref: BodyRef) -> bytes:
        if ref not in self.bodies:
            raise LogCorrupted("the body is not there")
        return self.bodies[ref]

    def store(self, body: bytes) -> BodyRef:
        ref = BodyRef(seqs=(len(self.bodies) + 1,), size=len(body), digest=digest(body))
        self.bodies[ref] = body
        return ref

    def accept(self, operation: Operation) -> Queued:
        number = self.model.numbers = self.model.numbers + 1
        queued = Queued(number=number, arrival=number, key=str(number), op="x", accepted_ns=1)
        queued.body = self.store(encode_operation(operation))
        self.model.operations[queued.key] = queued
        return queued

    async def do(self, operation: Operation) -> Result:
        queued = self.accept(operation)
        read = await self.models.read(queued)
        result = await self.models.execute(self.model, queued, read)
        result, body = encoded(self.models.executor, self.model.name, read, result)
        queued.result, queued.failed, queued.completed_ns = self.store(body), isinstance(result, Failed), 2
        if not self.models.note(self.model, queued, read, result):
            await self.models.make_again(self.model, calm(self.model))
        return decode_result(body)

    async def weights(self, name: str) -> str:
        return getattr(await self.do(sampler(name)), "address", "")


@pytest.fixture
async def one(base: Path, tmp_path: Path) -> OneModel:
    made = OneModel(base, tmp_path)
    await made.do(CreateModel(base="org/tiny", adapter=SPEC))
    return made


async def failed(one: OneModel, operation: Operation, category: Category = Category.SERVER) -> str:
    result = await one.do(operation)
    assert isinstance(result, Failed), result
    assert result.category is category
    return result.error


async def test_a_step_in_which_the_trainer_failed_is_undone_and_its_gradient_is_there_for_the_next(
    base: Path, tmp_path: Path, one: OneModel
) -> None:
    await one.do(GRADIENT)
    one.executor.fault = RuntimeError("a bug")
    error = await failed(one, optim_step())
    assert error == "the trainer failed in this operation, because of a bug in bombus (RuntimeError: a bug)"
    assert one.executor.models == {"m": 0}, "the step was taken before the fault, and is undone"
    taken = await one.do(optim_step())
    assert isinstance(taken, StepTaken)
    clean = OneModel(base, tmp_path / "clean")
    for operation in (CreateModel(base="org/tiny", adapter=SPEC), GRADIENT):
        await clean.do(operation)
    assert await clean.do(optim_step()) == taken
    assert await clean.weights("end") == await one.weights("end") != ""


async def test_a_gradient_in_which_the_trainer_failed_is_not_stepped_with(one: OneModel) -> None:
    await one.do(GRADIENT)
    one.executor.fault = KeyError("a bug")
    assert "KeyError" in await failed(one, GRADIENT)
    assert "a forward_backward since step 0 failed (the trainer failed" in await failed(
        one, optim_step(), Category.USER
    )
    assert isinstance(await one.do(optim_step()), StepTaken)


async def test_a_device_that_is_lost_ends_the_process(one: OneModel) -> None:
    one.executor.fault = torch.AcceleratorError("illegal memory access")
    with pytest.raises(BackendLost, match="the device failed in an operation of model m: illegal memory access"):
        await one.do(GRADIENT)


@pytest.mark.parametrize("checkpointed", [False, True])
async def test_a_model_that_is_made_again_has_the_gradient_and_the_failures_that_it_had(
    one: OneModel, checkpointed: bool
) -> None:
    await one.do(GRADIENT)
    await one.do(optim_step())
    before = await one.weights("before")
    await one.do(GRADIENT)
    await one.do(Rejected(failure=Failed(error="not a list", category=Category.USER), counts=True))
    if checkpointed:
        number, folder, digest_of_checkpoint = await one.models.write_checkpoint("m")
        assert (number, one.models.executor.models) == (6, {"m": 1})
        assert list(one.models.due_for_checkpoints()) == []
        assert Path(folder).is_dir()
        assert digest_of_checkpoint
    await one.models.make_again(one.model, calm(one.model))
    assert await one.weights("after") == before
    error = await failed(one, optim_step(), Category.USER)
    assert "a forward_backward since step 1 failed (not a list)" in error
    await one.models.make_again(one.model, calm(one.model))
    assert isinstance(await one.do(optim_step()), StepTaken)


async def test_wrong_parameters_of_a_step_leave_the_gradient_also_when_the_model_is_made_again(one: OneModel) -> None:
    await one.do(GRADIENT)
    await failed(one, optim_step(learning_rate=-1.0), Category.USER)
    await one.models.make_again(one.model, calm(one.model))
    taken = await one.do(optim_step())
    assert isinstance(taken, StepTaken)
    assert taken.grad_norm > 0.0


async def test_a_body_that_is_lost_fails_what_waits_and_stops_a_model_that_has_to_be_made_of_it(one: OneModel) -> None:
    queued = one.accept(GRADIENT)
    assert queued.body is not None
    del one.bodies[queued.body]
    read = await one.models.read(queued)
    assert isinstance(read, Rejected)
    assert read.counts
    assert "the body of this operation is lost" in read.failure.error
    queued.completed_ns = 2
    with pytest.raises(LogCorrupted):
        await one.models.make_again(one.model, calm(one.model))


async def test_a_failed_operation_whose_body_is_gone_spoils_the_gradient_again_when_its_model_is_made_again(
    one: OneModel,
) -> None:
    await one.do(GRADIENT)
    queued = one.accept(GRADIENT)
    assert queued.body is not None
    del one.bodies[queued.body]
    read = await one.models.read(queued)
    result = await one.models.execute(one.model, queued, read)
    result, body = encoded(one.models.executor, one.model.name, read, result)
    queued.result, queued.failed, queued.completed_ns = one.store(body), isinstance(result, Failed), 2
    await one.models.make_again(one.model, calm(one.model))
    assert "the body of this operation is lost" in await failed(one, optim_step(), Category.USER)
    await one.models.make_again(one.model, calm(one.model))
    assert isinstance(await one.do(optim_step()), StepTaken)


async def test_a_step_that_failed_by_the_servers_fault_keeps_its_gradient_also_where_its_result_was_dropped(
    one: OneModel,
) -> None:
    await one.do(GRADIENT)
    one.executor.fault = RuntimeError("a bug")
    await failed(one, optim_step())
    step = one.model.operations["3"]
    step.result, step.by_server = None, True
    await one.models.make_again(one.model, calm(one.model))
    taken = await one.do(optim_step())
    assert isinstance(taken, StepTaken)
    assert taken.grad_norm > 0.0


async def test_a_checkpoint_that_was_loaded_is_needed_until_the_model_has_a_recovery_checkpoint(one: OneModel) -> None:
    await one.do(training("x"))
    assert not one.models.needs_checkpoint("m/training/x")
    await one.do(LoadWeights(checkpoint="m/training/x", with_optimizer=True))
    for _ in range(2):
        assert one.models.needs_checkpoint("m/training/x")
        assert not one.models.needs_checkpoint("m/training/y")
        await one.models.make_again(one.model, calm(one.model))
    await one.models.write_checkpoint("m")
    assert not one.models.needs_checkpoint("m/training/x")


async def test_what_was_removed_while_its_load_waited_is_not_loaded_although_it_is_there(one: OneModel) -> None:
    await one.do(sampler("x"))
    await one.do(GRADIENT)
    load = one.accept(LoadWeights(checkpoint="m/sampler/x"))
    load.op, load.reads = "load_weights", "m/sampler/x"
    one.model.unsurvived = {3: (1, 2, 3, 4, 5, 6)}
    for is_removed in (False, True):
        load.reads_removed = is_removed
        assert isinstance(await one.models.try_again(one.model, Rebuild(one.model, 7, 3, None)), NoneSurvived)
        assert one.models.needs_checkpoint("m/sampler/x") != is_removed
    one.model.unsurvived = {}
    assert await one.models.try_again(one.model, calm(one.model)) is None
    result = await one.models.execute(one.model, load, await one.models.read(load))
    assert isinstance(result, Failed)
    assert result.category is Category.USER
    assert result.error == (
        "m/sampler/x was removed while this operation waited for its model: load another checkpoint"
    )
    load.result, load.failed, load.completed_ns = one.store(encode_result(result)), True, 2
    assert isinstance(await one.do(optim_step()), StepTaken), "its gradient is whole"


async def test_a_checkpoint_that_a_model_without_a_recovery_checkpoint_was_loaded_from_is_not_replaced(
    one: OneModel,
) -> None:
    def overwrite(name: str) -> SaveWeights:
        return SaveWeights(checkpoint=CheckpointKind.TRAINING, name=name, overwrite=True)

    await one.do(training("x"))
    await one.do(LoadWeights(checkpoint="m/training/x", with_optimizer=True))
    assert "was made from the checkpoint m/training/x and has no recovery checkpoint yet" in await failed(
        one, overwrite("x")
    )
    assert isinstance(await one.do(overwrite("y")), CheckpointSaved)
    await one.models.write_checkpoint("m")
    assert isinstance(await one.do(overwrite("x")), CheckpointSaved)


async def test_a_removed_checkpoint_whose_files_are_still_needed_is_saved_again_later(one: OneModel) -> None:
    await one.do(training("x"))
    first, one.model = one.model, ClientModel(name="n", session="s", base="org/tiny", run=1, opened_ns=6, begun=1)
    await one.do(CreateModel(base="org/tiny", adapter=SPEC, checkpoint="m/training/x"))
    one.model = first
    save = training("x")
    again = await one.models.execute(first, one.accept(save), save, {"m/training/x"})
    assert isinstance(again, Failed)
    assert again.category is Category.SERVER
    assert "try it later" in again.error
    assert "use another name" in await failed(one, save, Category.USER), "nobody has removed it"


async def test_a_checkpoint_that_a_model_which_is_away_needs_is_not_replaced_and_the_model_comes_back(
    one: OneModel, tmp_path: Path
) -> None:
    await one.do(training("x"))
    first, one.model = one.model, ClientModel(name="n", session="s", base="org/tiny", run=1, opened_ns=6, begun=1)
    await one.do(CreateModel(base="org/tiny", adapter=SPEC, checkpoint="m/training/x"))
    second, one.model = one.model, first
    second.operations["1"].op = "create_model"
    folder, elsewhere = tmp_path / "saved" / "m" / "training" / "x", tmp_path / "elsewhere"
    folder.rename(elsewhere)
    assert isinstance(await one.models.try_again(second, calm(second)), EngineFault)
    elsewhere.rename(folder)
    overwrite = SaveWeights(checkpoint=CheckpointKind.TRAINING, name="x", overwrite=True)
    assert "save under another name, or try it later" in await failed(one, overwrite)
    assert await one.models.try_again(second, calm(second)) is None
    await one.models.write_checkpoint("n")
    assert isinstance(await one.do(overwrite), CheckpointSaved)


async def test_a_model_that_no_trainer_survives_making_again_goes_on_from_what_its_client_has_saved_since(
    one: OneModel,
) -> None:
    await one.do(GRADIENT)
    await one.do(optim_step())
    before = await one.weights("before")
    one.model.unsurvived = {3: (1, 2, 3)}
    deadly = Rebuild(one.model, 4, 3, None)
    with pytest.raises(NoneSurvived, match="3 trainers ended while they rebuilt it, at operation 3"):
        await one.models.make_again(one.model, deadly)
    one.model.unsurvived = {}
    await one.models.make_again(one.model, calm(one.model))
    await one.do(training("x"))
    one.model.unsurvived = {3: (1, 2, 3)}
    await one.models.make_again(one.model, Rebuild(one.model, 4, 3, None))
    assert await one.weights("after") == before


def last_of(one: OneModel) -> int:
    """Return the last operation that a recovery checkpoint would have now."""
    return max((clock.number for _, clock in one.models.due_for_checkpoints()), default=0)


async def test_a_save_whose_result_the_log_does_not_have_is_not_in_what_is_made_of_it(
    one: OneModel, tmp_path: Path
) -> None:
    await one.do(GRADIENT)
    await one.do(optim_step())
    before = await one.weights("before")
    save = one.accept(training("x"))
    assert isinstance(await one.models.execute(one.model, save, await one.models.read(save)), CheckpointSaved)
    one.model.checkpoint = ModelCheckpointed(
        at_ns=3, engine="e", run=1, model="m", number=2, trainer_epoch=1, folder=str(tmp_path / "gone"), digest="d"
    )
    await one.models.make_again(one.model, calm(one.model))
    assert (last_of(one), save.number) == (4, 5)
    assert await one.weights("after") == before


async def test_an_end_that_failed_before_what_came_earlier_was_executed_is_not_in_a_recovery_checkpoint(
    one: OneModel,
) -> None:
    await one.do(GRADIENT)
    waiting = one.accept(optim_step())
    ended = one.accept(EndModel(save_as="x"))
    lost = encode_result(Failed(error="it cannot be made again now", category=Category.SERVER))
    ended.result, ended.failed, ended.completed_ns = one.store(lost), True, 2
    await one.models.make_again(one.model, calm(one.model))
    assert (last_of(one), waiting.number, ended.number) == (2, 3, 4)


async def test_an_operation_that_succeeded_and_fails_when_it_is_repeated_stops_the_model(one: OneModel) -> None:
    queued = one.accept(forward_backward(*random_data(1, 1), loss=LossSpec("nothing")))
    queued.completed_ns = 2
    with pytest.raises(EngineFault, match="operation 2 of model m succeeded before, but fails while the model"):
        await one.models.make_again(one.model, calm(one.model))


async def test_a_result_that_is_too_large_fails_and_spoils_the_gradient(one: OneModel) -> None:
    count = BODY_BYTES_MAX // 4
    large = Scores(outputs=({"logprobs": Array(DType.FLOAT32, (count,), bytes(4 * count))},), loss=0.0, tokens=count)
    result, body = encoded(one.models.executor, one.model.name, GRADIENT, large)
    assert isinstance(result, Failed)
    assert body == encode_result(result)
    assert "send less data in each operation, and let the gradients accumulate" in result.error
    assert "the result of this operation has" in await failed(one, optim_step(), Category.USER)


async def test_an_operation_without_a_body_ends_the_model_and_saves_it(one: OneModel) -> None:
    queued = one.accept(GRADIENT)
    queued.body, queued.save_as = None, "ended-2"
    assert await one.models.read(queued) == EndModel(save_as="ended-2")


async def test_models_that_have_ended_are_forgotten_and_so_is_one_whose_name_was_given_again(one: OneModel) -> None:
    assert not one.models.is_gone({"m": one.model})
    one.models.forget_ended({"m": one.model})
    assert one.executor.models == {"m": 0}
    again = ClientModel(name="m", session="s", base="org/tiny", run=1, opened_ns=9, begun=4)
    assert one.models.is_gone({"m": again})
    one.models.forget_ended({"m": again})
    assert one.executor.models == {}
    assert not one.models.is_gone({})


async def test_what_is_saved_without_a_name_is_named_by_when_the_log_took_it(one: OneModel) -> None:
    accepted_ns = 1_795_392_000 * 10**9  # 2026-11-23 00:00:00 UTC
    names = []
    for _ in range(2):
        queued = one.accept(training(""))
        queued.accepted_ns = accepted_ns
        read = await one.models.read(queued)
        for _ in range(2):  # a trainer that was ended in between executes it again
            result = await one.models.execute(one.model, queued, read)
            assert isinstance(result, CheckpointSaved), result
            names.append(result.name)
    assert names == ["20261123-000000-2"] * 2 + ["20261123-000000-3"] * 2


async def test_a_model_that_could_not_be_made_again_is_forgotten_as_others_are(one: OneModel, tmp_path: Path) -> None:
    one.model.checkpoint = ModelCheckpointed(
        at_ns=3, engine="e", run=1, model="m", number=1, trainer_epoch=1, folder=str(tmp_path / "gone"), digest="d"
    )
    later = ServedModels(
        one.executor, RecoveryCheckpoints(tmp_path / "recovery", 2), one.fetch, ("org/tiny", BASE), 0.0
    )
    assert isinstance(await later.try_again(one.model, calm(one.model)), EngineFault)
    assert later.is_gone({})
    later.forget_ended({})
    assert not later.is_gone({})
