"""The panels of the screen. A panel draws a `Screen`; it computes nothing and knows nothing of events."""

from rich.text import Text
from textual.widget import Widget

from bombus.figures import byte_size, duration, one_line, seconds_between
from bombus.hive.collection import Measure
from bombus.hive.describe import line_of, tone_of
from bombus.hive.events import EpisodeType
from bombus.hive.state import Phase
from bombus.hive.status.detail import format_text, incomplete_text, way_on
from bombus.hive.status.rows import EngineStatus, ReplicaStatus
from bombus_overwatch import palette as pal
from bombus_overwatch.drawing import Column, bar, sparkline, table
from bombus_overwatch.palette import figure, fit, fit_end, harmless
from bombus_overwatch.screen import (
    GRAD_NORM,
    HALF_LIMIT,
    LISTED_FIRST,
    LOSS,
    MERGED,
    REWARD,
    STALENESS,
    EpisodeRow,
    ModelRow,
    Screen,
    StageState,
)

PHASES = {
    Phase.OFFLINE: "OFFLINE",
    Phase.BOOTING: "BOOTING",
    Phase.ROLLING: "ROLLING",
    Phase.ROLLING_POST: "DRAINING",
    Phase.WEIGHT_SYNCING: "SYNCING",
}
TASKS_FROM_WIDTH = 60  # a narrower panel has no room for the tasks of episodes
LABEL = 16  # cells for the name of a curve
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
        self.set_class(bool(screen.status.formats), "-read")

    def lines(self, screen: Screen, width: int, height: int) -> list[Text]:
        status = screen.status
        if not screen.engine:
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
        self.display = bool(status.failure or status.suspended or _warning(status))

    def render(self) -> Text:
        if self.data is None:
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


def _serves(status: EngineStatus) -> bool:
    """Return whether an operations run is active. Such a run has models and no batches."""
    return status.clients_take_episodes and status.phase not in (Phase.BOOTING, Phase.OFFLINE)


class ModelsPanel(Panel):
    """Shows the models of an operations run, in place of the collection panel."""

    COLUMNS = (
        Column("", 2, left=True),
        Column("model", keeps_end=True),
        Column("rank", 5),
        Column("step", 7),
        Column("waiting", 8),
        Column("loss", 9),
        Column("tok/s", 9),
    )

    def retitle(self, screen: Screen) -> None:
        self.display = _serves(screen.status)
        self.border_title = f"Models {len(screen.models)}"
        found = screen.status.operations
        self.border_subtitle = f"{found.executed:,} executed, {found.failed:,} failed" if found is not None else ""

    def lines(self, screen: Screen, width: int, height: int) -> list[Text]:
        return table(self.COLUMNS, [self._row(row) for row in screen.models], width, height)

    def _row(self, row: ModelRow) -> list[tuple[str, str]]:
        model = row.model
        style = f"bold {pal.VERMILLION}" if model.last_failed else pal.TEXT
        return [
            ("!" if model.last_failed else "", style),
            (model.model, style),
            ("all" if model.adapter is None else str(model.adapter.rank), pal.QUIET),
            (str(model.step), f"bold {pal.TEXT}"),
            (str(model.waiting), pal.AMBER if model.waiting else pal.QUIET),
            ("–" if row.loss is None else figure(row.loss), pal.SKY),
            (figure(round(row.tokens_s)), pal.GREEN),
        ]


class CollectionPanel(Panel):
    """Shows progress towards the next batch, or the boot stages while the engine is booting or offline."""

    def retitle(self, screen: Screen) -> None:
        self.display = not _serves(screen.status)
        is_booting = bool(screen.engine) and screen.status.phase in (Phase.BOOTING, Phase.OFFLINE)
        self.border_title = "Boot" if is_booting else "Collection"
        self.border_subtitle = screen.status.method if screen.engine and not is_booting else ""

    def lines(self, screen: Screen, width: int, height: int) -> list[Text]:
        status = screen.status
        if not screen.engine:
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

    COLUMNS = (
        Column("", 2, left=True),
        Column("episode", keeps_end=True),
        Column("client"),
        Column("type", 6, left=True),
        Column("calls", 5),
        Column("idle", 6),
        Column("limit ", 7),
    )

    def retitle(self, screen: Screen) -> None:
        near = sum(row.count for row in screen.episodes if row.near)
        self.border_title = f"Running episodes {sum(row.count for row in screen.episodes):,}"
        self.border_subtitle = f"{near} near their idle limit" if near else ""

    def lines(self, screen: Screen, width: int, height: int) -> list[Text]:
        columns = [*self.COLUMNS, Column("task")] if width >= TASKS_FROM_WIDTH else self.COLUMNS
        rows = [self._row(row)[: len(columns)] for row in screen.episodes]
        return table(columns, rows, width, height, [row.count for row in screen.episodes])

    def _row(self, row: EpisodeRow) -> list[tuple[str, str]]:
        episode = row.episode
        style = f"bold {pal.VERMILLION}" if row.near else pal.YELLOW if row.used >= HALF_LIMIT else pal.TEXT
        return [
            ("!" if row.near else "", style),
            (episode.episode, style),
            (episode.client, style if row.near else pal.QUIET),
            (episode.type, pal.PURPLE if episode.type == EpisodeType.EVAL else pal.QUIET),
            (str(episode.calls), style),
            (f"{episode.idle_s:.0f}", style),
            (f"{episode.limit_s:.0f} ", pal.QUIET),
            (episode.task, pal.QUIET),
        ]


