"""The panels of the screen. A panel draws a `Screen`; it computes nothing and knows nothing of events."""

from dataclasses import dataclass

from rich.text import Text
from textual.widget import Widget

from bombus.figures import byte_size, duration, one_line, seconds_between
from bombus.hive.collection import Measure
from bombus.hive.events import EpisodeType
from bombus.hive.state import Phase
from bombus.hive.status.detail import format_text, incomplete_text, way_on
from bombus.hive.status.rows import EngineStatus, ReplicaStatus
from bombus_overwatch import palette as pal
from bombus_overwatch.drawing import bar, sparkline
from bombus_overwatch.palette import figure, fit, fit_end, harmless
from bombus_overwatch.screen import HALF_LIMIT, EpisodeRow, ModelRow, Screen, StageState

PHASES = {
    Phase.OFFLINE: "OFFLINE",
    Phase.BOOTING: "BOOTING",
    Phase.ROLLING: "ROLLING",
    Phase.ROLLING_POST: "DRAINING",
    Phase.WEIGHT_SYNCING: "SYNCING",
}


LABEL = 16  # cells for the name of a curve
HEADING = f"{pal.QUIET} underline"
STAGE_MARKS = {
    StageState.RUNNING: ("◐", pal.AMBER),
    StageState.DONE: ("✓", pal.GREEN),
    StageState.BROKEN: ("✗", pal.VERMILLION),
}


class Panel(Widget):
    """A box with a title. `lines` returns rich text for the available size; anything beyond that is cut off."""

    def __init__(self, title: str = "", id: str | None = None, classes: str = "panel") -> None:
        super().__init__(id=id, classes=classes)
        if title:
            self.border_title = title
        self.data: Screen | None = None

    def show(self, screen: Screen) -> None:
        if screen != self.data:
            self.data = screen
            self.retitle(screen)
            self.refresh()

    def retitle(self, screen: Screen) -> None:
        """Set a title that depends on the data."""

    def lines(self, screen: Screen, width: int, height: int) -> list[Text]:
        raise NotImplementedError

    def render(self) -> Text:
        width, height = self.content_size
        if self.data is None or width <= 0 or height <= 0:
            return Text("")
        shown = self.lines(self.data, width, height)[:height]
        for line in shown:
            line.plain = harmless(line.plain)
            line.truncate(width)
        return Text("\n", no_wrap=True, end="").join(shown)


class PhaseBar(Panel):
    """Shows the engine's phase, how long it has been in that phase, and what it is waiting for.

    Once a gateway has read the model, a third line shows the format that the gateway found.
    """

    def retitle(self, screen: Screen) -> None:
        self.set_class(bool(screen.status and screen.status.formats), "-read")

    def lines(self, screen: Screen, width: int, height: int) -> list[Text]:
        status = screen.status
        if status is None:
            return [Text(" no engine yet: waiting for the first configuration", pal.QUIET)]
        cycle = Text(" ")
        for phase, name in PHASES.items():
            if phase != Phase.OFFLINE:
                cycle.append(" › ", pal.FAINT)
            if phase != status.phase:
                cycle.append(name, pal.QUIET)
                continue
            failed = phase == Phase.OFFLINE and status.failure
            shown = "FAILED" if failed else f"{name}, SUSPENDED" if status.suspended else name
            colour = pal.VERMILLION if failed or status.suspended else pal.AMBER
            cycle.append(f" {shown} {duration(status.phase_s)} ", f"bold {pal.INK} on {colour}")
        read = [Text(f" {one_line(format_text(row.format))}", pal.QUIET) for row in status.formats[:1]]
        return [cycle, self._facts(screen, width), *read]

    def _facts(self, screen: Screen, width: int) -> Text:
        status = screen.status
        assert status is not None
        version = str(status.version) if status.version >= 0 else "–"
        facts = Text(" ")
        facts.append(one_line(status.detail), pal.TEXT)
        right = Text()
        for label, value in (("run", str(status.run)), ("step", str(status.global_step)), ("version", version)):
            right.append(f"  {label} ", pal.QUIET).append(value, f"bold {pal.TEXT}")
        right.append(f"  {fit(one_line(status.model), min(28, len(status.model)))} ", pal.QUIET)
        facts.truncate(max(0, width - right.cell_len - 1), overflow="ellipsis")
        facts.append(" " * max(1, width - facts.cell_len - right.cell_len))
        return facts.append_text(right)


