"""Colours, marks and number formats of the screen.

The colours are the Okabe-Ito set, which can be told apart with any colour vision. Wherever a colour has a meaning, a
mark or a word says the same, so the screen can also be read without colours.
"""

from datetime import UTC, datetime
from math import isfinite

from rich.cells import cell_len, set_cell_size
from textual.theme import Theme

from bombus.hive.describe import EventGroup
from bombus_overwatch.screen import Link

AMBER = "#e69f00"
SKY = "#56b4e9"
GREEN = "#00b386"  # the set's bluish green, lightened to be readable on black
YELLOW = "#f0e442"
VERMILLION = "#ff7a33"  # lightened for the same reason
PURPLE = "#cc79a7"
TEXT = "#d7dde5"
QUIET = "#7f8a99"
FAINT = "#3b4450"
INK = "#0d1014"
KEY = f"bold {AMBER}"

THEME = Theme(
    name="bombus",
    primary=AMBER,
    secondary=SKY,
    accent=AMBER,
    warning=YELLOW,
    error=VERMILLION,
    success=GREEN,
    foreground=TEXT,
    background=INK,
    surface="#12161c",
    panel="#1a2029",
    dark=True,
)

MARKS: dict[EventGroup, tuple[str, str]] = {
    EventGroup.ALL: ("·", TEXT),
    EventGroup.ENGINE: ("◆", AMBER),
    EventGroup.EPISODES: ("•", TEXT),
    EventGroup.CALLS: ("·", QUIET),
    EventGroup.BATCHES: ("■", PURPLE),
    EventGroup.TRAINING: ("▲", SKY),
    EventGroup.WEIGHTS: ("●", GREEN),
    EventGroup.TROUBLE: ("✗", VERMILLION),
}

LINKS: dict[Link, tuple[str, str]] = {
    Link.CONNECTING: ("○", YELLOW),
    Link.CATCHING_UP: ("◔", YELLOW),
    Link.LIVE: ("●", GREEN),
    Link.AWAY: ("✗", VERMILLION),
}


def harmless(text: str) -> str:
    """Return the text without control characters. The length stays the same, so that styles stay in place."""
    return text if text.isprintable() else "".join(char if char.isprintable() else " " for char in text)


def fit(text: str, width: int, right: bool = False) -> str:
    """Return the text in exactly `width` cells, padded or truncated with an ellipsis."""
    if width <= 0:
        return ""
    size = cell_len(text)
    if size > width:
        return set_cell_size(text, width - 1) + "…"
    return " " * (width - size) + text if right else text + " " * (width - size)


def fit_end(text: str, width: int) -> str:
    """Like `fit`, but keep the end of the text: episode ids differ in the number at the end."""
    return fit(text, width) if len(text) <= width or width < 2 else "…" + text[1 - width :]


def figure(value: float) -> str:
    """Format a number in about seven characters at most: `1,234`, `12.3`, `0.012`, `1.2e-05`."""
    if not isfinite(value):
        return str(value)
    if abs(value) >= 1e6:
        return f"{value:.2e}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def clock_time(at_ns: int) -> str:
    """Return the time of day in UTC, since the machines of a hive may be in different time zones.

    The first events of a log have no time, since a hive does not know the time before its first message.
    """
    if not at_ns:
        return " " * 8
    return datetime.fromtimestamp(at_ns / 1e9, UTC).strftime("%H:%M:%S")
