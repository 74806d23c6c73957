"""What is folded of a run's events, against numbers worked out by hand; and the figures of answers."""

import itertools
from random import Random
from typing import Any

import msgspec
import pytest

from bombus.config.job import RunConfig
from bombus.hive import events as ev
from bombus.hive.events import AbortReason, DropReason, EpisodeType
from bombus.hive.failures import FailureKind
from bombus.hive.fates import Fate, StepTokens
from bombus.hive.records import CallRef
from bombus.replay.diagnosis import steps as series_module
from bombus.replay.diagnosis.answers import PHRASE_TOKENS, SampledAnswer, figures_of
from bombus.replay.diagnosis.diagnose import diagnose
from bombus.replay.diagnosis.findings import FaultKind
from bombus.replay.diagnosis.statistics import change, drift, noise, ratio, share_at_least, surprise
from bombus.replay.diagnosis.steps import RunSeries

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
    series = RunSeries("main", 1, RunConfig())
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
        msgspec.structs.replace(
            completed(1, entropy=0.5),
            tokens=StepTokens(left_out={"c": Fate.DROPPED_STALE, "d": Fate.DROPPED_UNREADABLE}),
        ),
        ev.EpisodeEnded(engine="main", run=1, client="y", type=EpisodeType.EVAL, version=1, outcomes=held_out),
        batch(2, ("t3", {"unknown": 1.0})),
        completed(2),
    )


def test_a_step_has_the_figures_of_its_batch_and_of_what_ended_before_it() -> None:
    first, second = one_step().steps
    assert (first.step, first.seq, first.groups, first.silent.count, first.groups_of_one) == (1, 9, 2, 1, 0)
    assert (first.rewards.count, first.rewards.mean, first.lowest, first.highest) == (4, 0.375, 0.0, 1.0)
    assert first.silent.mean == 0.25
    assert (first.ended, first.aborted, first.stale, first.unusable) == (4, {"environment": 1}, 3, 1)
    assert (first.tokens.total, first.failed) == (45, 1)
    assert {name: (each.count, each.mean) for name, each in first.clients.items()} == {"x": (1, 0.5), "y": (1, 0.25)}
    assert set(first.data_sets) == {"", "set"}
    assert first.metrics["reward/form"].mean == 1.0
    assert [first.lengths.correlation, first.verdicts.correlation] == pytest.approx([1.0, 1.0])
    assert (first.median_s, first.slowest_s, first.collecting_s, first.training_s) == (4.0, 6.0, 8.0, 5.0)
    assert first.trainer == {"entropy": 0.5}
    assert [(task, reward, call.seq) for task, reward, call in first.sampled] == [("t1", 1.0, 7)]
    assert (second.evaluated.count, second.evaluated_known, second.groups_of_one) == (1, 1, 1)
    assert second.tokens.count == 0, "an episode that ended before a compacted log has its reward alone"


def test_a_step_keeps_its_evaluation_episodes_while_they_are_among_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series_module, "EVALUATED_KEPT", 4)
    log: list[ev.AnyEvent] = []
    for step in range(1, 4):
        tasks = tuple(outcome(f"{step}-{task}", task, 1.0) for task in ("t1", "t2"))
        log.append(ev.EpisodeEnded(engine="main", run=1, client="x", type=EpisodeType.EVAL, outcomes=tasks))
        log += [batch(step, ("t", {f"e{step}": 1.0})), completed(step)]
    rows = folded(*log).steps
    assert [[each.task for each in row.played] for row in rows] == [[], ["t1", "t2"], ["t1", "t2"]]
    assert [row.evaluated.count for row in rows] == [2, 2, 2]


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


def test_a_task_repeats_if_one_of_the_steps_just_before_had_it() -> None:
    repeated = [row.repeated for row in folded(*played("a", "b", "a", "c", "d", "c", "a", "g", "e", "b")).steps]
    assert repeated == [None] * 5 + [1, 1, 0, 0, 0]


def played(*tasks: str) -> list[ev.AnyEvent]:
    """Return the events of steps with a group of each of these tasks."""
    return [
        each
        for step, of_step in enumerate(tasks, 1)
        for each in (batch(step, *((task, {f"e{step}{task}": 1.0}) for task in of_step)), completed(step))
    ]


@pytest.mark.parametrize("count", [8, 20, 36, 40, 48])
def test_a_run_that_plays_the_same_few_tasks_from_its_beginning_is_not_at_fault(count: int) -> None:
    tasks = itertools.cycle(map(chr, range(1000, 1000 + count)))
    always = ["".join(itertools.islice(tasks, 8)) for _ in range(30)]
    assert FaultKind.TASKS_REPEAT not in [found.kind for found in diagnose(folded(*played(*always)).steps, RunConfig())]
    late = ["".join(map(chr, range(2000 + 8 * step, 2008 + 8 * step))) for step in range(20)] + ["abcdefgh"] * 10
    assert FaultKind.TASKS_REPEAT in [found.kind for found in diagnose(folded(*played(*late)).steps, RunConfig())]


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
    assert (found.count, found.tasks, found.duplicates, found.constant) == (4, 2, [1, 0], 2)
    short = figures_of([answer("a", 1, (1, 2)), answer("a", 0, (1, 2))])
    assert short.duplicates == [], "short answers are equal by chance"
    assert figures_of([]).count == 0


