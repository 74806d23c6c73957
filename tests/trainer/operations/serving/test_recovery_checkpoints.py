"""When a recovery checkpoint is due, which one is loaded, and which folders are removed."""

from pathlib import Path

import pytest

from bombus.errors import EngineFault
from bombus.hive.events import ModelCheckpointed
from bombus.weights.checkpoints import MANIFEST
from bombus_trainer.operations.serving.recovery_checkpoints import (
    OPERATIONS_MAX,
    CheckpointClock,
    RecoveryCheckpoints,
)
from bombus_trainer.publish.directories import remove_earlier
from tests.trainer.operations.small_models import (
    created,
    executor,
    forward_backward,
    optim_step,
    random_data,
    scored,
    stepped,
)

EVERY_S, BYTES = 30.0, 1000


def test_a_recovery_checkpoint_is_due_some_time_after_the_first_operation_that_is_not_in_one() -> None:
    clock = CheckpointClock(number=4, checkpointed=4)
    assert clock.due_s(EVERY_S, BYTES) is None
    clock.note(5, 10, now_s=100.0, at_once=False)
    clock.note(6, 10, now_s=110.0, at_once=False)
    assert clock.due_s(EVERY_S, BYTES) == 130.0
    clock.wrote(took_s=7.0)
    assert clock.due_s(EVERY_S, BYTES) is None
    clock.note(7, 10, now_s=200.0, at_once=False)
    assert clock.due_s(EVERY_S, BYTES) == 270.0, "one that takes 7 s is written every 70 s at most"


@pytest.mark.parametrize(
    ("number", "size", "at_once"), [(5, BYTES, False), (5, 10, True), (4 + OPERATIONS_MAX, 10, False)]
)
def test_a_recovery_checkpoint_is_due_now_after_many_bytes_or_operations_or_one_that_cannot_be_repeated(
    number: int, size: int, at_once: bool
) -> None:
    clock = CheckpointClock(number=4, checkpointed=4)
    clock.note(number, size, now_s=100.0, at_once=at_once)
    assert clock.due_s(EVERY_S, BYTES) == 0.0
    clock.wrote(took_s=1.0)
    clock.note(number + 1, 10, now_s=100.0, at_once=False)
    assert clock.due_s(EVERY_S, BYTES) == 130.0


def test_a_recovery_checkpoint_that_is_not_the_one_on_the_log_is_not_loaded(base: Path, tmp_path: Path) -> None:
    made, recovery = executor(base, tmp_path), RecoveryCheckpoints(tmp_path / "recovery", trainer_epoch=1)
    created(made, "m")
    folder, digest = recovery.write(made, "m", 3)
    checkpointed = ModelCheckpointed(
        at_ns=0, engine="main", run=1, model="m", number=3, trainer_epoch=1, folder=folder, digest=digest
    )
    recovery.load(made, "m", checkpointed)
    assert made.models == {"m": 0}
    facts = Path(folder, MANIFEST)
    facts.write_bytes(facts.read_bytes() + b"\n")
    with pytest.raises(EngineFault, match="is not the one named in the log"):
        recovery.load(made, "m", checkpointed)
    facts.unlink()
    with pytest.raises(EngineFault, match=r"model m cannot continue from its recovery checkpoint at .*: bring it back"):
        recovery.load(made, "m", checkpointed)


def test_a_recovery_checkpoint_that_another_log_has_left_is_replaced(base: Path, tmp_path: Path) -> None:
    made = executor(base, tmp_path)
    created(made, "m")
    left, _ = RecoveryCheckpoints(tmp_path / "recovery", trainer_epoch=1).write(made, "m", 3)
    scored(made, "m", forward_backward(*random_data(1, 3)))
    stepped(made, "m", optim_step())
    recovery = RecoveryCheckpoints(tmp_path / "recovery", trainer_epoch=1)
    folder, digest = recovery.write(made, "m", 3)
    assert folder == left
    checkpointed = ModelCheckpointed(
        at_ns=0, engine="main", run=1, model="m", number=3, trainer_epoch=1, folder=folder, digest=digest
    )
    recovery.load(made, "m", checkpointed)
    assert made.models == {"m": 1}


def test_recovery_checkpoints_of_a_later_trainer_and_those_on_the_log_are_left_alone(tmp_path: Path) -> None:
    names = ("cover-3-epoch-1-1", "cover-5-epoch-2-1", "cover-7-epoch-2-2", "cover-9-epoch-3-1", "another")
    for name in names:
        (tmp_path / "m/training" / name).mkdir(parents=True)
    (tmp_path / "other/training/cover-5-epoch-2-1").mkdir(parents=True)
    RecoveryCheckpoints(tmp_path, trainer_epoch=2).remove_others([str(tmp_path / "m/training/cover-5-epoch-2-1")])
    left = sorted(path.name for path in (tmp_path / "m/training").iterdir())
    assert left == ["another", "cover-5-epoch-2-1", "cover-9-epoch-3-1"]
    assert not [*(tmp_path / "other/training").iterdir()], "another model's checkpoint of the same name"


def test_what_earlier_runs_and_earlier_trainers_have_left_is_removed(tmp_path: Path) -> None:
    for name in ("run-1", "run-1-epoch-9", "run-2", "run-2-epoch-1", "run-2-epoch-2", "run-2-epoch-3", "run-3", "else"):
        (tmp_path / name).mkdir()
    remove_earlier(tmp_path, run=2, trainer_epoch=2)
    remove_earlier(tmp_path / "nowhere", run=2, trainer_epoch=2)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["else", "run-2", "run-2-epoch-2", "run-2-epoch-3", "run-3"]
