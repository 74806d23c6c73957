"""Rewards of samples: which function is asked, and the rule for boxed answers."""

import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest

from bombus.errors import Refused
from bombus.slime.functions import load_function, make_slime_importable
from bombus.slime.rewards import async_rm, score_of_box
from bombus.slime.types import SlimeSample

HOOKS = Path(__file__).parent / "programs/search_turns.py"


@pytest.fixture(autouse=True)
def imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    load_function.cache_clear()
    assert make_slime_importable()
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("slime", "search_turns")]:
        del sys.modules[name]


async def test_a_samples_own_function_comes_before_that_of_the_command_line() -> None:
    args = Namespace(custom_rm_path=f"{HOOKS}:reward_func", rm_type=None)
    assert await async_rm(args, SlimeSample(response="?")) == {"score": 0.0}
    assert await async_rm(args, SlimeSample(response="?", custom_rm_path=f"{HOOKS}:seven")) == 7.0


async def test_without_any_reward_function_it_is_said_how_to_name_one() -> None:
    with pytest.raises(Refused, match="name one with --custom-rm-path"):
        await async_rm(Namespace(custom_rm_path=None, rm_type=None), SlimeSample())


@pytest.mark.parametrize(
    ("solution", "pred", "score"),
    [
        (r"first \boxed{1}, so \boxed{42}.", "42", 1.0),
        (r"so \boxed{\frac{1}{2}}", r"\frac{1}{2}", -1.0),
        (r"so \boxed{ 42}", " 42", -1.0),
        (r"so \boxed{42", None, -1.0),
        ("so 42", None, -1.0),
        (r"\boxed{42}" + "." * 90, "42", 1.0),
        (r"\boxed{42}" + "." * 91, None, -1.0),  # the box begins before the last hundred characters
    ],
)
def test_the_last_box_has_to_hold_the_very_answer(solution: str, pred: str | None, score: float) -> None:
    found = score_of_box(solution, "42", strict_box_verify=True)
    assert found == {"score": score, "acc": score > 0, "pred": pred}


def test_the_rules_for_units_are_refused_with_what_to_do() -> None:
    with pytest.raises(Refused, match=r"only with strict_box_verify=True.*Put a copy of that file beside the hook"):
        score_of_box("Answer: 42", "42")
