"""What is folded of a run's events, against numbers worked out by hand; and the figures of answers."""

from typing import Any

import pytest

from bombus.hive import events as ev
from bombus.hive.diagnosis import run as series_module
from bombus.hive.diagnosis.answers import PHRASE_TOKENS, SampledAnswer, figures_of
from bombus.hive.diagnosis.run import JobSettings, RunSeries
from bombus.hive.diagnosis.statistics import change, drift, noise, ratio, share_at_least, surprise
from bombus.hive.events import AbortReason, DropReason, EpisodeType
from bombus.hive.records import CallRef

SECOND = 1_000_000_000


def outcome(name: str, task: str, reward: float, tokens: int = 10, **more: Any) -> ev.Outcome:
    return ev.Outcome(
        episode=name, task=task, reward=reward, digest=b"", completion_tokens=tokens, is_success=reward > 0.5, **more
    )


def batch(step: int, *groups: tuple[str, dict[str, float]]) -> ev.BatchReady:
    sealed = tuple(
        ev.BatchGroup(
            task=task, episodes=tuple(ev.BatchEpisode(episode=name, reward=each) for name, each in members.items())
        )
        for task, members in groups
    )
    return ev.BatchReady(engine="main", at_ns=9 * SECOND, run=1, step=step, groups=sealed, config_digest="")


def completed(step: int, **metrics: float) -> ev.StepCompleted:
    return ev.StepCompleted(
        engine="main",
        at_ns=14 * SECOND,
        run=1,
        step=step,
        trainer_epoch=1,
        checkpoint="",
        checkpoint_digest="",
        metrics=metrics,
    )


def folded(*events: ev.AnyEvent) -> RunSeries:
    series = RunSeries("main", 1, JobSettings())
    for seq, event in enumerate(events, 1):
        series.note(seq, event)
    return series


def one_step() -> RunSeries:
    claimed = ev.EpisodeClaimed(
        engine="main",
        at_ns=2 * SECOND,
        run=1,
        claim="c",
        client="x",
        episodes=("a", "b", "c", "d", "lost", "held"),
        version=0,
    )
    call = ev.NotedCall("a", CallRef(7, "call", b""), 5, 10, 0, 0)
    first = (outcome("a", "t1", 1.0, 30, log_metrics={"reward/form": 1.0}), outcome("b", "t1", 0.0, 10))
    second = (outcome("c", "t2", 0.25, 0), outcome("d", "t2", 0.25, 5, data_set="set"))
    held_out = (outcome("held", "t1", 0.5),)
    return folded(
        ev.RollingStarted(engine="main", at_ns=1 * SECOND, run=1, version=0),
        claimed,
        ev.CallsNoted(engine="main", run=1, calls=(call,)),
        ev.EpisodeEnded(engine="main", at_ns=4 * SECOND, run=1, client="x", outcomes=first),
        ev.EpisodeEnded(engine="main", at_ns=8 * SECOND, run=1, client="y", outcomes=second),
        ev.EpisodeEnded(engine="other", run=1, client="y", outcomes=second),
        ev.EpisodeAborted(engine="main", run=1, episodes=("lost",), reason=AbortReason.INFRA),
        ev.GroupDropped(engine="main", run=1, reason=DropReason.STALE, tasks=("t",), episodes=("old", "older")),
        batch(1, ("t1", {"a": 1.0, "b": 0.0}), ("t2", {"c": 0.25, "d": 0.25})),
        completed(1, entropy=0.5),
        ev.EpisodeEnded(engine="main", run=1, client="y", type=EpisodeType.EVAL, version=1, outcomes=held_out),
        batch(2, ("t3", {"unknown": 1.0})),
        completed(2),
    )


