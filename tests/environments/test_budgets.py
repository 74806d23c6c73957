"""What a rollout may use where nothing is said: the defaults, or what the variables say."""

import pytest

from bombus import RolloutBudgets
from bombus.errors import Refused


def test_turns_and_tokens_are_those_of_the_variables_where_none_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (RolloutBudgets().turns_max, RolloutBudgets().tokens_max) == (6, 4096)
    monkeypatch.setenv("MAX_TURNS", "2")
    monkeypatch.setenv("MAX_TOTAL_TOKENS", "512")
    assert (RolloutBudgets().turns_max, RolloutBudgets().tokens_max) == (2, 512)
    given = RolloutBudgets(turns_max=3, tokens_max=1000)
    assert (given.turns_max, given.tokens_max) == (3, 1000), "what a program says comes first"


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("MAX_TURNS", "0", "MAX_TURNS is '0': it must be a number from 1 to 10000"),
        ("MAX_TURNS", "six", "MAX_TURNS is 'six'"),
        ("MAX_TOTAL_TOKENS", "1", "MAX_TOTAL_TOKENS is '1': it must be a number from 2 to 10000000"),
        ("MAX_TOTAL_TOKENS", "9" * 5000, "MAX_TOTAL_TOKENS is '9999"),
    ],
)
def test_a_variable_that_makes_no_sense_is_refused(
    name: str, text: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(Refused, match=why):
        RolloutBudgets()


def test_a_variable_that_is_blank_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_TURNS", " ")
    assert RolloutBudgets().turns_max == 6
