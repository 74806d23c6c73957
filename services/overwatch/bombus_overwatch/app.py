"""The terminal screen: takes events, draws the state at most ten times a second, and handles keys."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Static

from bombus.errors import BombusError
from bombus.figures import one_line
from bombus.hive.describe import EventGroup
from bombus.hive.events import Event
from bombus.hive.state import Hive
from bombus.insight.record import SECOND
from bombus_overwatch import palette as pal
from bombus_overwatch.browser import Browser, Confirm, HiveOperator
from bombus_overwatch.model import HiveView, Timeline
from bombus_overwatch.reward import RewardPanel
from bombus_overwatch.screen import Link, ViewerState, engines_of, screen_data
from bombus_overwatch.widgets import (
    Banner,
    CollectionPanel,
    EpisodesPanel,
    KeyBar,
    ModelsPanel,
    Notice,
    Panel,
    PhaseBar,
    ReplicasPanel,
    TailPanel,
    TrainingPanel,
)

REDRAW_S = 0.1
CATCH_UP_ROUNDS = 5  # while catching up, only every fifth timer tick draws
PAGE_EVENTS = 100

HELP = (
    ("p", "pause the view, and resume it"),
    ("← →", "one event back or forward in time"),
    ("pgup pgdn", f"{PAGE_EVENTS} events back or forward"),
    ("home end", "the oldest event that is kept; back to live"),
    ("enter", "the run's groups, their episodes, and one episode; escape goes back"),
    ("s", "stop the engine's job; on an episode, a aborts it"),
    ("e", "the next engine"),
    ("f", "show only events of one kind"),
    ("?", "this help"),
    ("q", "quit"),
)
NOTES = (
    "Idle time counts from an episode's last recorded call; the coordinator also counts heartbeats and calls in "
    "flight, so its figure can be lower. Times are UTC. Going back in time shows the state that the log had "
    "at that event."
)

HELP_GROUPS = (
    EventGroup.ENGINE,
    EventGroup.EPISODES,
    EventGroup.BATCHES,
    EventGroup.TRAINING,
    EventGroup.WEIGHTS,
    EventGroup.TROUBLE,
)


class Help(ModalScreen[None]):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,q,enter", "dismiss", show=False),
    ]

    def compose(self) -> ComposeResult:
        text = Text()
        for key, what in HELP:
            text.append(f"{key:<11}", f"bold {pal.AMBER}").append(f"{what}\n", pal.TEXT)
        text.append("\n")
        for group in HELP_GROUPS:
            mark, colour = pal.MARKS[group]
            text.append(f"{mark} {group}  ", colour)
        text.append(f"\n\n{NOTES}", pal.QUIET)
        box = Static(text, id="help")
        box.border_title = "bombus overwatch"
        yield box


class Overwatch(App[None]):
    """Shows one hive. `take` folds in an event, and `report` sets the state of the link; neither of them draws.

    `clock` returns the time in nanoseconds since the epoch. `operator` carries out what a person asks for.
    """

    CSS_PATH = Path(__file__).with_name("overwatch.tcss")
    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS: list[tuple[int, str]] | None = [  # noqa: RUF012  # as textual declares it
        (0, "-narrow"),
        (100, "-wide"),
    ]
    VERTICAL_BREAKPOINTS: list[tuple[int, str]] | None = [  # noqa: RUF012
        (0, "-short"),
        (28, "-tall"),
        (42, "-roomy"),
    ]
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("p", "pause", "pause"),
        Binding("e", "next_engine", "engine"),
        Binding("enter", "browse", show=False),
        Binding("s", "stop", show=False),
        Binding("f", "next_filter", "filter"),
        Binding("question_mark", "help", "help"),
        Binding("left", "scrub(-1)", show=False),
        Binding("right", "scrub(1)", show=False),
        Binding("pageup", f"scrub({-PAGE_EVENTS})", show=False),
        Binding("pagedown", f"scrub({PAGE_EVENTS})", show=False),
        Binding("home", "oldest", show=False),
        Binding("end", "live", show=False),
    ]

    def __init__(
        self, hive: str, clock: Callable[[], int] = time.time_ns, operator: HiveOperator | None = None
    ) -> None:
        super().__init__()
        self.up = asyncio.Event()  # set once the screen is running and can take events
        self.operator = operator
        self.timeline = Timeline()
        self.viewer = ViewerState(hive=hive)
        self._clock = clock
        self._held: HiveView | None = None
        self._held_now_ns = 0
        self._engine = ""  # "" until a person chooses one
        self.engine = ""  # the one that is shown
        self._group = EventGroup.ALL
        self._dirty = True
        self._drawn_ns = 0
        self._rounds = 0

    def compose(self) -> ComposeResult:
        yield Banner(classes="")
        yield PhaseBar(classes="")
        yield Notice(classes="")
        with Horizontal(id="middle"):
            with Vertical(id="left"):
                yield CollectionPanel("Collection")
                yield ModelsPanel("Models")
                yield EpisodesPanel("Running episodes")
            with Vertical(id="right"):
                yield RewardPanel("Reward by step")
                yield TrainingPanel("Training")
        with Horizontal(id="bottom"):
            yield TailPanel("Events")
            yield ReplicasPanel("Replicas")
        yield KeyBar(classes="")

    def on_mount(self) -> None:
        self.register_theme(pal.THEME)
        self.theme = pal.THEME.name
        self.title = f"bombus {self.viewer.hive}"
        self.set_interval(REDRAW_S, self._redraw)
        self.draw()
        self.up.set()

    # ---- events -----------------------------------------------------------------------------------------------

    def begin(self, position: int, hive: Hive) -> None:
        """Start again from the state `hive` at `position`. Later events follow through `take`."""
        self.timeline = Timeline(hive, position)
        self._dirty = True

    def take(self, position: int, event: Event) -> None:
        """Fold in the event at `position`. Events in a burst are drawn together."""
        self.timeline.fold(position, event)
        self._dirty = True

    def report(self, link: Link, why: str = "", target: int = 0) -> None:
        """Set the state of the link to the bus; `target` is the position to catch up to."""
        self.viewer = replace(self.viewer, link=link, why=why, target=target)
        self._dirty = True

    # ---- drawing ----------------------------------------------------------------------------------------------

    def _redraw(self) -> None:
        """Draw if something has changed, and at least once a second to update the times shown.

        While catching up, draw less often, to leave more time for folding.
        """
        self._rounds += 1
        if self.viewer.link == Link.CATCHING_UP and self._rounds % CATCH_UP_ROUNDS:
            return
        if self._dirty or (self._held is None and self._clock() - self._drawn_ns >= SECOND):
            self.draw()

    def draw(self) -> None:
        """Draw the live view, or the held view if there is one."""
        self._dirty = False
        self._drawn_ns = self._clock()
        view, now_ns = self.shown
        viewer = replace(
            self.viewer,
            newest=self.timeline.newest,
            oldest=self.timeline.oldest,
            held=self._held.moment.position if self._held is not None else None,
        )
        data = replace(screen_data(self.timeline, view, now_ns, self._engine, self._group), viewer=viewer)
        self.engine = data.engine
        base = self.screen_stack[0]
        for panel in base.query(Panel):
            panel.show(data)
        for screen in self.screen_stack:
            if isinstance(screen, Browser):
                screen.show()

    @property
    def shown(self) -> tuple[HiveView, int]:
        """The view that is drawn, the held one or the live one, and its time."""
        if self._held is not None:
            return self._held, self._held_now_ns
        return self.timeline.live, self._clock()

    # ---- keys -------------------------------------------------------------------------------------------------

    def action_pause(self) -> None:
        if self._held is not None:
            self.action_live()
        else:
            self._hold(self.timeline.newest, self._clock())

    def action_scrub(self, events: int) -> None:
        held = self._held.moment.position if self._held is not None else self.timeline.newest
        self._hold(self.timeline.moved(held, events))

    def action_oldest(self) -> None:
        self._hold(self.timeline.oldest)

    def action_live(self) -> None:
        self._held = None
        self.draw()

    def _hold(self, position: int, now_ns: int = 0) -> None:
        """Hold the view at `position`, as seen at `now_ns` (default: the time of the event there)."""
        self._held = self.timeline.at(position)
        self._held_now_ns = now_ns
        self.draw()

    def action_next_engine(self) -> None:
        engines = engines_of(self.timeline.live)
        if engines:
            index = engines.index(self._engine) if self._engine in engines else 0
            self._engine = engines[(index + 1) % len(engines)]
            self.draw()

    def action_next_filter(self) -> None:
        groups = list(EventGroup)
        self._group = groups[(groups.index(self._group) + 1) % len(groups)]
        self.draw()

    def action_browse(self) -> None:
        if self.engine and len(self.screen_stack) == 1:
            self.push_screen(Browser(self))

    def action_stop(self) -> None:
        engine = self.engine
        if engine:
            what = f"Stop the job of engine {engine}? Its open episodes are aborted; what is on the log is kept."
            self.confirm(what, lambda operator: operator.stop(engine), f"engine {engine} is stopped")

    def confirm(self, question: str, act: Callable[[HiveOperator], Awaitable[None]], done: str) -> None:
        """Act if a person confirms it. The outcome is shown in a corner of the screen."""

        async def acting(operator: HiveOperator) -> None:
            try:
                await act(operator)
            except (BombusError, TimeoutError) as error:
                why = str(error) or "the hive did not reply in time"
                self.notify(one_line(why), title="not done", severity="error", markup=False)
            else:
                self.notify(one_line(done), markup=False)

        def answered(yes: bool | None) -> None:
            if yes and self.operator is not None:
                self.run_worker(acting(self.operator))

        self.push_screen(Confirm(question), answered)

    def action_help(self) -> None:
        self.push_screen(Help())
