"""The reward that a task's tests have left."""

import os
from pathlib import Path

import pytest

from bombus.rollout.harbor.verdict import verdict_of
from bombus.sdk.errors import InfraError


@pytest.mark.parametrize(
    ("files", "reward"),
    [
        ({"reward.txt": "0.5\n"}, 0.5),
        ({"reward.txt": "1", "reward.json": '{"reward": 0.5}'}, 0.5),
        ({"reward.json": '{"reward": 0.25, "style": 1}'}, 0.25),
        ({"reward.json": '{"passed": 1}'}, 1.0),
        ({"reward.json": '{"passed": true, "style": 0.5}'}, 0.75),
    ],
)
def test_the_reward_is_in_one_of_two_files_whatever_the_exit_code(
    tmp_path: Path, files: dict[str, str], reward: float
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert verdict_of(0, tmp_path, "").reward == reward
    assert verdict_of(1, tmp_path, "2 failed").reward == reward


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({}, "the tests ended with exit code 1 and wrote neither reward.txt nor reward.json: no pytest"),
        ({"reward.txt": ""}, "reward.txt has '', but a reward must be a number"),
        ({"reward.txt": "nan"}, "reward.txt has 'nan', but a reward must be a number"),
        ({"reward.txt": "x" * 70_000}, "reward.txt has over 65536 bytes"),
        ({"reward.json": "[1]"}, "reward.json is not a JSON object that maps names to rewards"),
        ({"reward.json": "{}"}, "reward.json has no reward in it"),
        ({"reward.json": '{"reward": 1, "b": "0.5"}'}, "reward.json has '0.5', but a reward must be a number"),
        ({"reward.json": '{"reward": null}'}, "reward.json has 'None', but a reward must be a number"),
    ],
)
def test_tests_that_leave_no_number_have_not_judged(tmp_path: Path, files: dict[str, str], why: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(InfraError) as lost:
        verdict_of(1, tmp_path, "setting up\nno pytest\n")
    assert str(lost.value).startswith(why)


def test_tests_that_a_signal_ended_have_not_judged(tmp_path: Path) -> None:
    (tmp_path / "reward.txt").write_text("1")
    with pytest.raises(InfraError, match="ended by signal 9"):
        verdict_of(-9, tmp_path, "")


def test_what_is_not_a_file_is_not_followed_and_not_waited_for(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("1")
    (tmp_path / "reward.txt").symlink_to(secret)
    with pytest.raises(InfraError, match=r"reward\.txt cannot be read"):
        verdict_of(0, tmp_path, "")
    (tmp_path / "reward.txt").unlink()
    for made in (os.mkfifo, os.mkdir):
        made(tmp_path / "reward.txt")
        with pytest.raises(InfraError, match=r"reward\.txt is not a file"):
            verdict_of(0, tmp_path, "")
        os.rename(tmp_path / "reward.txt", tmp_path / made.__name__)


def test_rewards_with_names_are_kept(tmp_path: Path) -> None:
    (tmp_path / "reward.json").write_text('{"passed": 1, "style": 0}')
    assert verdict_of(0, tmp_path, "").parts == {"passed": 1.0, "style": 0.0}


def test_what_failing_tests_complain_of_is_kept(tmp_path: Path) -> None:
    (tmp_path / "reward.txt").write_text("0")
    assert verdict_of(1, tmp_path, "first\nassert 1 == 2\n").complaint == "assert 1 == 2"
    assert not verdict_of(0, tmp_path, "a warning\n").complaint, "tests that went as they should complain of nothing"
