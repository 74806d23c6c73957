"""The way from a run to its groups, to the episodes of a group, and to one episode with its calls and transcript."""

from typing import TYPE_CHECKING, ClassVar, Protocol

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from bombus.errors import BombusError
from bombus.figures import duration, one_line, seconds_between
from bombus_overwatch import palette as pal
from bombus_overwatch.model import EpisodeRecord
from bombus_overwatch.palette import figure, fit, fit_end, harmless
from bombus_overwatch.screen import ShownGroup, groups_of

if TYPE_CHECKING:
    from bombus_overwatch.app import Overwatch

GROUP_HEADING = f"  {'batch':<14}{'task':<30}{'episodes':>9}{'open':>6}{'aborted':>9}{'reward':>9}  from – to"
EPISODE_HEADING = (
    f"  {'episode':<16}{'client':<18}{'type':<6}{'version':>7}{'calls':>7}{'tokens':>8}{'time':>8}{'reward':>9}  fate"
)
FATES = (("aborted", pal.VERMILLION), ("dropped", pal.YELLOW), ("open", pal.AMBER))
GROUPS_SHOWN = 500
READING = "reading the log for the transcript …"


class HiveOperator(Protocol):
    """Carries out what a person asks of a hive. Raises `BombusError` or `TimeoutError` with what went wrong."""

    async def stop(self, engine: str) -> None:
        """Stop the job of an engine."""

    async def abort(self, engine: str, record: EpisodeRecord) -> None:
        """Abort an episode."""

    async def transcript(self, episode: str) -> str:
        """Return the text of an episode."""


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
        keys = Text.assemble(("y", f"bold {pal.AMBER}"), " yes   ", ("n", f"bold {pal.AMBER}"), " no")
        box = Static(Text(f"{harmless(self._question)}\n\n", pal.TEXT).append_text(keys), id="confirm")
        box.border_title = "Are you sure?"
        yield box


