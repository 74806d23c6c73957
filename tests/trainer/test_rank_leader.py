"""Ranks that train together make the same calls, agree on failures, and do not wait for a rank that is gone."""

from pathlib import Path

import pytest

from bombus_trainer.backends.torch.executor import Executor
from tests.trainer.local_ranks import Seen, operated, play, trained
from tests.trainer.operations.small_models import executor
from tests.trainer.small_batches import tiny_model_folder, tiny_settings


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    tiny_model_folder(folder / "model")
    return folder


@pytest.fixture(scope="module")
def played(folder: Path) -> dict[str, Seen]:
    return play(folder)


def test_ranks_follow_their_leader_through_steps_checkpoints_and_what_all_refuse(
    played: dict[str, Seen], folder: Path
) -> None:
    seen = played["all is well"]
    interrupted, first, second, other, restored, third = seen.calls
    assert interrupted == "Interrupted: "
    alone = Executor(folder / "model", tiny_settings())
    for of_both in (first, second, third):
        assert of_both.rpartition(",")[0] == trained(alone).rpartition(",")[0]
        assert of_both.startswith("1 version: "), "both ranks have the same weights after each step"
        assert not of_both.endswith("of 1 bins"), "each rank has computed something"
    assert "damaged" in other
    assert restored == "None"
    assert seen.codes == [0, 0]


def test_a_job_that_no_rank_can_load_is_refused_with_the_reason_and_the_ranks_go_on(played: dict[str, Seen]) -> None:
    seen = played["no model"]
    assert len(seen.calls) == 2
    assert all(call.startswith("EngineFault: the model at") for call in seen.calls)
    assert seen.codes == [0, 0]


def test_a_rank_that_fails_alone_ends_all_and_the_leader_reports_its_error(played: dict[str, Seen]) -> None:
    seen = played["one fails"]
    lost = "BackendLost: the trainer's ranks cannot continue together and are restarting: rank 1: MemoryError: no room"
    assert seen.calls[0].startswith(lost)
    assert seen.calls[1] == seen.calls[0], "nothing is begun any more"
    assert seen.codes == [0, 3]


def test_a_leader_that_fails_alone_does_not_wait_for_the_others(played: dict[str, Seen]) -> None:
    seen = played["the leader fails"]
    assert "rank 0: OSError: the disk is full" in seen.calls[0]
    assert seen.calls[0].startswith("BackendLost")


def test_a_rank_that_is_killed_ends_the_others(played: dict[str, Seen]) -> None:
    seen = played["one dies"]
    assert seen.calls[0].startswith("BackendLost")
    assert "no message came from rank 1" in seen.calls[0]
    assert seen.codes == [0, -9]


def test_training_operations_of_two_ranks_come_to_what_one_process_computes(
    played: dict[str, Seen], folder: Path, tmp_path: Path
) -> None:
    seen = played["operations"]
    assert seen.calls == operated(executor(folder / "model", tmp_path))
    first, _, step, spoilt, refused, *_, saved, again, loaded, last = seen.calls
    assert first.startswith("loss ")
    assert step.startswith("step 1, norm ")
    assert "is not finite" in spoilt, "of a datum that one rank has computed"
    assert "no step was taken" in refused
    assert (saved, loaded) == ("CheckpointSaved", "CheckpointLoaded")
    assert "already" in again
    assert last != first
    assert seen.codes == [0, 0]


def test_a_rank_that_cannot_read_a_checkpoint_ends_all_before_its_models_differ(played: dict[str, Seen]) -> None:
    (call,) = played["one cannot read"].calls
    assert call.startswith("BackendLost: only rank 1 failed")
    assert "there is no checkpoint m/training/x" in call