class Notice(Panel):
    """Shows in full why the run is suspended or has failed, or what is wrong with its services; hidden otherwise."""

    def retitle(self, screen: Screen) -> None:
        status = screen.status
        self.display = bool(status and (status.failure or status.suspended or _warning(status)))

    def render(self) -> Text:
        if self.data is None or self.data.status is None:
            return Text("")
        status = self.data.status
        if status.failure:
            return Text(f"✗ {one_line(status.failure)}", f"bold {pal.VERMILLION}")
        if status.suspended:
            return Text(f"✗ {one_line(status.suspended)} ({way_on(status.until_served)})", f"bold {pal.VERMILLION}")
        return Text(f"! {one_line(_warning(status))}", f"bold {pal.AMBER}")


def _warning(status: EngineStatus) -> str:
    """Return what is wrong with replicas, gateways, rewards or calls while the run continues."""
    apart = [f"{each.replica} is quarantined: {each.quarantined}" for each in status.replicas if each.quarantined]
    return ". ".join(filter(None, [*apart, status.silent, status.disagreement, incomplete_text(status)]))


def _serves(screen: Screen) -> bool:
    """Return whether an operations run is active. Such a run has models and no batches."""
    status = screen.status
    is_on = status is not None and status.phase not in (Phase.BOOTING, Phase.OFFLINE)
    return is_on and status is not None and status.clients_take_episodes


class ModelsPanel(Panel):
    """Shows the models of an operations run, in place of the collection panel."""

    def retitle(self, screen: Screen) -> None:
        self.display = _serves(screen)
        self.border_title = f"Models {len(screen.models)}"
        found = screen.status.operations if screen.status is not None else None
        self.border_subtitle = f"{found.executed:,} executed, {found.failed:,} failed" if found is not None else ""

    def lines(self, screen: Screen, width: int, height: int) -> list[Text]:
        if not screen.models:
            return [Text("none", pal.QUIET)]
        name = max(0, width - 40)
        rows = [Text(f"  {_cell('model', name)}{'rank':>5}{'step':>7}{'waiting':>8}{'loss':>9}{'tok/s':>9}", HEADING)]
        fits = height - 1 if len(screen.models) < height else height - 2
        rows += [self._row(row, name) for row in screen.models[:fits]]
        if len(screen.models) > fits:
            rows.append(Text(f"  and {len(screen.models) - fits:,} more", pal.QUIET))
        return rows

    def _row(self, row: ModelRow, name: int) -> Text:
        model = row.model
        style = f"bold {pal.VERMILLION}" if model.last_failed else pal.TEXT
        text = Text("! " if model.last_failed else "  ", style)
        text.append(fit_end(one_line(model.model), name - 1) + " " if name > 1 else "", style)
        text.append(fit("all" if model.adapter is None else str(model.adapter.rank), 5, right=True), pal.QUIET)
        text.append(f"{model.step:>7}", f"bold {pal.TEXT}")
        text.append(f"{model.waiting:>8}", pal.AMBER if model.waiting else pal.QUIET)
        text.append(fit("–" if row.loss is None else figure(row.loss), 9, right=True), pal.SKY)
        return text.append(fit(figure(round(row.tokens_s)), 9, right=True), pal.GREEN)


class CollectionPanel(Panel):
    """Shows progress towards the next batch, or the boot stages while the engine is booting or offline."""

    def retitle(self, screen: Screen) -> None:
        self.display = not _serves(screen)
        status = screen.status
        if status is not None and status.phase in (Phase.BOOTING, Phase.OFFLINE):
            self.border_title = "Boot"
            self.border_subtitle = ""
        else:
            self.border_title = "Collection"
            self.border_subtitle = status.method if status is not None else ""

    def lines(self, screen: Screen, width: int, height: int) -> list[Text]:
        status = screen.status
        if status is None:
            return []
        if status.phase in (Phase.BOOTING, Phase.OFFLINE):
            return self._stages(screen, width, height)
        rows = [_measure(measure, width) for measure in status.progress]
        pool = Text("  pool ", pal.QUIET).append(f"{status.pool_episodes:,} episodes", pal.TEXT)
        rows.append(pool.append(f", {byte_size(status.pool_bytes)}", pal.QUIET))
        if status.pace is not None:
            now = status.pace
            ahead = Text("  ahead of training ", pal.QUIET).append(
                f"{now.unfinished} + {now.sealable} batches", pal.TEXT
            )
            ahead.append(f", bound {now.max_staleness}", pal.QUIET)
            rows.append(ahead.append(", new episodes are waiting" if now.waits else "", pal.AMBER))
        return rows

    def _stages(self, screen: Screen, width: int, height: int) -> list[Text]:
        assert screen.status is not None
        if not screen.stages:
            return [Text(fit(one_line(screen.status.detail), width), pal.QUIET)]
        rows = []
        for stage in screen.stages[-height:]:
            mark, colour = STAGE_MARKS[stage.state]
            took = duration(stage.took_s)
            row = Text(f"{mark} ", colour).append(fit(stage.name, width - 3 - len(took)), pal.TEXT)
            rows.append(row.append(f" {took}", pal.QUIET))
        return rows


