"""The format of checkpoints, with the facts of steps: what is written, verified, refused, and left by a crash."""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest
import torch

from bombus.errors import EngineFault
from bombus.faults import Point
from bombus.weights.checkpoints import (
    FORMAT,
    MANIFEST,
    STATE,
    Checkpoint,
    CheckpointDamaged,
    CheckpointLost,
    Seal,
    encode_manifest,
    read_checkpoint,
)
from bombus_trainer.publish.checkpoint import load_tensors, seal_files, verify
from bombus_trainer.publish.directories import new_directory, remove_others
from bombus_trainer.publish.step_checkpoint import StepFacts, load_step, read_step, save_step
from bombus_trainer.publish.tensorfile import write_whole
from tests.trainer.killed_writes import killed_at


def facts(step: int = 1, epoch: int = 1, metrics: Mapping[str, float | None] = {}) -> StepFacts:
    return StepFacts(
        engine="main", run=1, step=step, trainer_epoch=epoch, attempt=1, config_digest="c", metrics=metrics
    )


def write(root: Path, step: int = 1, epoch: int = 1, value: float = 1.0) -> Checkpoint[StepFacts]:
    def fill(draft: Path) -> dict[str, Seal]:
        return {STATE: write_whole(draft / STATE, {"w": torch.tensor([value])}, durable=True)}

    return save_step(root, facts(step, epoch), fill)


def test_a_checkpoint_is_its_files_and_a_manifest_whose_hash_is_its_digest(tmp_path: Path) -> None:
    made = write(tmp_path)
    manifest = (made.path / MANIFEST).read_bytes()
    assert made.path == tmp_path / "step-00000001-epoch-1-attempt-1"
    assert made.digest == sha256(manifest).hexdigest()
    assert sorted(path.name for path in made.path.iterdir()) == [MANIFEST, STATE]
    state = (made.path / STATE).read_bytes()
    assert msgspec.json.decode(manifest) == {
        "format": FORMAT,
        "facts": msgspec.to_builtins(facts()),
        "files": {STATE: {"bytes": len(state), "sha256": sha256(state).hexdigest()}},
    }
    assert read_step(made.path, made.digest) == made
    assert float(load_step(made.path, made.digest)["w"]) == 1.0


def test_a_metric_that_is_not_finite_is_null(tmp_path: Path) -> None:
    made = save_step(tmp_path, facts(metrics={"loss": float("nan"), "mean": 1.0}), lambda draft: {})
    assert read_step(made.path, made.digest).facts.metrics == {"loss": None, "mean": 1.0}


def test_files_in_folders_are_sealed_and_verified_one_by_one(tmp_path: Path) -> None:
    def fill(draft: Path) -> dict[str, Seal]:
        (draft / "ranks").mkdir()
        for rank in (0, 1):
            (draft / "ranks" / f"{rank}.pt").write_bytes(bytes([rank]) * 100)
        return seal_files(draft, lambda name: name.endswith("0.pt"))  # the writer seals the other

    made = save_step(tmp_path, facts(), fill)
    assert sorted(made.files) == ["ranks/0.pt", "ranks/1.pt"]
    verify(made, made.files)
    (made.path / "ranks" / "1.pt").write_bytes(b"other")
    verify(made, ["ranks/0.pt"])
    with pytest.raises(CheckpointDamaged, match=r"is damaged: ranks/1\.pt does not match its manifest"):
        verify(made, made.files)
    (made.path / "ranks" / "1.pt").unlink()
    with pytest.raises(CheckpointLost, match="cannot be read"):
        verify(made, made.files)
    with pytest.raises(CheckpointDamaged, match="optimizer"):
        load_tensors(made, "optimizer.safetensors")


def test_a_checkpoint_names_the_backend_that_can_load_it(tmp_path: Path) -> None:
    made = save_step(tmp_path, msgspec.structs.replace(facts(), backend="verl"), lambda draft: {})
    assert read_step(made.path, made.digest, "verl") == made
    with pytest.raises(EngineFault, match="was written by the verl backend: torch cannot load it"):
        load_step(made.path, made.digest)


def test_only_the_checkpoint_with_the_digest_on_the_log_is_read(tmp_path: Path) -> None:
    before, after = write(tmp_path), write(tmp_path, value=2.0)
    assert before.path == after.path
    with pytest.raises(CheckpointDamaged, match="its manifest is not the one named in the log"):
        read_step(before.path, before.digest)
    assert float(load_step(after.path, after.digest)["w"]) == 2.0