def test_a_best_answer_that_stands_in_its_prompt_is_leaked() -> None:
    text = WORDS[:12]
    group = [answer("a", 1, text, (1, *text, 2)), answer("a", 1, text, (1, 2)), answer("a", 0, WORDS[:9], WORDS)]
    found = figures_of(group)
    assert (found.best, found.leaked) == (2, 1)


def test_tasks_with_one_prompt_are_counted_unless_an_earlier_call_comes_before_it() -> None:
    asked = [
        SampledAnswer(task, 1, prompt, WORDS[:9], opens=True) for task, prompt in zip("aabc", ((1,), (1,), (1,), (2,)))
    ]
    assert figures_of(asked).same_prompt == 2
    assert figures_of([answer(task, 1, WORDS[:9], (1,)) for task in "abc"]).same_prompt == 0


def test_a_phrase_has_its_shares_among_better_and_worse_answers() -> None:
    phrase = tuple(range(7000, 7000 + PHRASE_TOKENS))
    every = [answer(task, 1, (*phrase, number)) for number, task in enumerate("ab")]
    every += [answer(task, 0, WORDS[at : at + 9]) for at, task in enumerate("ab")]
    found = figures_of(every)
    assert found.phrases[hash(phrase)] == (0.5, 1.0, 0.0)


def test_a_batch_of_rollout_groups_has_the_figures_of_the_trainer() -> None:
    (row,) = folded(
        ev.BatchReady(engine="main", run=1, step=1, groups=(), config_digest="", taken=(1, 2, 3)),
        completed(1, groups=3.0, groups_without_signal=2.0, episodes=12.0, reward_mean=0.25, reward_std=0.5),
    ).steps
    assert (row.groups, row.silent.count, row.silent.mean) == (3, 2, 0.25)
    assert (row.rewards.count, row.rewards.mean, row.rewards.variance) == (12, 0.25, 0.25)


def test_metrics_that_are_not_finite_do_not_count() -> None:
    (row,) = folded(batch(1, ("t", {"a": 1.0})), completed(1, entropy=float("nan"), lr=1e-6)).steps
    assert row.trainer == {"lr": 1e-6}


def test_rewards_of_calls_give_a_group_its_signal_and_a_budget_that_is_used_up_truncates() -> None:
    calls = tuple(ev.NotedCall(name, CallRef(1, "c", b""), 5, 5, 0, 0) for name in "aabb")
    ends = (
        outcome("a", "t", 0.5, call_rewards=(1.0, 0.0), failure=FailureKind.TURNS),
        outcome("b", "t", 0.5, call_rewards=(0.0, 1.0)),
    )
    (row,) = folded(
        ev.EpisodeClaimed(engine="main", run=1, claim="c", client="x", episodes=("a", "b"), version=0),
        ev.CallsNoted(engine="main", run=1, calls=calls),
        ev.EpisodeEnded(engine="main", run=1, client="x", outcomes=ends),
        batch(1, ("t", {"a": 0.5, "b": 0.5})),
        completed(1),
    ).steps
    assert (row.silent.count, row.truncated) == (0, 1)


def any_event(chance: Random) -> ev.AnyEvent:
    """Return an event of an engine that has few episodes and tasks, which need not fit to those before it."""

    def name() -> str:
        return chance.choice("abcdef")

    reward, at_ns = chance.choice((0.0, 1.0, -1e9, 1e9, 0.5)), chance.randrange(100) * SECOND
    match chance.randrange(8):
        case 0:
            return ev.EpisodeClaimed(
                engine="main", at_ns=at_ns, run=1, claim="c", client="x", episodes=(name(), name()), version=0
            )
        case 1:
            return ev.CallsNoted(engine="main", run=1, calls=(ev.NotedCall(name(), CallRef(1, "c", b""), 5, 5, 0, 0),))
        case 2:
            kind = chance.choice(list(EpisodeType))
            ends = (outcome(name(), name(), reward, chance.randrange(99), log_metrics={"reward/a": reward}),)
            return ev.EpisodeEnded(engine="main", at_ns=at_ns, run=1, client=name(), type=kind, outcomes=ends)
        case 3:
            return ev.EpisodeAborted(engine="main", run=1, episodes=(name(),), reason=chance.choice(list(AbortReason)))
        case 4:
            return ev.GroupDropped(
                engine="main", run=1, reason=chance.choice(list(DropReason)), tasks=(), episodes=(name(),)
            )
        case 5:
            return ev.RollingStarted(engine="main", at_ns=at_ns, run=1, version=0)
        case 6:
            groups = [
                (name(), dict.fromkeys(chance.choices("abcdef", k=chance.randrange(4)), reward)) for _ in range(3)
            ]
            return batch(chance.randrange(3), *groups)
    return completed(chance.randrange(3), entropy=reward, kl_sampler=reward, groups=reward, episodes=reward)


@pytest.mark.parametrize("seed", range(20))
def test_no_order_of_events_raises(seed: int) -> None:
    chance = Random(seed)
    series = RunSeries("main", 1, RunConfig())
    for seq in range(600):
        series.note(seq, any_event(chance))
    assert series.steps
    diagnose(series.steps, series.job)
