"""The reward chart: training reward by step and held-out reward by policy version, in one picture."""

from collections.abc import Sequence

from rich.text import Text

from bombus.hive.status.rows import StepRollouts
from bombus_overwatch import palette as pal
from bombus_overwatch.drawing import Range, braille_line, is_drawable, range_of
from bombus_overwatch.palette import figure, fit
from bombus_overwatch.screen import RewardCurves, Screen
from bombus_overwatch.widgets import Panel

AXIS = 7  # cells for the numbers beside the chart
HELD_OUT = "◆"
DATA_SETS_FROM_HEIGHT = 7  # a lower panel has no room for data sets beside its chart

CurvePoint = tuple[int, float]
Cell = tuple[str, str]  # a character and its colour


class RewardPanel(Panel):
    """Shows a line for training, and diamonds for held-out tasks."""

    def retitle(self, screen: Screen) -> None:
        self.border_title = f"Reward by {'saved model' if screen.rewards.by_sampler else 'step'}"
        self.border_subtitle = _of_episodes(screen.status.rollouts)

    def lines(self, screen: Screen, width: int, height: int) -> list[Text]:
        rows = [_legend(screen.rewards, width)]
        if screen.rewards.data_sets and height > DATA_SETS_FROM_HEIGHT:
            rows.append(_data_sets(screen.rewards, width))
        train = [point for point in screen.rewards.train if is_drawable(point[1])]
        held_out = [point for point in screen.rewards.held_out if is_drawable(point[1])]
        if not train and not held_out:
            after = "the first saved model" if screen.rewards.by_sampler else "step 1"
            return [*rows, Text(""), Text(f"the curve begins after {after}", pal.QUIET)]
        unit = "saved model" if screen.rewards.by_sampler else "step"
        return rows + _chart(train, held_out, width, height - 1 - len(rows), unit)


def _of_episodes(rollouts: Sequence[StepRollouts]) -> str:
    """Return the mean length of the newest sealed batch's episodes, and their success rate if they report it."""
    if not rollouts:
        return ""
    newest = rollouts[-1]
    successes = "" if newest.success_rate is None else f"{newest.success_rate:.0%} successes, "
    return f"step {newest.step}: {successes}{figure(round(newest.mean_completion_tokens))} tokens"


def _legend(rewards: RewardCurves, width: int) -> Text:
    legend = Text("━ training ", pal.SKY)
    legend.append(figure(rewards.train[-1][1]) if rewards.train else "–", f"bold {pal.TEXT}")
    legend.append(f"  {HELD_OUT} held-out ", pal.AMBER)
    legend.append(figure(rewards.held_out[-1][1]) if rewards.held_out else "–", f"bold {pal.TEXT}")
    if rewards.now_mean is not None:
        now = Text("  now ", pal.QUIET).append(figure(rewards.now_mean), pal.TEXT)
        now.append(f" of {rewards.now_episodes:,}", pal.QUIET)
        if legend.cell_len + now.cell_len <= width:
            legend.append_text(now)
    return legend


def _data_sets(rewards: RewardCurves, width: int) -> Text:
    """Return the held-out rewards of the data sets in one line, truncated to fit the width."""
    return Text(fit("  ".join(f"{name} {figure(mean)}" for name, mean in rewards.data_sets), width), pal.AMBER)


def _chart(train: list[CurvePoint], held_out: list[CurvePoint], width: int, height: int, unit: str) -> list[Text]:
    room = width - AXIS - 1
    if room < 4 or height < 2:
        return []
    versions = [version for version, _ in train + held_out]
    x = Range(min(versions), max(max(versions), min(versions) + 1))
    y = range_of([value for _, value in train + held_out])
    cells: list[list[Cell]] = [[(char, pal.SKY) for char in row] for row in braille_line(train, x, y, room, height)]
    for version, value in held_out:
        cells[height - 1 - y.place(value, height)][x.place(version, room)] = (HELD_OUT, pal.AMBER)
    rows = []
    for index, row in enumerate(cells):
        labelled = index in (0, height // 2, height - 1)
        level = y.high - (y.high - y.low) * index / (height - 1)
        number = f"{level:.2f}" if abs(level) < 1000 else figure(level)
        line = Text(fit(number if labelled else "", AXIS - 1, right=True), pal.QUIET)
        line.append(" ┤" if labelled else " │", pal.FAINT)
        for char, colour in row:
            line.append(char, colour)
        rows.append(line)
    first, last = f"{x.low:.0f}", f"{unit} {x.high:.0f}"
    axis = " " * (AXIS + 1) + first + fit(last, room - len(first), right=True)
    return [*rows, Text(axis, pal.QUIET)]
