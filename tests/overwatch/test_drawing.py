"""Bars, sparklines and the chart, compared with pictures drawn by hand."""

import math
from dataclasses import replace

from bombus_overwatch.drawing import Range, bar, braille_line, buckets, range_of, sparkline
from bombus_overwatch.palette import clock_time, figure, fit, fit_end
from bombus_overwatch.reward import RewardPanel
from bombus_overwatch.screen import RewardCurves, screen_data
from bombus_overwatch.widgets import CollectionPanel
from tests.coordinator.steady_clients import Steady
from tests.overwatch.story import Folded


def test_a_bar_is_full_only_when_its_target_is_reached() -> None:
    assert bar(0, 8, 4) == ("", "────")
    assert bar(3, 8, 4) == ("━╸", "──")
    assert bar(999, 1000, 4) == ("━━━╸", "")
    assert bar(9, 8, 4) == ("━━━━", "")
    assert bar(1, 0, 2) == ("", "──")


def test_a_sparkline_goes_from_the_least_to_the_greatest() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([5, 5], 8) == "▁▁"
    assert sparkline([4, 8], 8, floor=0.0) == "▅█"
    assert sparkline([], 8) == ""


def test_a_value_that_is_not_a_number_leaves_a_gap() -> None:
    assert sparkline([0.0, math.nan, 1.0], 8) == "▁ █"
    assert figure(math.nan) == "nan"


def test_values_that_are_too_far_apart_to_be_drawn_leave_gaps() -> None:
    """An old log may have rewards of any size."""
    assert sparkline([0.0, 1e308, -1e308, 1.0], 8) == "▁  █"
    assert sparkline([1e308, 1.7e308] * 8, 2) == ""
    shown = screen_data(Folded(), Folded().live, 0, "main")
    train = ((1, 1e308), (2, -1e308), (3, 0.5), (4, 0.75))
    curves = RewardCurves(train=train, held_out=((1, -1.7e308), (2, 0.25)), now_mean=1e308, now_episodes=3)
    lines = RewardPanel().lines(replace(shown, rewards=curves), 70, 10)
    assert (lines[1].plain.split()[0], lines[5].plain.split()[0]) == ("0.78", "0.46")


def test_the_held_out_reward_of_each_data_set_has_a_line_where_there_is_room() -> None:
    shown = screen_data(Folded(), Folded().live, 0, "main")
    sets = (("legs", 0.5), ("sums", 0.25), ("words", 1.0))
    curves = RewardCurves(train=(), held_out=((1, 0.5), (2, 0.6)), now_mean=None, now_episodes=0, data_sets=sets)
    wide, narrow, low = (
        RewardPanel().lines(replace(shown, rewards=curves), width, height)
        for width, height in ((60, 10), (20, 10), (60, 7))
    )
    assert wide[1].plain.rstrip() == "legs 0.5  sums 0.25  words 1"
    assert narrow[1].plain == "legs 0.5  sums 0.25…"
    assert "legs" not in low[1].plain
    assert (len(wide), len(low)) == (10, 7)


def test_more_values_than_cells_are_averaged() -> None:
    assert buckets([1, 3, 5, 7], 2) == [2, 6]
    assert len(buckets(list(range(1000)), 7)) == 7


def test_a_rising_line_goes_from_corner_to_corner() -> None:
    rows = braille_line([(0, 0), (1, 1)], Range(0, 1), Range(0, 1), width=2, height=1)
    assert rows == [["⡠", "⠊"]]


def test_a_single_point_is_a_dot() -> None:
    rows = braille_line([(0, 0)], Range(0, 1), Range(0, 1), width=2, height=2)
    assert rows == [[" ", " "], ["⡀", " "]]


def test_a_flat_line_lies_in_the_middle_of_its_range() -> None:
    flat = range_of([2.0, 2.0])
    assert flat.low < 2.0 < flat.high
    assert flat.place(2.0, 101) == 50


def test_text_is_fitted_to_cells_not_to_characters() -> None:
    assert fit("bee", 5) == "bee  "
    assert fit("bee", 5, right=True) == "  bee"
    assert fit("bumblebee", 5) == "bumb…"
    assert fit("蜂蜂蜂", 5) == "蜂蜂…"
    assert fit("bee", 0) == ""
    assert fit_end("main-1-1094", 6) == "…-1094"


def test_numbers_and_times_are_short() -> None:
    assert [figure(value) for value in (0.01234, 12.345, 1234.5, 12_345_678.0)] == [
        "0.0123",
        "12.3",
        "1,234",
        "1.23e+07",
    ]
    assert clock_time(3_661 * 1_000_000_000) == "01:01:01"
    assert clock_time(0).strip() == "", "the first events of a log have no time"


def test_the_collection_panel_says_how_far_claims_are_ahead_of_training() -> None:
    run = Steady(0, 40, (1.0, 2.0), 10.0, batch_size=2, num_repeat=2, max_staleness=1)
    run.run(12)
    record = Folded(run.harness.log)
    lines = CollectionPanel().lines(screen_data(record, record.live, run.harness.now_ns, "main"), 70, 10)
    assert lines[-1].plain == "  ahead of training 1 + 1 batches, bound 1, new episodes are waiting"
