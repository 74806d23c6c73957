"""The way from a run to its groups, to the episodes of a group, and to the transcript of one episode."""

from typing import TYPE_CHECKING, ClassVar, Protocol

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widgets import DataTable, Static

from bombus.errors import BombusError
from bombus.figures import duration, one_line, seconds_between
from bombus.replay.episode.text import text
from bombus_overwatch import palette as pal
from bombus_overwatch.drawing import keys
from bombus_overwatch.model import EpisodeRecord
from bombus_overwatch.palette import figure, harmless
from bombus_overwatch.screen import groups_of

if TYPE_CHECKING:
    from bombus_overwatch.app import Overwatch

GROUP_COLUMNS = ("batch", "task", "episodes", "open", "aborted", "reward", "from – to")
EPISODE_COLUMNS = ("episode", "client", "type", "version", "calls", "tokens", "time", "reward", "fate")
FATES = (("aborted", pal.VERMILLION), ("dropped", pal.YELLOW), ("open", pal.AMBER))
LONGEST = 22  # cells
GROUPS_SHOWN = 500
READING = "reading the log …"
TOKENS_LISTED = 0  # tokens of each reply in a transcript that are listed one by one


class HiveOperator(Protocol):
    """Carries out what a person asks of a hive. Raises `BombusError` or `TimeoutError` with what went wrong."""

    async def stop(self, engine: str) -> None:
        """Stop the job of an engine."""

    async def abort(self, engine: str, record: EpisodeRecord) -> None:
        """Abort an episode."""


class Confirm(ModalScreen[bool]):
    """Asks for a `y`. No other key confirms anything."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", show=False),
        Binding("n,escape,q,enter", "dismiss(False)", show=False),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        question = Text(f"{harmless(self._question)}\n\n", pal.TEXT)
        box = Static(question.append_text(keys((("y", "yes"), ("n", "no")))), id="confirm")
        box.border_title = "Are you sure?"
        yield box


class Browser(Screen[None]):
    """Shows the groups of a run, the episodes of a group, or one episode; enter goes deeper, and escape back."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,backspace,left", "back", show=False, priority=True),
        Binding("a", "abort", show=False),
    ]

    def __init__(self, overwatch: "Overwatch") -> None:
        super().__init__()
        self._overwatch = overwatch
        self._engine = overwatch.engine
        self._member = ""  # an episode of the group that is shown: the group is another one once its batch is sealed
        self._episode = ""
        self._shown: tuple[tuple[str, ...], dict[str, list[Text]]] = ((), {})  # columns, and rows by their keys
        self._transcript: tuple[EpisodeRecord | None, str] = None, READING  # an episode as it was, and its text
        self._is_reading = False

    def compose(self) -> ComposeResult:
        yield Static(id="crumbs")
        yield DataTable[Text](id="rows", cursor_type="row")
        with VerticalScroll(id="page"):
            yield Static(id="episode")
        yield Static(id="keys")

    def on_mount(self) -> None:
        self.show()
        self.query_one(DataTable).focus()

    # ---- what is shown ----

    def show(self, chosen: str = "") -> None:
        """Draw again, from the view that the main screen draws, with the cursor on the row of `chosen`."""
        if not self.query("#rows"):  # not composed yet
            return
        view, now_ns = self._overwatch.shown
        history = view.history(self._engine)
        crumbs = [f"engine {self._engine}", f"run {view.hive.engine(self._engine).run}"]
        if not self._member:
            found = [*groups_of(history).items()][:GROUPS_SHOWN]
            rows = {group[0].episode: _group_row(key, group) for key, group in found}
        else:
            groups = groups_of(history).items()
            members = (item for item in groups if any(each.episode == self._member for each in item[1]))
            key, group = next(members, (("", ""), []))
            crumbs.append(" ".join(key))
            rows = {each.episode: _episode_row(each, now_ns) for each in group}
        crumbs += [self._episode] * bool(self._episode)
        is_held = view is not self._overwatch.live
        crumbs[-1] += f"  ‖ held at event {view.position:,}" * is_held
        self.query_one("#crumbs", Static).update(Text(" › ".join(map(one_line, crumbs)), f"bold {pal.AMBER}"))
        self.query_one("#keys", Static).update(self._keys())
        self.query_one("#page").display = bool(self._episode)
        self.query_one(DataTable).display = not self._episode
        if self._episode:
            record, (known, shown) = history.episodes.get(self._episode), self._transcript
            self.query_one("#episode", Static).update(Text(shown if record else "no longer kept here", pal.TEXT))
            if record is not None and record != known and not self._is_reading:
                self._is_reading = True
                self.run_worker(self._read(record, view.position))
        else:
            self._list(EPISODE_COLUMNS if self._member else GROUP_COLUMNS, rows, chosen)

    def _list(self, columns: tuple[str, ...], rows: dict[str, list[Text]], chosen: str = "") -> None:
        """Show these rows, with the cursor on the one that was `chosen`, or where it was."""
        if (columns, rows) == self._shown and not chosen:
            return
        chosen = chosen or self._at()
        self._shown = columns, rows
        found = self.query_one(DataTable)
        found.clear(columns=True)
        listed = rows or {"": [Text("none yet", pal.QUIET), *(Text() for _ in columns[1:])]}
        # Textual measures columns later, and what it has drawn by then stays cut off.
        for label, *cells in zip(columns, *listed.values(), strict=True):
            found.add_column(label, width=max(len(label), *(cell.cell_len for cell in cells)))
        for key, row in listed.items():
            found.add_row(*row, key=key)
        if chosen in rows:
            found.move_cursor(row=[*rows].index(chosen))

    def _at(self) -> str:
        """Return the key of the row that the cursor is on, or "" if there are no rows."""
        return dict(enumerate(self._shown[1])).get(self.query_one(DataTable).cursor_row, "")

    def _keys(self) -> Text:
        found = [("esc", "back")] if self._episode else [("↑↓", "choose"), ("enter", "open"), ("esc", "back")]
        return keys(found + [("a", "abort")] * bool(self._member))

    # ---- keys ----

    def on_data_table_row_selected(self, selected: DataTable.RowSelected) -> None:
        chosen = selected.row_key.value or ""
        if self._member:
            self._episode, self._transcript = chosen, (None, READING)
        else:
            self._member = chosen
        self.show()
        if self._episode:
            self.query_one("#page").focus()

    def action_back(self) -> None:
        if not self._member:
            self.dismiss()
            return
        left = self._episode or self._member
        if self._episode:
            self._episode = ""
        else:
            self._member = ""
        self.show(left)
        self.query_one(DataTable).focus()

    def _chosen(self) -> EpisodeRecord | None:
        """Return the episode that is shown or that the cursor is on."""
        name = self._episode or (self._at() if self._member else "")
        return self._overwatch.live.history(self._engine).episodes.get(name)

    def action_abort(self) -> None:
        record = self._chosen()
        if record is None or record.fate != "open":
            return
        what = f"Abort episode {record.episode} of client {record.client}? It gets no reward and is not trained on."
        self._overwatch.confirm(
            what, lambda operator: operator.abort(self._engine, record), f"episode {record.episode} is aborted"
        )

    async def _read(self, record: EpisodeRecord, position: int) -> None:
        try:
            transcript = await self._overwatch.log_watch.transcript(record.episode, position)
            found = "\n".join(map(harmless, text(transcript, TOKENS_LISTED, colour=False)))
        except (BombusError, TimeoutError) as error:
            found = one_line(str(error))
        self._is_reading = False
        if record.episode == self._episode:
            self._transcript = record, found
        self.show()


