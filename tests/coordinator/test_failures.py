"""Failures of episodes: which kind is on the log, what is counted, and that none but a budget ends with a reward."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bombus.errors import Code
from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.events import AbortReason
from bombus.hive.failures import FailureKind
from bombus.hive.inbox import Done, EpisodeResult
from bombus.hive.status.data import status_dict
from bombus.hive.status.text import render_status
from tests.coordinator.core_in_memory import ENGINE, CoreHarness

UNTRAINED = [kind for kind in FailureKind if not kind.is_trained]
BUDGETS = [kind for kind in FailureKind if kind.is_trained]


@pytest.fixture
def harness() -> CoreHarness:
    return rolling()


def rolling() -> CoreHarness:
    harness = CoreHarness()
    harness.boot()
    return harness


def ends(harness: CoreHarness, episode: str, failure: FailureKind | None, reward: float = 1.0) -> inbox.AnyAnswer:
    result = EpisodeResult(episode=episode, task="t1", reward=reward, failure=failure)
    return harness.request(inbox.End(id=harness.id(), engine=ENGINE, client="c1", results=(result,)))


@pytest.mark.parametrize("kind", FailureKind)
def test_the_kind_of_an_abort_is_on_the_log_and_counted_and_nothing_of_it_is_trained(
    harness: CoreHarness, kind: FailureKind
) -> None:
    (episode,) = harness.claim()
    harness.call(episode)
    (gone,) = harness.send(inbox.Abort(id="a", engine=ENGINE, client="c1", episodes=(episode,), failure=kind))
    assert isinstance(gone, ev.EpisodeAborted)
    assert (gone.failure, gone.failed_by) == (kind, kind)
    assert gone.reason == (AbortReason.INFRA if kind.is_infra else AbortReason.CLIENT)
    counters = harness.engine.counters
    assert (counters.aborted_by, counters.ended_by) == ({kind: 1}, {})
    assert (harness.engine.pool, counters.ended, counters.trained) == ({}, 0, 0)


@pytest.mark.parametrize("kind", BUDGETS)
def test_an_episode_may_end_at_a_budget_which_is_recorded_beside_its_reward(
    harness: CoreHarness, kind: FailureKind
) -> None:
    (episode,) = harness.claim()
    harness.call(episode)
    assert isinstance(ends(harness, episode, kind, 0.25), Done)
    (ended,) = (event for event in harness.log if isinstance(event, ev.EpisodeEnded))
    assert [(outcome.reward, outcome.failure) for outcome in ended.outcomes] == [(0.25, kind)]
    assert harness.engine.counters.ended_by == {kind: 1}
    assert episode in harness.engine.pool


@given(
    kind=st.sampled_from(UNTRAINED),
    reward=st.none() | st.floats(),
    call_rewards=st.none() | st.lists(st.floats(), max_size=2).map(tuple),
    by_call=st.none() | st.dictionaries(st.sampled_from("ab"), st.floats(), max_size=2),
)
def test_no_report_of_another_failure_ever_ends_an_episode(
    kind: FailureKind,
    reward: float | None,
    call_rewards: tuple[float, ...] | None,
    by_call: dict[str, float] | None,
) -> None:
    harness = rolling()
    (episode,) = harness.claim()
    harness.call(episode, name="a")
    result = EpisodeResult(
        episode=episode, task="t1", reward=reward, call_rewards=call_rewards, rewards_by_call=by_call, failure=kind
    )
    answer = harness.request(inbox.End(id="e", engine=ENGINE, client="c1", results=(result,)))
    assert isinstance(answer, inbox.Refusal)
    assert answer.code == Code.BAD_REWARD
    assert not any(isinstance(event, ev.EpisodeEnded) for event in harness.log)
    assert episode in harness.engine.open


def test_what_the_hive_takes_away_and_what_older_clients_report_has_a_kind_too(harness: CoreHarness) -> None:
    (old,) = harness.claim()
    harness.send(inbox.Abort(id="a", engine=ENGINE, client="c1", episodes=(old,), infra=True))
    (unused,) = harness.claim()
    harness.send(inbox.Abort(id="b", engine=ENGINE, client="c1", episodes=(unused,)))
    harness.claim()
    harness.tick(10_000)
    harness.claim()
    harness.send(inbox.Stop(id="s", engine=ENGINE))
    counted = harness.engine.counters.aborted_by
    assert counted == {FailureKind.ENVIRONMENT: 1, FailureKind.CLIENT: 1, FailureKind.HIVE: 1}
    assert harness.engine.counters.aborted == 4


def test_the_status_says_the_kinds_in_one_line(harness: CoreHarness) -> None:
    episodes = harness.claim(count=4)
    harness.send(inbox.Abort(id="a", engine=ENGINE, client="c1", episodes=episodes[:2], failure=FailureKind.GRADER))
    harness.send(inbox.Abort(id="b", engine=ENGINE, client="c1", episodes=episodes[2:3], failure=FailureKind.TOOL))
    harness.call(episodes[3])
    ends(harness, episodes[3], FailureKind.TIME)
    line = "  failed episodes: 2 grader, 1 tool (aborted, no reward); 1 time (at a budget, with a reward)\n"
    assert line in render_status(harness.core.hive)
    engine: dict[str, object] = status_dict(harness.core.hive)["engines"][0]  # type: ignore[index]
    assert (engine["aborted_by"], engine["ended_by"]) == ({"grader": 2, "tool": 1}, {"time": 1})
