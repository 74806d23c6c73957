"""`bombus replay episodes`: the ended episodes of a log, sorted."""

import json

import pytest

from bombus.cli import main
from tests.logs.facts import TINY

Capture = pytest.CaptureFixture[str]


def episodes(capsys: Capture, *words: str) -> list[str]:
    assert main(["replay", "episodes", "--log", str(TINY), *words]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_worst_episodes_come_first_and_in_reverse_the_best(capsys: Capture) -> None:
    every = [json.loads(line) for line in episodes(capsys, "--json", "--limit", "1000")]
    rewards = sorted(one["reward"] for one in every)
    assert len(set(rewards)) > 1
    for words, expected in (([], rewards), (["--reverse"], rewards[::-1])):
        found = episodes(capsys, "--sort", "reward", "--limit", "3", "--json", *words)
        assert [json.loads(line)["reward"] for line in found] == expected[:3]
    (first, *_) = episodes(capsys, "--sort", "reward")
    assert f"reward {rewards[0]:>8.4g}" in first
    task = every[0]["task"]
    assert {json.loads(line)["task"] for line in episodes(capsys, "--json", "--task", task)} == {task}


def test_a_log_without_such_episodes_says_so(capsys: Capture) -> None:
    assert main(["replay", "episodes", "--log", str(TINY), "--task", "nobody's"]) == 0
    assert "no such episode has ended in" in capsys.readouterr().err