def _measure(measure: Measure, width: int) -> Text:
    """Return a measure's row. The measure that the method waits for is marked and bright."""
    colour = pal.AMBER if measure.decides else pal.QUIET
    row = Text("▸ " if measure.decides else "  ", pal.AMBER)
    row.append(fit(measure.name, 16), pal.TEXT if measure.decides else pal.QUIET)
    if not measure.target:
        return row.append(f"{measure.done:,}", pal.TEXT)
    count = f"{measure.done:,}/{measure.target:,}"
    filled, rest = bar(measure.done, measure.target, max(4, width - 30))
    row.append(filled, pal.GREEN if measure.done >= measure.target else colour).append(rest, pal.FAINT)
    return row.append(fit(count, 12, right=True), f"bold {pal.TEXT}" if measure.decides else pal.QUIET)


class EpisodesPanel(Panel):
    """Shows running episodes, longest idle first."""

    def retitle(self, screen: Screen) -> None:
        near = sum(row.count for row in screen.episodes if row.near)
        self.border_title = f"Running episodes {sum(row.count for row in screen.episodes):,}"
        self.border_subtitle = f"{near} near their idle limit" if near else ""

    def lines(self, screen: Screen, width: int, height: int) -> list[Text]:
        if not screen.episodes:
            return [Text("none", pal.QUIET)]
        columns = _Columns.of(width)
        rows = [Text(columns.heading(), HEADING)]
        fits = height - 1 if len(screen.episodes) < height else height - 2
        rows += [self._row(row, columns) for row in screen.episodes[:fits]]
        if len(screen.episodes) > fits:
            left = sum(row.count for row in screen.episodes[fits:])
            rows.append(Text(f"  and {left:,} more", pal.QUIET))
        return rows

    def _row(self, row: EpisodeRow, columns: "_Columns") -> Text:
        episode = row.episode
        style = f"bold {pal.VERMILLION}" if row.near else pal.YELLOW if row.used >= HALF_LIMIT else pal.TEXT
        kind = pal.PURPLE if episode.type == EpisodeType.EVAL else pal.QUIET
        text = Text("! " if row.near else "  ", style)
        text.append(fit_end(one_line(episode.episode), columns.name - 1) + " ", style)
        text.append(_cell(episode.client, columns.client), style if row.near else pal.QUIET)
        text.append(fit(episode.type, 6), kind)
        text.append(f"{episode.calls:>5}{fit(f'{episode.idle_s:.0f}', 6, right=True)}", style)
        text.append(fit(f"{episode.limit_s:.0f}", 6, right=True), pal.QUIET)
        return text.append(" " + _cell(episode.task, columns.task), pal.QUIET) if columns.task else text


