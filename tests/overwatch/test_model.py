"""The fold that the screen draws, and the screen's data."""

import asyncio
import time
from typing import cast, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bombus.figures import seconds_between
from bombus.hive import events as ev
from bombus.hive.describe import KINDS, EventGroup, line_of
from bombus.hive.events import AbortReason, EpisodeType
from bombus.hive.state import Hive
from bombus.insight.charts import OF, points
from bombus.insight.metrics import step_metrics
from bombus.insight.record import Moment, Record
from bombus.insight.runs import Runs
from bombus_overwatch.model import TAIL_SHOWN, HiveView
from bombus_overwatch.screen import MERGED, Screen, StageState, screen_data
from bombus_overwatch.widgets import NEAR_LIMIT, count_of, name_of, share_used
from tests.coordinator.multi_model_in_memory import BIG, SMALL, THIRD, MultiModelHarness
from tests.coordinator.steady_clients import Steady
from tests.overwatch.story import ENGINE, SECOND, Folded, Story, ToldWatch, chaos, failed, operating, rolling


def shown(story: Story, after_s: float = 0.0, group: EventGroup = EventGroup.ALL) -> Screen:
    record = Folded(story.events)
    return screen_data(record, record.live, story.now_ns + int(after_s * SECOND), ENGINE, group)


@pytest.fixture
def story() -> Story:
    """An engine that rolls on version 0."""
    story = Story()
    story.boot()
    story.publish(0)
    return story


# ---- rewards and figures --------------------------------------------------------------------------------------


def test_training_reward_is_the_mean_of_a_steps_batch(story: Story) -> None:
    for reward in (0.25, 0.75):
        story.end(0, story.claim(0, "t"), "t", reward)
    assert (shown(story).rewards.now_mean, shown(story).rewards.now_episodes) == (0.5, 2)
    assert shown(story).rewards.train == (), "they are in no batch yet"
    story.train(0)
    batch = next(event for event in story.events if isinstance(event, ev.BatchReady))
    rewards = [each.reward for group in batch.groups for each in group.episodes]
    assert [step for step, _ in shown(story).rewards.train] == [1]
    assert shown(story).rewards.train[0][1] == pytest.approx(sum(rewards) / len(rewards))


def test_the_curves_are_those_of_the_page(story: Story) -> None:
    for version in range(3):
        story.train(version)
    runs = Runs(Hive())
    for position, event in enumerate(story.events, 1):
        runs.note(position, cast(ev.AnyEvent, event))
    series, screen = runs.newest(ENGINE, "this log"), shown(story)
    on_page = {key: points(OF[key], series) for key in ("reward", "loss", "grad_norm")}
    rewards = [(point["x"], point["y"]) for point in on_page["reward"] if point["figure"] == "reward/mean"]
    assert list(screen.rewards.train) == rewards
    assert list(screen.training.loss) == [point["y"] for point in on_page["loss"]]
    assert list(screen.training.grad_norm) == [point["y"] for point in on_page["grad_norm"]]
    assert screen.training.metrics.items() >= step_metrics(series.steps[-1]).items()


def test_a_view_of_the_past_shows_the_steps_that_were_known_then(story: Story) -> None:
    for version in range(3):
        story.train(version)
    second = [n for n, event in enumerate(story.events, 1) if isinstance(event, ev.StepCompleted)][1]
    record = Folded(story.events)
    past = screen_data(record, Folded(story.events[:second]).live, story.now_ns, ENGINE)
    assert (past.training.last_step, len(past.training.loss)) == (2, 2)


def test_held_out_episodes_have_a_curve_of_their_own(story: Story) -> None:
    story.end(0, story.claim(0, "t", EpisodeType.EVAL), "t", 1.0, EpisodeType.EVAL)
    rewards = shown(story).rewards
    assert rewards.held_out == ((0, 1.0),)
    assert rewards.now_episodes == 0
    assert rewards.data_sets == ()