@pytest.mark.parametrize(
    "body",
    [
        b'{"format": 1, "facts": {}, "state_bytes": 80, "state_sha256": "aa"}',
        b'{"format": 2, "facts": {}, "backend": "verl", "ranks": 2, "files": {}}',
        b'{"format": 4, "more": []}',
    ],
)
def test_a_checkpoint_of_another_version_is_refused_with_what_to_do(tmp_path: Path, body: bytes) -> None:
    (tmp_path / MANIFEST).write_bytes(body)
    with pytest.raises(CheckpointDamaged, match=r"has format [124], but .* the version of bombus that wrote"):
        read_step(tmp_path, sha256(body).hexdigest())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[" * 5000,
        b'{"format": 3}',
        b'{"format": 3, "facts": {"engine": "\xff"}, "files": {}}',
        encode_manifest({"base": "of a model"}, {}),
    ],
)
def test_a_manifest_of_any_bytes_is_a_damaged_checkpoint(tmp_path: Path, body: bytes) -> None:
    (tmp_path / MANIFEST).write_bytes(body)
    with pytest.raises(CheckpointDamaged, match="cannot be read"):
        read_step(tmp_path, sha256(body).hexdigest())


def test_a_checkpoint_that_is_away_is_lost_and_not_damaged(tmp_path: Path) -> None:
    with pytest.raises(CheckpointLost, match="cannot be read: No such file") as lost:
        read_checkpoint(tmp_path / "away", StepFacts)
    assert not isinstance(lost.value, CheckpointDamaged), "it may come back"


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    def full(draft: Path) -> dict[str, Seal]:
        (draft / STATE).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        save_step(tmp_path, facts(), full)
    assert list(tmp_path.iterdir()) == []


def test_a_trainer_whose_successor_has_removed_its_draft_leaves_the_checkpoint_that_is_there(tmp_path: Path) -> None:
    made = write(tmp_path)
    with pytest.raises(FileNotFoundError), new_directory(made.path, tmp_path, trainer_epoch=1, durable=True):
        remove_others(tmp_path, [str(made.path)], trainer_epoch=2)
    assert list(tmp_path.iterdir()) == [made.path]
    verify(made, made.files)


@pytest.mark.parametrize("point", [Point.TRAINER_CHECKPOINT_BEGUN, Point.TRAINER_CHECKPOINT_WRITTEN])
def test_a_trainer_that_is_killed_before_the_rename_leaves_a_draft_that_its_successor_removes(
    tmp_path: Path, point: Point
) -> None:
    killed_at(point, write, tmp_path)
    (draft,) = tmp_path.iterdir()
    assert draft.name.startswith(".draft-epoch-1-")
    later = write(tmp_path, step=2, epoch=2)
    remove_others(tmp_path, [str(later.path)], trainer_epoch=2)
    assert list(tmp_path.iterdir()) == [later.path]


def test_a_trainer_that_is_killed_after_the_rename_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    killed_at(Point.TRAINER_CHECKPOINT_RENAMED, write, tmp_path)
    (path,) = tmp_path.iterdir()
    found = read_checkpoint(path, StepFacts)
    assert float(load_tensors(found, STATE)["w"]) == 1.0


def test_what_a_killed_trainer_moved_aside_goes_with_the_next_write_or_as_an_old_checkpoint(tmp_path: Path) -> None:
    write(tmp_path)
    killed_at(Point.TRAINER_DIRECTORY_ASIDE, write, tmp_path)
    assert any(path.name.startswith(".replaced-") for path in tmp_path.iterdir())
    made = write(tmp_path, value=2.0)
    assert [path for path in tmp_path.iterdir() if not path.name.startswith(".draft-")] == [made.path]
    assert float(load_step(made.path, made.digest)["w"]) == 2.0
    killed_at(Point.TRAINER_DIRECTORY_ASIDE, write, tmp_path)
    remove_others(tmp_path, (), trainer_epoch=0)
    assert any(path.name.startswith(".replaced-") for path in tmp_path.iterdir()), "it is of a later trainer"
    remove_others(tmp_path, (), trainer_epoch=1)
    assert list(tmp_path.iterdir()) == []
