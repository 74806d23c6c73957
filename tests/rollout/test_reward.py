"""Rewards from what a command printed, and how it ended."""

import re

import pytest

from bombus.rollout.reward import Judgement, judgement_of, reward_of
from bombus.sdk.errors import InfraError


@pytest.mark.parametrize(
    ("exit_code", "output", "reward"),
    [
        (0, "", 1.0),
        (1, "", 0.0),
        (3, "2 tests failed\n", 0.0),
        (0, "all well\n", 1.0),
        (0, "running\n0.25\n", 0.25),
        (1, "0.25\n\n", 0.25),
        (0, "  -3e-1  ", -0.3),
        (127, "0.5", 0.5),
        (255, "", 0.0),
        (0, "\x1b[32m0.25\x1b[0m\n", 0.25),
        (0, "\ufeff.5\r\n", 0.5),
    ],
)
def test_a_number_in_the_last_line_wins_over_the_exit_code(exit_code: int, output: str, reward: float) -> None:
    assert reward_of(exit_code, output) == reward


@pytest.mark.parametrize(
    ("exit_code", "output", "why"),
    [
        (127, "", "could not start"),
        (126, "", "could not start"),
        (-9, "", "ended by signal 9"),
        (-9, "cases run:\n41\n", "the reward command was ended by signal 9"),
        (137, "0.5", "a program that the reward command ran was ended by signal 9"),
        (137, "", "ended by signal 9"),
        (0, "1763850000000", "last line is 1763850000000, but must be at most 1e"),
        (0, "-1e300", "last line is -1e300"),
        (0, "nan", "last line is nan"),
        (0, "1e999", "last line is 1e999"),
    ],
)
def test_a_command_that_did_not_judge_is_an_infrastructure_failure(exit_code: int, output: str, why: str) -> None:
    with pytest.raises(InfraError, match=why):
        reward_of(exit_code, output)


@pytest.mark.parametrize("exit_code", [0, 1])
@pytest.mark.parametrize(
    "line",
    [
        *("0,375", "25%", "3/5", "[0.25]", "'0.25'", "(0.25,)", "1_0", "True", "False", "None", "null"),
        *("tensor(0.25)", "tensor(0.25, device='cuda:0')", "np.float64(0.25)", "Decimal('0.25')"),
        *("reward: 0.25", "Reward = 1", "reward 0.7", "The final score is 0,5", "**Reward:** 0.25", "reward: False"),
        *('{"reward": 0.25}', "{'score': 1}", '{"reward": {"value": 0.5}, "why": "late"}'),
    ],
)
def test_what_is_nearly_a_number_has_not_judged(exit_code: int, line: str) -> None:
    with pytest.raises(InfraError, match=re.escape(f"last line is {line!r}: print the reward alone on the last line")):
        reward_of(exit_code, f"judging\n{line}\n")


@pytest.mark.parametrize("after", ["warning: deprecated", "make: Leaving directory '/judge'"])
def test_a_number_that_is_not_in_the_last_line_has_not_judged(after: str) -> None:
    with pytest.raises(InfraError, match=re.escape("last line but one is '0.25': print the reward alone")):
        reward_of(0, f"0.25\n{after}\n")
    with pytest.raises(InfraError, match="last line but one"):
        reward_of(0, '{\n  "reward": 0.25\n}\n')


@pytest.mark.parametrize(
    "last",
    [
        "============================== 3 passed in 0.12s ===============================",
        "========================= 1 failed, 2 passed in 0.12s ==========================",
        "3 passed in 0.12s",
        "...                                                                      [100%]",
        "Ran 3 tests in 0.001s\n\nOK",
        "FAILED (failures=1, errors=2)",
        "test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s",
        "ok  \texample.com/score\t0.012s",
        "FAIL\texample.com/reward\t0.012s",
        "PASS",
        "make: *** [Makefile:3: score] Error 1",
        "make: 'reward' is up to date.",
        "3 examples, 0 failures",
        "  3 passing (5ms)",
        "Tests:       1 failed, 2 passed, 3 total",
        "100% tests passed, 0 tests failed out of 3",
        "1..5",
        "Result: PASS",
        "OK (3 tests, 5 assertions)",
        "Your code has been rated at 7.50/10 (previous run: 7.00/10, +0.50)",
        "All checks passed!",
        "Found 3 errors in 1 file (checked 2 source files)",
        '[{"filePath": "a.js", "errorCount": 0}]',
        '{"event": "ok", "passed": 3}',
    ],
)
def test_programs_that_test_are_judged_by_their_exit_code(last: str) -> None:
    assert reward_of(0, f"collected 3 items\n{last}\n") == 1.0
    assert reward_of(1, f"collected 3 items\n{last}\n") == 0.0


def test_what_a_failed_command_said_is_kept_with_a_reward_of_nothing() -> None:
    assert judgement_of(1, "", "Traceback\nNo module named x\n") == Judgement(0.0, "No module named x")
    assert judgement_of(1, "0.5", "slow") == Judgement(0.5)
    assert judgement_of(0, "0", "slow") == Judgement(0.0)
    with pytest.raises(InfraError, match=r"could not start .*: no judge"):
        judgement_of(127, "", "no judge\n")