def test_the_data_sets_of_the_newest_version_that_was_evaluated_are_shown(story: Story) -> None:
    for version, data_set, reward in ((0, "old", 1.0), (1, "legs", 0.5), (1, "legs", 0.0), (1, "a\nb", 1.0)):
        story.end(version, story.claim(version, "t", EpisodeType.EVAL), "t", reward, EpisodeType.EVAL, data_set)
    assert shown(story).rewards.data_sets == (("a b", 1.0), ("legs", 0.25))


def test_a_new_run_starts_new_curves_and_keeps_the_tail(story: Story) -> None:
    story.train(0)
    assert shown(story).training.loss
    story.tell(ev.EngineStopped(at_ns=story.now_ns, engine=ENGINE, run=1))
    story.tell(ev.EngineStarted(at_ns=story.now_ns, engine=ENGINE, run=2, config_digest="d"))
    screen = shown(story)
    assert screen.rewards.train == ()
    assert screen.training.loss == ()
    assert screen.tail[-2].text == "run 1 stopped"


def test_a_steps_figures_come_from_its_metrics(story: Story) -> None:
    story.train(0)
    training = shown(story).training
    assert training.last_step == 1
    assert len(training.loss) == len(training.grad_norm) == 1
    assert training.metrics[MERGED] == 0.93
    assert training.metrics["policy/clipped_share"] == 0.012


def test_before_the_first_step_the_merge_share_is_that_of_the_calls(story: Story) -> None:
    story.call(0, *(story.claim(0, "t") for _ in range(8)))
    merged = sum(call.merged for event in story.events if isinstance(event, ev.CallsNoted) for call in event.calls)
    assert shown(story).training.metrics[MERGED] == merged / 8


def test_the_step_in_flight_has_its_time_and_size(story: Story) -> None:
    groups = tuple(story.groups(0, 2))
    story.tell(ev.BatchReady(at_ns=story.now_ns, engine=ENGINE, run=1, step=1, groups=groups, config_digest="d"))
    screen = shown(story, after_s=4.0)
    trainer = screen.status.trainer
    assert (trainer.step_in_flight, trainer.groups, trainer.episodes) == (1, 2, 8)
    assert seconds_between(trainer.step_since_ns, screen.now_ns) == 4.0


def test_a_step_of_an_asynchronous_run_is_in_flight_while_the_engine_rolls_and_episodes_are_open() -> None:
    run = Steady(0, 12, (4.0, 6.0), 10.0, batch_size=2, num_repeat=2, max_staleness=1)
    run.run(100)
    record, paced = Folded(), 0
    for position, event in enumerate(run.harness.log, 1):
        record.fold(position, cast(ev.AnyEvent, event), event.at_ns)
        status = screen_data(record, record.live, event.at_ns, ENGINE).status
        if isinstance(event, ev.EpisodeEnded) and status.trainer.step_in_flight:
            assert f"step {status.trainer.step_in_flight} training" in status.detail
            assert status.pace is not None
            paced += bool(status.pace.waits)
    assert paced > 10
    assert len(record.runs.series[f"{ENGINE}-1"].steps) > 5


