"""Ranks that train together run the same operations, agree on failures, and do not wait for a rank that is gone."""

import pytest

from tests.trainer.local_ranks import Seen, play
from tests.trainer.small_batches import tiny_model_folder


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    folder = tmp_path_factory.mktemp("ranks")
    tiny_model_folder(folder / "model")
    return play(folder)


def test_ranks_follow_their_leader_through_steps_checkpoints_and_what_all_refuse(played: dict[str, Seen]) -> None:
    seen = played["all is well"]
    interrupted, first, second, other, restored, third = seen.calls
    assert interrupted == "Interrupted: "
    assert (first, second, third) == ("1.0", "1.0", "1.0"), "both ranks have the same weights after each step"
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
    lost = "BackendLost: the trainer's ranks cannot go on together, and start again: rank 1: MemoryError: no room"
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
    assert "nothing was heard of rank 1" in seen.calls[0]
    assert seen.codes == [0, -9]