# ---- rows -----------------------------------------------------------------------------------------------------------


def _colour(fate: str) -> str:
    return next((colour for start, colour in FATES if fate.startswith(start)), pal.TEXT)


def _cells(*values: str | int | float | tuple[str | int, str] | None) -> list[Text]:
    """Return the cells of a row: a value, or a value and its style. Text is on the left, and None is a dash."""
    cells = []
    for each in values:
        value, style = each if isinstance(each, tuple) else (each, pal.TEXT)
        text = "–" if value is None else figure(value) if isinstance(value, float) else one_line(str(value))
        cells.append(Text(text, style, justify="left" if isinstance(value, str) else "right"))
    for cell in cells[:-1]:  # the last one has the rest of the line
        cell.truncate(LONGEST, overflow="ellipsis")
    return cells


def _group_row(key: tuple[str, str], group: list[EpisodeRecord]) -> list[Text]:
    still, aborted = (sum(each.fate.startswith(fate) for each in group) or "" for fate in ("open", "aborted"))
    rewards = [each.reward for each in group if each.reward is not None]
    mean = sum(rewards) / len(rewards) if rewards else None
    bounds = f"{figure(min(rewards))} – {figure(max(rewards))}" if rewards else ""
    return _cells(
        key[0], key[1] or "–", len(group), (still, pal.AMBER), (aborted, pal.VERMILLION), mean, (bounds, pal.QUIET)
    )


def _episode_row(record: EpisodeRecord, now_ns: int) -> list[Text]:
    client = (record.client, pal.QUIET)
    time = duration(seconds_between(record.claimed_ns, record.over_ns or now_ns)), pal.QUIET
    fate = record.fate, _colour(record.fate)
    made = record.version, record.calls, record.tokens
    return _cells(record.episode, client, record.type, *made, time, record.reward, fate)