def test_a_step_has_the_figures_of_its_batch_and_of_what_ended_before_it() -> None:
    first, second = one_step().steps
    assert (first.step, first.seq, first.groups, first.groups_silent, first.groups_of_one) == (1, 9, 2, 1, 0)
    assert (first.rewards.count, first.rewards.mean, first.lowest, first.highest) == (4, 0.375, 0.0, 1.0)
    assert first.silent_rewards.mean == 0.25
    assert (first.ended, first.aborted, first.dropped) == (4, {"infra": 1}, {"stale": 2})
    assert (first.tokens.total, first.failed.count, first.failed.mean) == (45, 1, 0.25)
    assert {name: (each.count, each.mean) for name, each in first.clients.items()} == {"x": (1, 0.5), "y": (1, 0.25)}
    assert set(first.data_sets) == {"", "set"}
    assert first.parts()["reward/form"].mean == 1.0
    assert [first.lengths.correlation, first.verdicts.correlation] == pytest.approx([1.0, 1.0])
    assert (first.median_s, first.slowest_s, first.collecting_s, first.training_s) == (4.0, 6.0, 8.0, 5.0)
    assert first.trainer == {"entropy": 0.5}
    assert [(each.task, each.call.seq) for each in first.sampled] == [("t1", 7)]
    assert (second.evaluated.count, second.evaluated_known, second.groups_of_one) == (1, 1, 1)
    assert second.tokens.count == 0, "an episode that ended before a compacted log has its reward alone"


def test_events_of_other_runs_are_ignored_and_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series_module, "STEPS_KEPT", 3)
    monkeypatch.setattr(series_module, "EPISODES_KEPT", 2)
    ended = [
        ev.EpisodeEnded(engine="main", run=1, client="x", outcomes=(outcome(f"e{number}", "t", 1.0),))
        for number in range(5)
    ]
    older = ev.EpisodeAborted(engine="main", run=0, episodes=("z",), reason=AbortReason.IDLE)
    steps = [each for step in range(1, 6) for each in (batch(step, ("t", {f"e{step - 1}": 1.0})), completed(step))]
    series = folded(older, *ended, *steps)
    assert [row.step for row in series.steps] == [3, 4, 5]
    assert [row.tokens.count for row in series.steps] == [0, 1, 1]
    assert not any(row.aborted for row in series.steps)


def test_statistics_against_numbers_by_hand() -> None:
    assert noise([1.0, 2.0, 1.0, 2.0]) == pytest.approx(0.5**0.5)
    assert [change([1.0, 1.0], [2.0]), change([], [1.0])] == [float("inf"), 0.0]
    assert change([0.0, 2.0, 0.0, 2.0], [2.0] * 4) == pytest.approx(1 / (2**0.5 * 0.5**0.5 * 1.75))
    assert drift([1.0, 2.0, 3.0, 4.0], [0.0, 0.0]) == pytest.approx(3.0), "from 2.5 in the middle to 5.5"
    assert surprise([1.0, 2.0, 3.0, 4.0], [5.0, 6.0]) == pytest.approx(0.0)
    assert [ratio([2.0, 4.0, 6.0], [8.0]), ratio([0.0], [1.0]), ratio([], [])] == [2.0, float("inf"), 1.0]
    assert share_at_least(50, 100, 1.96) == pytest.approx(0.4038, abs=1e-4)
    assert share_at_least(0, 0) == 0.0


WORDS = tuple(range(100, 140))


def answer(task: str, reward: float, tokens: tuple[int, ...], prompt: tuple[int, ...] = ()) -> SampledAnswer:
    return SampledAnswer(task, reward, prompt, tokens)


def test_answers_that_repeat_are_counted_in_their_group_and_over_tasks() -> None:
    same, other = WORDS[:10], WORDS[10:20]
    found = figures_of([answer("a", 1, same), answer("a", 0, same), answer("a", 0, other), answer("b", 1, same)])
    assert (found.count, found.tasks, found.duplicates, found.constant) == (4, 2, 0.5, 1.0)
    short = figures_of([answer("a", 1, (1, 2)), answer("a", 0, (1, 2))])
    assert short.duplicates == 0.0, "short answers are equal by chance"
    assert figures_of([]).count == 0


def test_a_best_answer_that_stands_in_its_prompt_is_leaked() -> None:
    text = WORDS[:12]
    group = [answer("a", 1, text, (1, *text, 2)), answer("a", 1, text, (1, 2)), answer("a", 0, WORDS[:9], WORDS)]
    found = figures_of(group)
    assert (found.best, found.leaked) == (2, 0.5)


def test_a_phrase_has_its_shares_among_better_and_worse_answers() -> None:
    phrase = tuple(range(7000, 7000 + PHRASE_TOKENS))
    every = [answer(task, 1, (*phrase, number)) for number, task in enumerate("ab")]
    every += [answer(task, 0, WORDS[at : at + 9]) for at, task in enumerate("ab")]
    found = figures_of(every)
    assert found.phrases[hash(phrase)] == (0.5, 1.0, 0.0)