class TrainingPanel(Panel):
    """Shows the trainer, the step in flight, and the metrics of completed steps."""

    def lines(self, screen: Screen, width: int, height: int) -> list[Text]:
        training, trainer = screen.training, screen.status.trainer
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
            _curve(LOSS, training.loss, room, pal.SKY),
            _curve(GRAD_NORM, training.grad_norm, room, pal.PURPLE),
            _curve("tokens/s", screen.tokens, room, pal.GREEN, round(screen.tokens_s)),
            self._figures(screen),
        ]
        shown = {REWARD, LOSS, GRAD_NORM, STALENESS, MERGED}
        others = sorted((name for name in training.metrics if name not in shown), key=_place)
        return rows + [
            Text(f"{fit(one_line(name), width - 12)} ", pal.QUIET).append(
                fit(figure(training.metrics[name]), 11, right=True), pal.TEXT
            )
            for name in others
        ]

    def _figures(self, screen: Screen) -> Text:
        metrics = screen.training.metrics
        row = Text("episodes/s ", pal.QUIET).append(figure(screen.episodes_s), pal.TEXT)
        if STALENESS in metrics:
            row.append("  staleness ", pal.QUIET).append(figure(metrics[STALENESS]), pal.TEXT)
        if MERGED in metrics:
            row.append("  merged ", pal.QUIET).append(f"{metrics[MERGED]:.0%}", pal.TEXT)
        return row


def _place(name: str) -> tuple[int, str]:
    """Return the place of a figure in the list of figures, for sorting."""
    return next((n for n, start in enumerate(LISTED_FIRST) if name.startswith(start)), len(LISTED_FIRST)), name


def _curve(label: str, values: tuple[float, ...], room: int, colour: str, now: float | None = None) -> Text:
    row = Text(fit(label, LABEL), pal.QUIET)
    if not values:
        return row.append("–", pal.FAINT)
    row.append(fit(sparkline(values, room, 0.0 if now is not None else None), room), colour)
    return row.append(fit(figure(values[-1] if now is None else now), 9, right=True), f"bold {pal.TEXT}")


def _health(replica: ReplicaStatus) -> tuple[str, str]:
    """Return the mark of a replica and its colour."""
    if replica.quarantined:
        return "✗", pal.VERMILLION
    return ("●", pal.GREEN) if replica.current else ("○", pal.YELLOW)


class ReplicasPanel(Panel):
    """Shows inference replicas and what they serve, followed by how many episodes were lost and why."""

    def retitle(self, screen: Screen) -> None:
        self.border_title = f"Replicas {len(screen.status.replicas)}"

    def lines(self, screen: Screen, width: int, height: int) -> list[Text]:
        replicas = screen.status.replicas
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
        for (what, why), count in screen.lost:
            row = Text(f"{what} ", pal.VERMILLION).append(fit(why, width - 16), pal.QUIET)
            rows.append(row.append(fit(f"{count:,}", 8, right=True), pal.TEXT))
        return rows or [Text("nothing aborted or dropped", pal.QUIET)]


class TailPanel(Panel):
    """Shows the newest events, with the latest at the bottom."""

    def retitle(self, screen: Screen) -> None:
        self.border_title = f"Events: {screen.tail_group}"

    def lines(self, screen: Screen, width: int, height: int) -> list[Text]:
        rows = []
        for _, event in screen.tail[-height:]:
            mark, colour = pal.MARKS[tone_of(event)]
            row = Text(f"{pal.clock_time(event.at_ns)} ", pal.QUIET).append(f"{mark} ", colour)
            rows.append(row.append(fit(line_of(event), width - 11), colour))
        return rows or [Text("nothing yet", pal.QUIET)]