def test_rates_are_means_over_log_time_and_fade_when_nothing_comes(story: Story) -> None:
    episode = story.claim(0, "t")
    for _ in range(60):
        story.wait(1.0)
        story.call(0, episode)
    second = story.now_ns // SECOND
    recent = [e for e in story.events if isinstance(e, ev.CallsNoted) and second - 10 <= e.at_ns // SECOND < second]
    tokens = sum(call.completion_tokens for event in recent for call in event.calls)
    assert shown(story).tokens_s == pytest.approx(tokens / 10)
    assert sum(shown(story).tokens[-11:-1]) == tokens
    assert shown(story, after_s=60).tokens_s == 0.0


def test_losses_are_counted_by_reason(story: Story) -> None:
    story.abort(AbortReason.IDLE, story.claim(0, "t"), story.claim(0, "t"))
    story.abort(AbortReason.CLIENT, story.claim(0, "t"))
    cleared = ev.PoolCleared(
        at_ns=story.now_ns, engine=ENGINE, run=1, reason=ev.DropReason.OVERFLOW, episodes=9, bytes=1
    )
    story.tell(cleared)
    screen = shown(story)
    assert screen.lost == ((("aborted", "idle"), 2), (("aborted", "by its client"), 1), (("dropped", "overflow"), 9))


# ---- episodes, boot, engines ----------------------------------------------------------------------------------


def test_episodes_are_sorted_by_idle_time_and_stand_out_near_their_limit(story: Story) -> None:
    first = story.claim(0, "t", limit_s=60.0)
    story.wait(50)
    second = story.claim(0, "t", limit_s=240.0)
    rows = shown(story).episodes
    assert [name_of(row) for row in rows] == [first, second]
    assert [share_used(row) >= NEAR_LIMIT for row in rows] == [True, False]
    story.call(0, first)
    assert [name_of(row) for row in shown(story).episodes] == [second, first]


def test_stages_of_booting_have_their_times() -> None:
    story = Story()
    story.boot()
    stages = shown(story, after_s=1.0).stages
    assert [stage.name for stage in stages] == ["reading the model", "writing version 0", "replicas load"]
    assert [stage.state for stage in stages] == [StageState.DONE, StageState.DONE, StageState.RUNNING]
    assert [stage.took_s for stage in stages] == pytest.approx([6.2, 3.1, 3.4])


def test_the_stage_that_failed_is_marked() -> None:
    assert [stage.state for stage in shown(failed()).stages] == [StageState.DONE, StageState.DONE, StageState.BROKEN]


def test_a_run_that_fails_later_did_boot(story: Story) -> None:
    story.wait(3600)
    story.tell(ev.EngineFailed(at_ns=story.now_ns, engine=ENGINE, run=1, reason="r"))
    last = shown(story).stages[-1]
    assert last.state == StageState.DONE
    assert last.took_s == pytest.approx(2.4 + 0.8)


def test_each_engine_is_shown_alone_with_the_events_of_the_hive() -> None:
    one, other = Story(engine="one"), Story(engine="two")
    one.boot()
    other.boot()
    record = Folded(one.events + other.events[1:])
    screen = screen_data(record, record.live, one.now_ns, "two")
    assert screen.engines == ("one", "two")
    assert screen.tail[0].text == "epoch 1 opened by coordinator-a"
    assert len(screen.tail) == len(other.events)


def test_a_claim_of_multi_model_episodes_is_one_row_on_each_of_its_engines() -> None:
    harness = MultiModelHarness(BIG, SMALL, THIRD)
    first, _ = harness.claim_multi_model(BIG, SMALL, count=2, discard_timeout_s=60.0)
    (single,) = harness.claim_on(BIG, "c2", discard_timeout_s=60.0)
    harness.now_ns += 50 * SECOND
    with harness.on(SMALL):
        harness.call(first[SMALL])
    record = Folded(harness.log)
    for engine, alone in ((BIG, [single]), (SMALL, []), (THIRD, [])):
        rows = screen_data(record, record.live, harness.now_ns, engine).episodes
        multi = [("2 on big+small", 2, 1)] if engine != THIRD else []
        assert sorted((name_of(row), count_of(row), row.calls) for row in rows) == sorted(
            multi + [(name, 1, 0) for name in alone]
        )
    (row,) = screen_data(record, record.live, harness.now_ns, SMALL).episodes
    assert share_used(row) >= NEAR_LIMIT, "of its two multi-model episodes one has been idle all the time"


def test_an_empty_log_can_be_shown() -> None:
    record = Folded()
    screen = screen_data(record, record.live, 0)
    assert screen.engine == ""
    assert screen.tail == ()


# ---- training operations ------------------------------------------------------------------------------------------


def test_a_run_of_operations_shows_its_models_the_one_that_was_trained_last_first() -> None:
    story = operating(3)
    screen = shown(story)
    trained, waiting = screen.models
    assert (trained.model.model, trained.model.step, trained.model.waiting) == ("s-5f2c:train:0", 3, 0)
    assert trained.model.adapter is not None
    assert trained.model.adapter.rank == 32
    assert trained.loss == 750.0 / 600.0, "for each token"
    assert (waiting.model.model, waiting.model.waiting, waiting.loss) == ("reference", 1, None)
    assert screen.training.model == "s-5f2c:train:0"
    assert screen.training.loss == pytest.approx((850 / 600, 800 / 600, 750 / 600))
    assert screen.training.grad_norm == pytest.approx((1.9, 1.8, 1.7))


def test_tokens_per_second_of_a_model_are_those_that_it_was_trained_on() -> None:
    story = operating(1)
    first = next(each for each in story.events if isinstance(each, ev.OperationCompleted) and each.metrics)
    lasted = story.now_ns // SECOND - first.at_ns // SECOND + 1
    assert shown(story).models[0].tokens_s == pytest.approx(600.0 / lasted)


def test_rewards_of_a_run_of_operations_are_by_saved_model() -> None:
    rewards = shown(operating(3)).rewards
    assert rewards.by_sampler
    assert [number for number, _ in rewards.train] == [1, 2]
    assert rewards.now_episodes == 8
    assert rewards.train[0][1] < rewards.train[1][1] < (rewards.now_mean or 0.0)


def test_a_job_shows_no_models(story: Story) -> None:
    screen = shown(story)
    assert (screen.models, screen.training.model, screen.rewards.by_sampler) == ((), "", False)


# ---- the tail -------------------------------------------------------------------------------------------------


def test_many_calls_do_not_displace_trouble(story: Story) -> None:
    story.abort(AbortReason.INFRA, story.claim(0, "t"), detail="no disk")
    episode = story.claim(0, "t")
    for _ in range(2 * TAIL_SHOWN):
        story.call(0, episode)
    trouble = shown(story, group=EventGroup.TROUBLE).tail
    assert [row.text for row in trouble] == ["main-1-1 aborted: infra (no disk)"]


def test_every_event_has_a_text_and_a_group() -> None:
    events = {type(event): event for seed in range(40) for event in chaos(seed)}
    assert set(get_args(ev.AnyEvent)) == set(KINDS) == set(events)
    assert all(line_of(event) for event in events.values())


@given(seed=st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_any_log_can_be_shown(seed: int) -> None:
    events = chaos(seed)
    assert all(line_of(event) for event in events)
    record = Folded(events)
    screen_data(record, record.live, events[-1].at_ns if events else 0)


def test_text_from_outside_cannot_move_the_cursor(story: Story) -> None:
    story.abort(AbortReason.CLIENT, story.claim(0, "t"), detail="\x1b[2J\r\nall is well\x07")
    assert shown(story).tail[-1].text == "main-1-1 aborted: client ( [2J  all is well )"


# ---- the fold -------------------------------------------------------------------------------------------------


def seen(record: Record, view: Moment) -> tuple[bytes, Screen]:
    """Return the state, and all that the screen shows of it."""
    assert isinstance(view, HiveView)
    return view.encode(), screen_data(record, view, view.now_ns)


@given(seed=st.integers(0, 10_000), position=st.integers(0, 500))
@settings(max_examples=25, deadline=None)
def test_going_back_shows_what_was_shown_then(seed: int, position: int) -> None:
    events = chaos(seed)
    position = min(position, len(events))
    watch, then, whole = ToldWatch(events), Folded(events[:position]), Folded(events)
    assert watch.record is not None
    assert seen(watch.record, asyncio.run(watch.at(position))) == seen(then, then.live)
    assert seen(watch.record, watch.record.live) == seen(whole, whole.live), "what is live has not changed"


@given(seed=st.integers(0, 10_000), position=st.integers(0, 500))
@settings(max_examples=25, deadline=None)
def test_a_view_that_was_kept_is_folded_on_as_if_it_had_not_been(seed: int, position: int) -> None:
    events = chaos(seed)
    view = Folded(events[:position]).live.copy()
    for number, event in enumerate(events[position:], position + 1):
        view.fold(number, cast(ev.AnyEvent, event), event.at_ns)
    whole = Folded(events)
    assert seen(whole, view) == seen(whole, whole.live)


def test_twenty_thousand_events_fold_quickly() -> None:
    events = rolling(8).events
    started = time.process_time()
    Folded(events[number % len(events)] for number in range(20_000))
    assert time.process_time() - started < 2.0, "0.4 s of CPU"
