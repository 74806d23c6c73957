"""The first and last lines of the screen: what is shown, how current it is, and the keys."""

from rich.text import Text

from bombus.figures import one_line
from bombus_overwatch import palette as pal
from bombus_overwatch.drawing import bar
from bombus_overwatch.screen import Link, Screen, ViewerState
from bombus_overwatch.widgets import Panel

KEYS = (("p", "pause"), ("←→", "scrub"), ("e", "engine"), ("f", "filter"), ("?", "help"), ("q", "quit"))


class StatusLine(Panel):
    """A line that also shows the state of the viewer."""

    viewer = ViewerState(hive="")

    def show_viewer(self, viewer: ViewerState) -> None:
        if viewer != self.viewer:
            self.viewer = viewer
            self.refresh()


class Banner(StatusLine):
    """Shows the hive and engine on the left; the link, position and time on the right."""

    def lines(self, screen: Screen, width: int, height: int) -> list[Text]:
        left = Text(" ⬢ bombus ", f"bold {pal.AMBER}")
        left.append(" hive ", pal.QUIET).append(self.viewer.hive, f"bold {pal.TEXT}")
        if screen.engine:
            left.append("  engine ", pal.QUIET).append(screen.engine, f"bold {pal.TEXT}")
        if len(screen.engines) > 1:
            left.append(f" {screen.engines.index(screen.engine) + 1} of {len(screen.engines)}", pal.QUIET)
        right = self._link()
        right.append(f"  event {screen.position:,}", pal.QUIET)
        right.append(f"  {pal.clock_time(screen.now_ns)} UTC ", pal.QUIET)
        left.append(" " * max(1, width - left.cell_len - right.cell_len))
        return [left.append_text(right)]

    def _link(self) -> Text:
        viewer = self.viewer
        mark, colour = pal.LINKS[viewer.link]
        if viewer.link == Link.LIVE and viewer.held is not None:
            return Text("‖ held", f"bold {pal.YELLOW}")
        text = Text(f"{mark} {viewer.link}", f"bold {colour}")
        if viewer.link == Link.CATCHING_UP and viewer.target:
            filled, rest = bar(viewer.newest, viewer.target, 10)
            text.append(" ").append(filled, colour).append(rest, pal.FAINT)
            text.append(f" of {viewer.target:,}", pal.QUIET)
        return text


class KeyBar(StatusLine):
    """Shows the keys. If the view is held, also shows its place in the past; if the bus is away, the reason."""

    def lines(self, screen: Screen, width: int, height: int) -> list[Text]:
        viewer = self.viewer
        if viewer.held is not None:
            return [self._scrubber(viewer, width)]
        if viewer.why:
            return [Text(f" {one_line(viewer.why)}", pal.VERMILLION)]
        line = Text()
        for key, what in KEYS:
            shown = f"filter: {screen.tail_group}" if what == "filter" else what
            line.append(f" {key} ", f"bold {pal.AMBER}").append(f"{shown} ", pal.QUIET)
        return [line]

    def _scrubber(self, viewer: ViewerState, width: int) -> Text:
        assert viewer.held is not None
        behind = viewer.newest - viewer.held
        line = Text(f" ‖ event {viewer.held:,} ", f"bold {pal.YELLOW}")
        room = max(8, width - 70)
        span = max(1, viewer.newest - viewer.oldest)
        place = min(room - 1, max(0, round((viewer.held - viewer.oldest) / span * (room - 1))))
        line.append("├" + "─" * place, pal.FAINT).append("●", pal.YELLOW)
        line.append("─" * (room - 1 - place) + "┤", pal.FAINT)
        line.append(f" {behind:,} behind ", pal.TEXT)
        for key, what in (("←→", "1"), ("pgup/dn", "100"), ("end", "live")):
            line.append(f" {key} ", f"bold {pal.AMBER}").append(what, pal.QUIET)
        return line
