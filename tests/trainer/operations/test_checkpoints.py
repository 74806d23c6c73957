"""Checkpoints as folders: their names, what is replaced and when, and what a crash leaves."""

import shutil
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bombus.errors import Refused
from bombus.faults import Point
from bombus.operations import CheckpointKind
from bombus.weights.checkpoints import MANIFEST, CheckpointDamaged, CheckpointLost, Seal
from bombus_trainer.operations.checkpoints import (
    CheckpointFolder,
    CheckpointName,
    ModelCheckpoint,
    ModelFacts,
    content_of,
)
from bombus_trainer.publish.checkpoint import load_tensors
from bombus_trainer.publish.directories import REPLACED
from tests.trainer.killed_writes import killed_at

WEIGHTS = "adapter_model.safetensors"
NAME = CheckpointName("run:train:0", CheckpointKind.SAMPLER, "step-1")


def facts(operation: str = "") -> ModelFacts:
    return ModelFacts(base="tiny", step=3, weights=WEIGHTS, operation=operation)


def saved(
    folder: CheckpointFolder, value: float, name: CheckpointName = NAME, overwrite: bool = False, operation: str = ""
) -> ModelCheckpoint:
    """Save a checkpoint whose only weight is `value`."""

    def fill(draft: Path) -> dict[str, Seal]:
        save_file({"w": torch.tensor([value])}, draft / WEIGHTS)
        return {}

    return folder.save(name, facts(operation), overwrite, fill)


def weight(folder: CheckpointFolder, name: CheckpointName = NAME) -> float:
    return float(load_tensors(folder.read(name), WEIGHTS)["w"])