class Browser(Screen[None]):
    """Shows the groups of a run, the episodes of a group, or one episode; enter goes deeper, and escape back."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,backspace,left", "back", show=False, priority=True),
        Binding("a", "abort", show=False),
        Binding("t", "transcript", show=False),
    ]

    def __init__(self, overwatch: "Overwatch") -> None:
        super().__init__()
        self._overwatch = overwatch
        self._engine = overwatch.engine
        self._member = ""  # an episode of the group that is shown: the group is another one once its batch is sealed
        self._episode = ""
        self._rows: list[tuple[str, Text]] = []
        self._transcripts: dict[str, str] = {}

    def compose(self) -> ComposeResult:
        yield Static(id="crumbs")
        yield Static(id="heading")
        yield OptionList(id="rows", markup=False)
        with VerticalScroll(id="page"):
            yield Static(id="episode")
        yield Static(id="keys")

    def on_mount(self) -> None:
        self.show()
        self.query_one(OptionList).focus()

    # ---- what is shown ----

    def show(self, chosen: str = "") -> None:
        """Draw again, from the view that the main screen draws, with the cursor on the row of `chosen`."""
        if not self.query("#rows"):  # not composed yet
            return
        view, now_ns = self._overwatch.shown
        crumbs = [f"engine {self._engine}", f"run {view.hive.engine(self._engine).run}"]
        record = view.history(self._engine).episodes.get(self._episode)
        groups = groups_of(view.history(self._engine))
        if not self._member:
            heading = GROUP_HEADING
            rows = [(group.episodes[0].episode, _group_row(group)) for group in groups[:GROUPS_SHOWN]]
        else:
            heading = EPISODE_HEADING
            group = next((each for each in groups if self._member in each.names), ShownGroup(("", ""), ()))
            crumbs.append(" ".join(group.key))
            rows = [(each.episode, _episode_row(each, now_ns)) for each in group.episodes]
        crumbs += [self._episode] * bool(self._episode)
        crumbs[-1] += f"  ‖ held at event {view.position:,}" * (view is not self._overwatch.timeline.live)
        self.query_one("#crumbs", Static).update(Text(" › ".join(map(one_line, crumbs)), f"bold {pal.AMBER}"))
        self.query_one("#heading", Static).update(Text("" if self._episode else heading, f"{pal.QUIET} underline"))
        self.query_one("#keys", Static).update(self._keys())
        self.query_one("#page").display = bool(self._episode)
        self.query_one(OptionList).display = not self._episode
        if self._episode:
            text = Text("no longer kept here", pal.QUIET) if record is None else _page(record, now_ns)
            text.append(f"\n\n{self._transcripts.get(self._episode, '')}", pal.TEXT)
            self.query_one("#episode", Static).update(text)
        else:
            self._list(rows, chosen)

    def _list(self, rows: list[tuple[str, Text]], chosen: str = "") -> None:
        """Show these rows, with the cursor on the one that was `chosen`, or where it was."""
        if rows == self._rows and not chosen:
            return
        self._rows = rows
        found = self.query_one(OptionList)
        at = found.highlighted_option
        chosen = chosen or (at.id or "" if at is not None else "")
        found.clear_options()
        found.add_options([Option(text, id=key) for key, text in rows] or [Option("none yet", disabled=True)])
        keys = [key for key, _ in rows]
        if keys:
            found.highlighted = keys.index(chosen) if chosen in keys else 0

    def _keys(self) -> Text:
        keys = [("esc", "back")] if self._episode else [("↑↓", "choose"), ("enter", "open"), ("esc", "back")]
        keys += [("a", "abort")] if self._member else []
        keys += [("t", "transcript")] if self._episode else []
        line = Text()
        for key, what in keys:
            line.append(f" {key} ", f"bold {pal.AMBER}").append(f"{what} ", pal.QUIET)
        return line

    # ---- keys ----

    def on_option_list_option_selected(self, selected: OptionList.OptionSelected) -> None:
        chosen = selected.option_id or ""
        if self._member:
            self._episode = chosen
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
        self.query_one(OptionList).focus()

    def _chosen(self) -> EpisodeRecord | None:
        """Return the episode that is shown or that the cursor is on."""
        at = self.query_one(OptionList).highlighted_option
        name = self._episode or (at.id or "" if at is not None and self._member else "")
        return self._overwatch.timeline.live.history(self._engine).episodes.get(name)

    def action_abort(self) -> None:
        record = self._chosen()
        if record is None or record.fate != "open":
            return
        what = f"Abort episode {record.episode} of client {record.client}? It gets no reward and is not trained on."
        self._overwatch.confirm(
            what, lambda operator: operator.abort(self._engine, record), f"episode {record.episode} is aborted"
        )

    def action_transcript(self) -> None:
        if self._episode and self._transcripts.get(self._episode) != READING and self._overwatch.operator is not None:
            self._transcripts[self._episode] = READING
            self.show()
            self.run_worker(self._read(self._episode, self._overwatch.operator))

    async def _read(self, episode: str, operator: HiveOperator) -> None:
        try:
            lines = (await operator.transcript(episode)).split("\n")
            text = "\n".join(map(harmless, lines))
        except (BombusError, TimeoutError) as error:
            text = one_line(str(error))
        self._transcripts = {episode: text}
        self.show()


# ---- rows and the page of an episode ------------------------------------------------------------------------------


def _colour(fate: str) -> str:
    return next((colour for start, colour in FATES if fate.startswith(start)), pal.TEXT)


def _group_row(group: ShownGroup) -> Text:
    count = {fate: sum(each.fate.startswith(fate) for each in group.episodes) for fate in ("open", "aborted")}
    rewards = [each.reward for each in group.episodes if each.reward is not None]
    label, task = map(one_line, group.key)
    row = Text(f"  {fit(label, 13)} {fit(task or '–', 29)} {len(group.episodes):>9}", pal.TEXT)
    row.append(f"{count['open'] or '':>6}", pal.AMBER).append(f"{count['aborted'] or '':>9}", pal.VERMILLION)
    if rewards:
        row.append(fit(figure(sum(rewards) / len(rewards)), 9, right=True), f"bold {pal.SKY}")
        row.append(f"  {figure(min(rewards))} – {figure(max(rewards))}", pal.QUIET)
    return row


def _time(record: EpisodeRecord, now_ns: int) -> str:
    return duration(seconds_between(record.claimed_ns, record.over_ns or now_ns))


def _episode_row(record: EpisodeRecord, now_ns: int) -> Text:
    row = Text(f"  {fit_end(one_line(record.episode), 15)} {fit(one_line(record.client), 17)} ", pal.TEXT)
    row.append(f"{record.type:<6}{record.version:>7}", pal.QUIET).append(f"{record.calls_made:>7}{record.tokens:>8,}")
    row.append(fit(_time(record, now_ns), 8, right=True), pal.QUIET)
    row.append(fit("–" if record.reward is None else figure(record.reward), 9, right=True), f"bold {pal.SKY}")
    return row.append(f"  {one_line(record.fate)}", _colour(record.fate))


def _page(record: EpisodeRecord, now_ns: int) -> Text:
    success = {None: "", True: ", a success", False: ", no success"}[record.is_success]
    in_step = f", trained in step {record.step}" if record.step else ""
    facts = {
        "task": record.task or "–",
        "client": record.client,
        "type": f"{record.type}, claimed on policy version {record.version}",
        "time": f"{_time(record, now_ns)}, since {pal.clock_time(record.claimed_ns)} UTC",
        "fate": f"{record.fate}{in_step}",
        "reward": "–" if record.reward is None else f"{figure(record.reward)}{success}",
        "failure": record.failure or "–",
        "calls": f"{record.calls_made:,}, {record.tokens:,} completion tokens",
    }
    page = Text()
    for name, value in facts.items():
        colour = _colour(record.fate) if name == "fate" else pal.TEXT
        page.append(f"{name:<9}", pal.QUIET).append(f"{one_line(value)}\n", colour)
    page.append(f"\n{'time':<10}{'prompt':>8}{'sampled':>9}{'version':>9}  call\n", f"{pal.QUIET} underline")
    for at_ns, call in record.calls:
        versions = str(call.oldest) if call.oldest == call.newest else f"{call.oldest}–{call.newest}"
        notes = [call.status] + [name for name in ("merged", "masked", "late", "incomplete") if getattr(call, name)]
        page.append(f"{pal.clock_time(at_ns):<10}{call.prompt_tokens:>8,}{call.completion_tokens:>9,}{versions:>9}  ")
        page.append(f"{one_line(call.ref.id)}  {', '.join(notes)}\n", pal.QUIET)
    return page
