"""What counts as a signal: collection, advantages and slime's filter have one definition."""

import math
import random
from argparse import Namespace
from types import SimpleNamespace

import pytest

from bombus.config.algorithms import Estimator
from bombus.datums.advantages import call_advantages
from bombus.hive.collection import has_signal, pick
from bombus.hive.records import CallRef
from bombus.hive.state import Completed
from bombus.slime.filters import check_reward_nonzero_std

Given = tuple[float, tuple[float, ...] | None, int]  # a reward, those of the calls, and how many calls there are


def group_of(*given: Given) -> list[Completed]:
    return [
        Completed(
            episode=f"e{place}", task="t", client="c", reward=reward, call_rewards=of_calls,
            calls=tuple(CallRef(1, f"c{call}", b"") for call in range(calls)), oldest=0, bytes=1, ended_ns=place,
        )
        for place, (reward, of_calls, calls) in enumerate(given)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "signal"),
    [
        ([(0.0, None, 1), (1.0, None, 1)], True),
        ([(0.0, None, 1), (1e-7, None, 1)], False),
        ([(0.5, None, 2), (0.5, None, 3)], False),
        ([(0.5, None, 1)], False),
        ([(0.5, None, 1), (math.nan, None, 1)], True),  # which is how the trainer finds it, and leaves the group out
        ([(0.0, (1.0, 2.0), 2), (5.0, (1.0, 2.0), 2)], False),  # calls are compared, and their rewards are equal
        ([(1.0, (1.0,), 1), (1.0, (1.0, 4.0), 2)], False),  # nobody else reached the second turn
        ([(1.0, (1.0, 4.0), 2), (1.0, None, 2)], True),  # without rewards of its own a call has its episode's
    ],
)
def test_a_group_is_collected_as_one_with_a_signal_where_it_would_be_trained(given: list[Given], signal: bool) -> None:
    assert has_signal(group_of(*given)) is signal


@pytest.mark.parametrize("estimator", [each for each in Estimator if not each.over_batch])
def test_groups_with_a_signal_are_exactly_those_with_advantages(estimator: Estimator) -> None:
    draw = random.Random(0)
    seen = set()
    for _ in range(300):
        counts = [draw.randint(1, 3) for _ in range(draw.randint(1, 4))]
        near = [1.0, 1.0 + 1e-7, 1.0 + 3e-6]
        given = [
            (draw.choice(near), tuple(draw.choices(near, k=count)) if draw.random() < 0.3 else None, count)
            for count in counts
        ]
        advantages = call_advantages(
            [reward for reward, _, _ in given],
            [of_calls for _, of_calls, _ in given],
            [[draw.randint(1, 9) for _ in range(count)] for count in counts],
            estimator,
        )
        signal = has_signal(group_of(*given))
        assert any(any(of_calls) for of_calls in advantages) is signal, given
        seen.add(signal)
    assert seen == {True, False}


def test_a_later_episode_gives_a_group_its_signal_only_if_it_differs_enough_to_be_trained() -> None:
    group = group_of((1.0, None, 1), (1.0, None, 1), (1.0 + 1e-7, None, 1), (2.0, None, 1))
    assert [each.reward for each in pick(group, 2)] == [1.0, 2.0]
    assert pick(group[:3], 2) == group[:2]


@pytest.mark.parametrize(("other", "kept"), [(1.0 + 1e-7, False), (1.0 + 3e-6, True)])
def test_slimes_filter_keeps_the_groups_that_would_be_trained(other: float, kept: bool) -> None:
    samples = [SimpleNamespace(get_reward_value=lambda _, reward=reward: reward) for reward in (1.0, other)]
    assert check_reward_nonzero_std(Namespace(), samples).keep is kept
