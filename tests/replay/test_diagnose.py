"""`bombus diagnose` on recorded logs."""

import json

import pytest

from bombus.cli import main
from tests.logs.facts import TINY

Capture = pytest.CaptureFixture[str]


def test_a_log_is_diagnosed_and_the_exit_code_says_whether_something_was_found(capsys: Capture) -> None:
    code = main(["diagnose", "--log", str(TINY), "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert code == int(bool(shown["findings"]))
    assert main(["diagnose", "--log", str(TINY)]) == code
    printed = capsys.readouterr().out
    assert f"run {shown['run']} of engine main" in printed
    assert ("Nothing was found" in printed) == (code == 0)


def test_an_earlier_moment_or_run_is_diagnosed_and_what_is_missing_is_refused(capsys: Capture) -> None:
    assert main(["diagnose", "--log", str(TINY), "--run", "1", "--no-answers"]) in (0, 1)
    assert "run 1 of engine main" in capsys.readouterr().out
    assert main(["diagnose", "--log", str(TINY), "--at", "30"]) in (0, 1)
    for words in (["--run", "77"], ["--engine", "none"], ["--at", "999999"]):
        capsys.readouterr()
        assert main(["diagnose", "--log", str(TINY), *words]) == 1
        assert capsys.readouterr().err.startswith("bombus diagnose: ")
