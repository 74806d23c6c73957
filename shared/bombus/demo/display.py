"""The display of the demo: a live table in a terminal, plain lines when the output is piped."""

import sys
import time

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from bombus.demo.training import Curve, Measured, Stepped, Watcher
from bombus.terminal import say

_BARS = " ▁▂▃▄▅▆▇█"
WIDTH = 60


def sparkline(values: list[float]) -> str:
    """Draw the newest WIDTH values, from 0 to 1, as a line of bars."""
    return "".join(_BARS[min(8, max(0, round(value * 8)))] for value in values[-WIDTH:])


class Display(Watcher):
    """A context manager that shows progress. `budget_s` is how long training may take."""

    def __init__(self, title: str, budget_s: float, every: int = 1) -> None:
        self._title = title
        self._budget_s = budget_s
        self._every = every
        self._steps: list[Stepped] = []
        self._measured: list[Measured] = []
        self._doing = "starting"
        self._console = Console(file=sys.stdout)
        self._live = Live(self._draw(), console=self._console, refresh_per_second=4, transient=True)
        self._is_live = self._console.is_terminal

    def go_on(self, curve: Curve) -> None:
        """Continue with the steps and measurements made before the training was interrupted."""
        self._steps = list(curve.steps)
        self._measured = list(curve.measured)

    def __enter__(self) -> "Display":
        if self._is_live:
            self._live.start()
        else:
            say(self._title, flush=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_live:
            self._live.stop()

    def show(self, doing: str) -> None:
        self._doing = doing
        self._refresh(doing)

    def measuring(self, done: int, total: int) -> None:
        self._doing = f"measuring on held-out tasks ({done} of {total})"
        if self._is_live:
            self._live.update(self._draw())

    def measured(self, point: Measured) -> None:
        self._measured.append(point)
        self._doing = "training"
        self._refresh(
            f"held-out after {point.training_s:5.0f} s of training (version {point.version}): "
            f"reward {point.reward:.3f}, exact {point.exact:.3f}"
        )

    def stepped(self, step: Stepped) -> None:
        self._steps.append(step)
        self._doing = "training"
        line = f"step {step.version + 1:4d}  {step.training_s:6.1f} s  reward {step.reward:.3f}  exact {step.exact:.3f}"
        if self._is_live or len(self._steps) % self._every == 0 or len(self._steps) == 1:
            self._refresh(line)

    def _refresh(self, line: str) -> None:
        if self._is_live:
            self._live.update(self._draw())
        else:
            say(f"{time.strftime('%H:%M:%S')} {line}", flush=True)

    def _draw(self) -> Group:
        table = Table.grid(padding=(0, 2))
        trained_s = self._steps[-1].training_s if self._steps else 0.0
        table.add_row("now", self._doing)
        table.add_row("training", f"{trained_s:.0f} s of at most {self._budget_s:.0f} s, {len(self._steps)} steps")
        if self._steps:
            newest = self._steps[-1]
            table.add_row("batch reward", f"{newest.reward:.3f}  {sparkline([step.reward for step in self._steps])}")
            table.add_row("batch exact", f"{newest.exact:.3f}  {sparkline([step.exact for step in self._steps])}")
        for point in self._measured:
            table.add_row(f"held-out, {point.training_s:.0f} s", f"reward {point.reward:.3f}  exact {point.exact:.3f}")
        return Group(Text(self._title, style="bold"), table)
