"""The terminal screen: draws what a watch has read of a log at most ten times a second, and handles keys."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, cast

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Static

from bombus.errors import BombusError
from bombus.figures import one_line
from bombus.hive.describe import EventGroup
from bombus.hive.state import Hive
from bombus.insight.record import SECOND, Record
from bombus.insight.watch import LogWatch
from bombus_overwatch import palette as pal
from bombus_overwatch.browser import Browser, Confirm, HiveOperator
from bombus_overwatch.model import HiveView
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
PAGE_EVENTS = 100
HOLD_S = 10.0

NOTES = (
    "Idle time counts from an episode's last recorded call; the coordinator also counts heartbeats and calls in "
    "flight, so its figure can be lower. Times are UTC, and local in transcripts. Going back in time shows the state "
    "that the log had at that event."
)


class Help(ModalScreen[None]):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,q,enter", "dismiss", show=False),
    ]

    def compose(self) -> ComposeResult:
        text = Text()
        for key in Binding.make_bindings(Overwatch.BINDINGS):
            text.append(f"{key.key_display or key.key:<11}", f"bold {pal.AMBER}")
            text.append(f"{key.description}\n", pal.TEXT)
        text.append("\n")
        for group, (mark, colour) in pal.MARKS.items():
            if group in (EventGroup.ALL, EventGroup.CALLS):
                continue
            text.append(f"{mark} {group}  ", colour)
        text.append(f"\n\n{NOTES}", pal.QUIET)
        box = Static(text, id="help")
        box.border_title = "bombus overwatch"
        yield box


class Overwatch(App[None]):
    """Shows one hive, whose log `log_watch` reads with `HiveView` as its moments.

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
        Binding("p", "pause", "pause the view, and resume it"),
        Binding("left", "scrub(-1)", "one event back in time", key_display="←"),
        Binding("right", "scrub(1)", "one event forward", key_display="→"),
        Binding("pageup", f"scrub({-PAGE_EVENTS})", f"{PAGE_EVENTS} events back"),
        Binding("pagedown", f"scrub({PAGE_EVENTS})", f"{PAGE_EVENTS} events forward"),
        Binding("home", "oldest", "the first event of the log"),
        Binding("end", "live", "back to live"),
        Binding("enter", "browse", "the run's groups, their episodes, and one of them; escape goes back"),
        Binding("s", "stop", "stop the engine's job; on an episode, a aborts it"),
        Binding("e", "next_engine", "the next engine"),
        Binding("f", "next_filter", "show only events of one kind"),
        Binding("question_mark", "help", "this help", key_display="?"),
        Binding("q", "quit", "quit"),
    ]

    def __init__(
        self,
        hive: str,
        log_watch: LogWatch,
        clock: Callable[[], int] = time.time_ns,
        operator: HiveOperator | None = None,
    ) -> None:
        super().__init__()
        self.log_watch = log_watch
        self.operator = operator
        self._hive = hive
        self._nothing = Record(Hive(), 0, HiveView)
        self._clock = clock
        self._held: HiveView | None = None
        self._held_now_ns = 0
        self._engine = ""  # "" until a person chooses one
        self.engine = ""  # the one that is shown
        self._group = EventGroup.ALL
        self._drawn: asyncio.Event | None = None  # set once something has changed since
        self._drawn_ns = 0

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
        self.title = f"bombus {self._hive}"
        self.set_interval(REDRAW_S, self._redraw)
        self.draw()

    # ---- the log ----------------------------------------------------------------------------------------------

    @property
    def record(self) -> Record:
        """The record of the log, which is empty until the log is read."""
        return self.log_watch.record or self._nothing

    @property
    def live(self) -> HiveView:
        return cast(HiveView, self.record.live)

    @property
    def link(self) -> tuple[Link, str]:
        """The state of the link to the hive, and why it is away."""
        watch = self.log_watch
        if watch.error:
            if watch.record is None:
                return Link.CONNECTING, watch.error  # the server or the hive's streams may not exist yet
            return Link.AWAY, f"{watch.error}: this is the last known state"
        return Link.LIVE if watch.is_ready else Link.CATCHING_UP if watch.record else Link.CONNECTING, ""

    # ---- drawing ----------------------------------------------------------------------------------------------

    def _redraw(self) -> None:
        """Draw if something has changed, and at least once a second to update the times shown."""
        if self.log_watch.failure is not None:
            self.exit()
        if self._drawn is not self.log_watch.changed or (
            self._held is None and self._clock() - self._drawn_ns >= SECOND
        ):
            self.draw()

    def draw(self) -> None:
        """Draw the live view, or the held view if there is one."""
        self._drawn, self._drawn_ns = self.log_watch.changed, self._clock()
        view, now_ns = self.shown
        viewer = ViewerState(
            self._hive,
            *self.link,
            newest=self.live.position,
            target=self.log_watch.end,
            oldest=self.record.first,
            held=self._held.position if self._held is not None else None,
        )
        data = replace(screen_data(self.record, view, now_ns, self._engine, self._group), viewer=viewer)
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
        return self.live, self._clock()

    # ---- keys -------------------------------------------------------------------------------------------------

    async def action_pause(self) -> None:
        if self._held is not None:
            self.action_live()
        else:
            await self._hold(self.live.position, self._clock())

    async def action_scrub(self, events: int) -> None:
        held = self._held or self.live
        await self._hold(held.position + events)

    async def action_oldest(self) -> None:
        await self._hold(self.record.first)

    def action_live(self) -> None:
        self._held = None
        self.draw()

    async def _hold(self, position: int, now_ns: int = 0) -> None:
        """Hold the view at `position` or at the nearest one that can be shown, as seen at `now_ns` (default: the time
        of the event there)."""
        live = self.live
        try:
            async with asyncio.timeout(HOLD_S):
                found = await self.log_watch.at(min(max(position, self.record.first), live.position))
        except (BombusError, TimeoutError) as error:
            self._say_why(error)
            return
        self._held, self._held_now_ns = cast(HiveView, live.copy() if found is live else found), now_ns
        self.draw()

    def action_next_engine(self) -> None:
        engines = engines_of(self.live)
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
                self._say_why(error)
            else:
                self.notify(one_line(done), markup=False)

        def answered(yes: bool | None) -> None:
            if yes and self.operator is not None:
                self.run_worker(acting(self.operator))

        self.push_screen(Confirm(question), answered)

    def _say_why(self, error: Exception) -> None:
        why = str(error) or "the hive did not reply in time"
        self.notify(one_line(why), title="not done", severity="error", markup=False)

    def action_help(self) -> None:
        self.push_screen(Help())