@dataclass(frozen=True)
class _Columns:
    """Widths of the text columns, which share the room left by the numbers. A column of width 0 is left out."""

    name: int
    client: int
    task: int

    @classmethod
    def of(cls, width: int) -> "_Columns":
        room = width - 25
        if room < 20:
            return cls(max(0, room), 0, 0)
        name = min(18, 13 + (room - 20) // 2)
        client = min(17, room - name)
        task = room - name - client - 1
        return cls(name, client, task if task >= 8 else 0)

    def heading(self) -> str:
        names = f"  {_cell('episode', self.name)}{_cell('client', self.client)}"
        head = f"{names}{'type':<6}{'calls':>5}{'idle':>6}{'limit':>6}"
        return f"{head} {_cell('task', self.task)}" if self.task else head


def _cell(text: str, width: int) -> str:
    """Return untrusted text in a column of this width, including one trailing space."""
    return fit(one_line(text), width - 1) + " " if width > 1 else ""


class TrainingPanel(Panel):
    """Shows the trainer, the step in flight, and the metrics of completed steps."""

    def lines(self, screen: Screen, width: int, height: int) -> list[Text]:
        training, trainer, rates = screen.training, screen.training.trainer, screen.rates
        head = Text("step ", pal.QUIET)
        if training.model:
            head = Text("newest ", pal.QUIET).append(fit_end(training.model, max(4, width - 26)), pal.TEXT)
        elif trainer.step_in_flight is not None:
            head.append(f"{trainer.step_in_flight}", f"bold {pal.AMBER}").append(" in flight ", pal.AMBER)
            head.append(duration(seconds_between(trainer.step_since_ns, screen.now_ns)), pal.TEXT)
            head.append(f", {trainer.groups} groups", pal.QUIET)
            if trainer.failures:
                head.append(f"  failed {trainer.failures}×", f"bold {pal.VERMILLION}")
        else:
            head.append(str(training.last_step) if training.last_step is not None else "–", pal.TEXT)
            head.append(" is done" if training.last_step is not None else " none yet", pal.QUIET)
        head.append(f"  trainer epoch {trainer.epoch}" if trainer.epoch else "  no trainer", pal.QUIET)
        room = max(4, width - LABEL - 9)
        rows = [
            head,
            _curve("train/loss", training.loss, room, pal.SKY),
            _curve("train/grad_norm", training.grad_norm, room, pal.PURPLE),
            self._tokens(rates.tokens_s, rates.tokens_curve, room),
            self._figures(screen),
        ]
        return rows + [
            Text(f"{fit(name, width - 12)} ", pal.QUIET).append(fit(figure(value), 11, right=True), pal.TEXT)
            for name, value in training.others
        ]

    def _tokens(self, tokens_s: float, curve: tuple[float, ...], room: int) -> Text:
        row = Text(fit("tokens/s", LABEL), pal.QUIET)
        row.append(fit(sparkline(curve, room, floor=0.0), room), pal.GREEN)
        return row.append(fit(figure(round(tokens_s)), 9, right=True), f"bold {pal.TEXT}")

    def _figures(self, screen: Screen) -> Text:
        training = screen.training
        row = Text("episodes/s ", pal.QUIET).append(figure(screen.rates.episodes_s), pal.TEXT)
        if training.staleness is not None:
            row.append("  staleness ", pal.QUIET).append(figure(training.staleness), pal.TEXT)
        if training.merge_share is not None:
            row.append("  merged ", pal.QUIET).append(f"{training.merge_share:.0%}", pal.TEXT)
        return row


def _curve(label: str, values: tuple[float, ...], room: int, colour: str) -> Text:
    row = Text(fit(label, LABEL), pal.QUIET)
    if not values:
        return row.append("–", pal.FAINT)
    row.append(fit(sparkline(values, room), room), colour)
    return row.append(fit(figure(values[-1]), 9, right=True), f"bold {pal.TEXT}")


def _health(replica: ReplicaStatus) -> tuple[str, str]:
    """Return the mark of a replica and its colour."""
    if replica.quarantined:
        return "✗", pal.VERMILLION
    return ("●", pal.GREEN) if replica.current else ("○", pal.YELLOW)


class ReplicasPanel(Panel):
    """Shows inference replicas and what they serve, followed by how many episodes were lost and why."""

    def retitle(self, screen: Screen) -> None:
        replicas = screen.status.replicas if screen.status else ()
        self.border_title = f"Replicas {len(replicas)}"

    def lines(self, screen: Screen, width: int, height: int) -> list[Text]:
        replicas = screen.status.replicas if screen.status else ()
        losses = self._losses(screen, width)
        room = max(1, height - len(losses))
        rows = [] if replicas else [Text("none", pal.QUIET)]
        for replica in replicas[: room if len(replicas) <= room else room - 1]:
            mark, colour = _health(replica)
            version = f"v{replica.version}" if replica.version >= 0 else "empty"
            apart = f"{replica.canary.difference:.0e}" if replica.canary else "unchecked" if replica.unchecked else ""
            room_of_name = width - 10 - (len(apart) + 1 if apart else 0)
            row = Text(f"{mark} ", colour).append(fit(one_line(replica.replica), room_of_name), pal.TEXT)
            if apart:
                row.append(f" {apart}", pal.QUIET)
            rows.append(row.append(fit(version, 8, right=True), f"bold {colour}"))
        if len(replicas) > room:
            rows.append(Text(f"and {len(replicas) - room + 1} more", pal.QUIET))
        gap = [Text("")] if len(rows) + len(losses) < height else []
        return rows + gap + losses

    def _losses(self, screen: Screen, width: int) -> list[Text]:
        rows = []
        for title, counts in (("aborted", screen.aborted), ("dropped", screen.dropped)):
            if not counts:
                continue
            for reason, count in counts:
                row = Text(f"{title} ", pal.VERMILLION).append(fit(reason, width - 16), pal.QUIET)
                rows.append(row.append(fit(f"{count:,}", 8, right=True), pal.TEXT))
        return rows or [Text("nothing aborted or dropped", pal.QUIET)]


class TailPanel(Panel):
    """Shows the newest events, with the latest at the bottom."""

    def retitle(self, screen: Screen) -> None:
        self.border_title = f"Events: {screen.tail_group}"

    def lines(self, screen: Screen, width: int, height: int) -> list[Text]:
        rows = []
        for entry in screen.tail[-height:]:
            mark, colour = pal.MARKS[entry.tone]
            row = Text(f"{pal.clock_time(entry.at_ns)} ", pal.QUIET).append(f"{mark} ", colour)
            rows.append(row.append(fit(entry.text, width - 11), colour))
        return rows or [Text("nothing yet", pal.QUIET)]