def test_a_checkpoint_is_a_folder_of_its_name_whose_manifest_seals_its_files(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    found = saved(folder, 1.0)
    file = tmp_path / "run:train:0" / "sampler" / "step-1" / WEIGHTS
    assert found.path == file.parent
    assert found.files == {WEIGHTS: Seal(file.stat().st_size, sha256(file.read_bytes()).hexdigest())}
    assert found.size_bytes == file.stat().st_size
    assert found.digest == sha256((file.parent / MANIFEST).read_bytes()).hexdigest()
    assert folder.read(NAME) == folder.read(NAME, found.digest) == found
    assert weight(folder) == 1.0
    assert [path.name for path in file.parent.parent.iterdir()] == ["step-1"]


def test_a_name_that_is_taken_is_refused_and_what_has_it_stays(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    saved(folder, 1.0)
    with pytest.raises(Refused, match="there is a checkpoint run:train:0/sampler/step-1 already: use another name, or"):
        saved(folder, 2.0)
    assert weight(folder) == 1.0


def test_an_operation_that_is_executed_again_finds_what_it_wrote(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    first = saved(folder, 1.0, operation="op-7")
    assert saved(folder, 2.0, operation="op-7") == first
    assert weight(folder) == 1.0
    with pytest.raises(Refused, match="already"):
        saved(folder, 2.0, operation="op-8")


def test_with_overwrite_the_new_one_takes_the_name(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    first = saved(folder, 1.0)
    second = saved(folder, 2.0, overwrite=True)
    assert weight(folder) == 2.0
    assert first.digest != second.digest
    assert [path.name for path in second.path.parent.iterdir()] == ["step-1"]


def test_a_replacement_that_a_crash_cut_short_ends_with_one_of_the_two(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    place = saved(folder, 1.0).path
    aside = place.with_name(REPLACED + place.name)
    place.rename(aside)  # the old one is out of the way, and the new one not yet there
    assert weight(CheckpointFolder(tmp_path)) == 1.0
    shutil.copytree(place, aside)  # the new one is there, and the old one not yet removed
    saved(folder, 2.0, overwrite=True)
    assert weight(folder) == 2.0
    assert not aside.exists()


def test_what_was_half_written_is_removed_and_never_a_checkpoint(tmp_path: Path) -> None:
    saved(CheckpointFolder(tmp_path), 1.0)
    earlier = ("run-2/.draft-epoch-3-abc", "run-1/.draft-epoch-9-abc")
    later = ("run-2/.draft-epoch-4-abc", "run-3/.draft-epoch-1-abc")
    place = tmp_path / ".drafts"
    for name in (*earlier, *later):
        (place / name).mkdir(parents=True)
        (place / name / WEIGHTS).write_bytes(b"half")
    folder = CheckpointFolder(tmp_path, run=2, trainer_epoch=3)
    assert sorted(str(path.relative_to(place)) for path in place.glob("*/.draft-*")) == [*later], (
        "trainers that follow are writing those"
    )
    assert weight(folder) == 1.0


def test_a_save_that_fails_leaves_nothing(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)

    def full(draft: Path) -> dict[str, Seal]:
        (draft / WEIGHTS).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        folder.save(NAME, facts(), False, full)
    with pytest.raises(Refused, match="there is no checkpoint run:train:0/sampler/step-1: save one"):
        folder.read(NAME)
    assert [path for path in tmp_path.rglob("*") if not path.is_dir() or "draft-" in path.name] == []


def test_a_damaged_checkpoint_is_not_loaded(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    place = saved(folder, 1.0).path
    save_file({"w": torch.tensor([5.0])}, place / WEIGHTS)
    with pytest.raises(CheckpointDamaged, match=r"step-1 is damaged: adapter_model.safetensors does not match"):
        weight(folder)
    (place / WEIGHTS).unlink()
    with pytest.raises(CheckpointLost, match="step-1 cannot be read"):
        weight(folder)


def test_a_checkpoint_of_an_earlier_version_is_refused_in_words(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    place = saved(folder, 1.0).path
    (place / MANIFEST).rename(place / "facts.json")
    with pytest.raises(CheckpointDamaged, match=r"step-1 has no manifest\.json: .* version of bombus that wrote it"):
        folder.read(NAME)
    with pytest.raises(Refused, match="already: use another name, or save with `overwrite`"):
        saved(folder, 2.0, operation="op-7")
    saved(folder, 3.0, overwrite=True)
    assert weight(folder) == 3.0


def test_what_models_load_from_a_checkpoint_has_the_same_hash_for_ever(tmp_path: Path) -> None:
    """The log has these hashes: an operation that is executed again has to load the same."""
    found = saved(CheckpointFolder(tmp_path), 1.0)
    assert content_of(found, False) == sha256(f"{WEIGHTS} {found.files[WEIGHTS].sha256}".encode()).hexdigest()
    with_step = f"{WEIGHTS} {found.files[WEIGHTS].sha256}\nstep 3"
    assert content_of(found, True) == sha256(with_step.encode()).hexdigest()


def overwrite(root: Path) -> None:
    saved(CheckpointFolder(root, run=1, trainer_epoch=1), 2.0, overwrite=True, operation="two")


@pytest.mark.parametrize(
    ("point", "value"),
    [
        (Point.TRAINER_CHECKPOINT_BEGUN, 1.0),
        (Point.TRAINER_CHECKPOINT_WRITTEN, 1.0),
        (Point.TRAINER_DIRECTORY_ASIDE, 1.0),
        (Point.TRAINER_CHECKPOINT_RENAMED, 2.0),
    ],
)
def test_a_trainer_that_is_killed_while_it_replaces_a_checkpoint_leaves_one_of_the_two(
    tmp_path: Path, point: Point, value: float
) -> None:
    saved(CheckpointFolder(tmp_path, run=1, trainer_epoch=1), 1.0, operation="one")
    killed_at(point, overwrite, tmp_path)
    folder = CheckpointFolder(tmp_path, run=1, trainer_epoch=2)
    assert folder.names(NAME.model, NAME.kind) == [NAME.name]
    assert weight(folder) == value
    assert [path.name for path in folder.read(NAME).path.parent.iterdir()] == [NAME.name]
    assert list((tmp_path / ".drafts" / "run-1").iterdir()) == []
    overwrite(tmp_path)
    assert weight(folder) == 2.0


def test_what_is_removed_is_gone_and_its_name_is_free(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    other = CheckpointName(NAME.model, NAME.kind, "step-2")
    for name in (NAME, other):
        saved(folder, 1.0, name)
    assert folder.names(NAME.model, NAME.kind) == ["step-1", "step-2"]
    folder.remove(NAME)
    folder.remove(NAME)
    assert folder.names(NAME.model, NAME.kind) == ["step-2"]
    assert [path.name for path in (tmp_path / NAME.model / NAME.kind).iterdir()] == ["step-2"]
    saved(folder, 2.0)
    assert weight(folder) == 2.0


@pytest.mark.parametrize("bad", ["", ".", "..", "../x", "a/b", "/etc", ".draft-x", "a b", "a\0", "a\n", "ü", "x" * 129])
def test_no_name_leads_out_of_the_folder(bad: str) -> None:
    for model, name in ((bad, "x"), ("x", bad)):
        with pytest.raises(Refused, match=r"cannot be the name of a (model|checkpoint): use 1 to 128"):
            CheckpointName(model, CheckpointKind.TRAINING, name)


@pytest.mark.parametrize(
    "text", ["", "a", "a/training", "a/weights/b", "a/training/b/c", "a/training/../b", "/training/"]
)
def test_what_does_not_name_a_checkpoint_is_refused(text: str) -> None:
    with pytest.raises(Refused, match=r"MODEL/KIND/NAME|cannot be the name"):
        CheckpointName.read(text)


def test_a_name_is_read_as_it_is_written() -> None:
    assert CheckpointName.read(str(NAME)) == NAME
