"""Checkpoints as folders: their names, what is replaced and when, and what a crash leaves."""

import shutil
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bombus.errors import EngineFault, Refused
from bombus.operations import CheckpointKind, CheckpointSaved
from bombus_trainer.operations.checkpoints import (
    REPLACED,
    CheckpointFolder,
    CheckpointName,
    ModelCheckpointFacts,
    ModelCheckpointNotes,
)
from bombus_trainer.publish.checkpoint import Seal

WEIGHTS = "adapter_model.safetensors"
NAME = CheckpointName("run:train:0", CheckpointKind.SAMPLER, "step-1")


def saved(
    folder: CheckpointFolder, value: float, name: CheckpointName = NAME, overwrite: bool = False, operation: str = ""
) -> CheckpointSaved:
    """Save a checkpoint whose only weight is `value`."""

    def fill(draft: Path) -> dict[str, Seal]:
        save_file({"w": torch.tensor([value])}, draft / WEIGHTS)
        return {}

    def describe(files: dict[str, Seal]) -> ModelCheckpointFacts:
        return ModelCheckpointFacts(
            base="tiny",
            model=name.model,
            kind=name.kind,
            name=name.name,
            step=3,
            weights=WEIGHTS,
            address=files[WEIGHTS].sha256,
            files=files,
            marks=ModelCheckpointNotes(operation=operation, executed=b"\x00up to 7\xff"),
        )

    return folder.save(name, overwrite, operation, fill, describe)


def weight(folder: CheckpointFolder, name: CheckpointName = NAME) -> float:
    return float(folder.tensors(name, folder.facts(name), WEIGHTS)["w"])


def test_a_checkpoint_is_a_folder_of_its_name_with_an_address_that_is_its_files_hash(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    found = saved(folder, 1.0)
    file = tmp_path / "run:train:0" / "sampler" / "step-1" / WEIGHTS
    assert found.folder == str(file.parent)
    assert found.address == sha256(file.read_bytes()).hexdigest()
    assert found.size_bytes == file.stat().st_size
    facts = folder.facts(NAME)
    assert (facts.step, facts.marks.executed, facts.address) == (3, b"\x00up to 7\xff", found.address)
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
    assert first.address != second.address
    assert [path.name for path in Path(second.folder).parent.iterdir()] == ["step-1"]


def test_a_replacement_that_a_crash_cut_short_ends_with_one_of_the_two(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    place = Path(saved(folder, 1.0).folder)
    aside = place.with_name(REPLACED + place.name)
    place.rename(aside)  # the old one is out of the way, and the new one not yet there
    assert weight(CheckpointFolder(tmp_path)) == 1.0
    shutil.copytree(place, aside)  # the new one is there, and the old one not yet removed
    saved(folder, 2.0, overwrite=True)
    assert weight(folder) == 2.0
    assert not aside.exists()


def test_what_was_half_written_is_removed_and_never_a_checkpoint(tmp_path: Path) -> None:
    saved(CheckpointFolder(tmp_path), 1.0)
    earlier = (".draft-abc", ".draft-run-2-epoch-3-abc", ".draft-run-1-epoch-9-abc")
    later = (".draft-run-2-epoch-4-abc", ".draft-run-3-epoch-1-abc")
    place = tmp_path / "run:train:0" / "sampler"
    for name in (*earlier, *later):
        (place / name).mkdir()
        (place / name / WEIGHTS).write_bytes(b"half")
    folder = CheckpointFolder(tmp_path, run=2, trainer_epoch=3)
    assert sorted(path.name for path in place.iterdir()) == [*later, NAME.name], (
        "trainers that follow are writing those"
    )
    assert weight(folder) == 1.0


def test_a_save_that_fails_leaves_nothing(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)

    def full(draft: Path) -> dict[str, Seal]:
        (draft / WEIGHTS).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    def never(files: dict[str, Seal]) -> ModelCheckpointFacts:
        raise AssertionError(files)

    with pytest.raises(OSError, match="No space"):
        folder.save(NAME, False, "", full, never)
    with pytest.raises(Refused, match="there is no checkpoint run:train:0/sampler/step-1: save one"):
        folder.facts(NAME)
    assert list((tmp_path / "run:train:0" / "sampler").iterdir()) == []


def test_a_damaged_checkpoint_is_not_loaded(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    place = Path(saved(folder, 1.0).folder)
    save_file({"w": torch.tensor([5.0])}, place / WEIGHTS)
    with pytest.raises(EngineFault, match=r"step-1 is damaged: .*adapter_model.safetensors is not what was written"):
        weight(folder)
    (place / WEIGHTS).unlink()
    with pytest.raises(EngineFault, match="step-1 cannot be read"):
        weight(folder)
    (place / "facts.json").write_text("{}")
    with pytest.raises(EngineFault, match=r"cannot be read from .*step-1: Object missing required field"):
        folder.facts(NAME)


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
