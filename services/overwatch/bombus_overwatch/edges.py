"""The first and the last line of the screen: what is looked at, how fresh it is, and the keys."""

from rich.text import Text

from bombus.hive.status import one_line
from bombus_overwatch import palette as pal
from bombus_overwatch.drawing import bar
from bombus_overwatch.screen import Link, Screen, Standing
from bombus_overwatch.widgets import Panel

KEYS = (("p", "pause"), ("←→", "scrub"), ("e", "engine"), ("f", "filter"), ("?", "help"), ("q", "quit"))


class Edge(Panel):
    """A line that shows the viewer's standing as well."""

    standing = Standing(hive="")

    def tell(self, standing: Standing) -> None:
        if standing != self.standing:
            self.standing = standing
            self.refresh()


class Banner(Edge):
    """Hive and engine on the left; link, position and time on the right."""

    def lines(self, screen: Screen, width: int, height: int) -> list[Text]:
        left = Text(" ⬢ bombus ", f"bold {pal.AMBER}")
        left.append(" hive ", pal.QUIET).append(self.standing.hive, f"bold {pal.TEXT}")
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
        standing = self.standing
        mark, colour = pal.LINKS[standing.link]
        if standing.link == Link.LIVE and standing.held is not None:
            return Text("‖ held", f"bold {pal.YELLOW}")
        text = Text(f"{mark} {standing.link}", f"bold {colour}")
        if standing.link == Link.CATCHING_UP and standing.target:
            filled, rest = bar(standing.newest, standing.target, 10)
            text.append(" ").append(filled, colour).append(rest, pal.FAINT)
            text.append(f" of {standing.target:,}", pal.QUIET)
        return text


class KeyBar(Edge):
    """The keys; while the view is held, where in the past it stands; while the bus is away, why."""

    def lines(self, screen: Screen, width: int, height: int) -> list[Text]:
        standing = self.standing
        if standing.held is not None:
            return [self._scrubber(standing, width)]
        if standing.why:
            return [Text(f" {one_line(standing.why)}", pal.VERMILLION)]
        line = Text()
        for key, what in KEYS:
            shown = f"filter: {screen.tail_group}" if what == "filter" else what
            line.append(f" {key} ", f"bold {pal.AMBER}").append(f"{shown} ", pal.QUIET)
        return [line]

    def _scrubber(self, standing: Standing, width: int) -> Text:
        assert standing.held is not None
        behind = standing.newest - standing.held
        line = Text(f" ‖ event {standing.held:,} ", f"bold {pal.YELLOW}")
        room = max(8, width - 70)
        span = max(1, standing.newest - standing.oldest)
        place = min(room - 1, max(0, round((standing.held - standing.oldest) / span * (room - 1))))
        line.append("├" + "─" * place, pal.FAINT).append("●", pal.YELLOW)
        line.append("─" * (room - 1 - place) + "┤", pal.FAINT)
        line.append(f" {behind:,} behind ", pal.TEXT)
        for key, what in (("←→", "1"), ("pgup/dn", "100"), ("end", "live")):
            line.append(f" {key} ", f"bold {pal.AMBER}").append(what, pal.QUIET)
        return line
