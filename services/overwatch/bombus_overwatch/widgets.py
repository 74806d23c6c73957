"""The panels of the screen. A panel draws a `Screen`; it computes nothing and knows nothing of events."""

from rich.text import Text
from textual.widget import Widget

from bombus.figures import byte_size, duration, one_line, seconds_between
from bombus.hive.collection import Measure
from bombus.hive.events import EpisodeType
from bombus.hive.state import Phase
from bombus.hive.status.detail import format_text, incomplete_text, way_on
from bombus.hive.status.rows import EngineStatus, MultiModelClaimStatus, OpenEpisode, ReplicaStatus
from bombus_overwatch import palette as pal
from bombus_overwatch.drawing import Column, TextTable, bar, keys, sparkline
from bombus_overwatch.model import TailLine
from bombus_overwatch.palette import figure, fit, fit_end, harmless
from bombus_overwatch.screen import (
    GRAD_NORM,
    LISTED_FIRST,
    LOSS,
    MERGED,
    REWARD,
    STALENESS,
    Link,
    ModelRow,
    Screen,
    StageRow,
    StageState,
    ViewerState,
)

PHASES = {
    Phase.OFFLINE: "OFFLINE",
    Phase.BOOTING: "BOOTING",
    Phase.ROLLING: "ROLLING",
    Phase.ROLLING_POST: "DRAINING",
    Phase.WEIGHT_SYNCING: "SYNCING",
}
NEAR_LIMIT = 0.75  # an episode that has used this share of its idle limit stands out
HALF_LIMIT = 0.5
TASKS_FROM_WIDTH = 60  # a narrower panel has no room for the tasks of episodes
LABEL = 16  # cells for the name of a curve
KEYS = (("p", "pause"), ("←→", "scrub"), ("e", "engine"), ("f", "filter"), ("?", "help"), ("q", "quit"))
STAGE_MARKS = {
    StageState.RUNNING: ("◐", pal.AMBER),
    StageState.DONE: ("✓", pal.GREEN),
    StageState.BROKEN: ("✗", pal.VERMILLION),
}


# ---- tables ----

OpenRow = OpenEpisode | MultiModelClaimStatus


def _of_failed(has_failed: bool) -> str:
    return f"bold {pal.VERMILLION}" if has_failed else pal.TEXT


def count_of(row: OpenRow) -> int:
    return len(row.episodes) if isinstance(row, MultiModelClaimStatus) else 1


def name_of(row: OpenRow) -> str:
    return row.episode if isinstance(row, OpenEpisode) else f"{count_of(row)} on {'+'.join(row.engines)}"


def share_used(row: OpenRow) -> float:
    """Return the share of its idle limit that an episode has used."""
    return row.idle_s / row.limit_s if row.limit_s > 0 else 0.0


def _urgency(row: OpenRow) -> str:
    if share_used(row) >= NEAR_LIMIT:
        return f"bold {pal.VERMILLION}"
    return pal.YELLOW if share_used(row) >= HALF_LIMIT else pal.TEXT


def _served(replica: ReplicaStatus) -> tuple[str, str]:
    return f"v{replica.version}" if replica.version >= 0 else "empty", _health(replica)[1]


def _apart(replica: ReplicaStatus) -> str:
    """Return how far a replica is from its trainer."""
    return f"{replica.canary.difference:.0e}" if replica.canary else "unchecked" if replica.unchecked else ""


def _health(replica: ReplicaStatus) -> tuple[str, str]:
    """Return the mark of a replica and its colour."""
    if replica.quarantined:
        return "✗", pal.VERMILLION
    return ("●", pal.GREEN) if replica.current else ("○", pal.YELLOW)


MODELS: TextTable[ModelRow] = TextTable(
    Column("", 2, lambda row: ("!" if row.model.last_failed else "", pal.VERMILLION), left=True),
    Column("model", 0, lambda row: (row.model.model, _of_failed(row.model.last_failed)), keeps_end=True),
    Column("rank", 5, lambda row: (str(row.model.adapter.rank) if row.model.adapter else "all", pal.QUIET)),
    Column("step", 7, lambda row: (str(row.model.step), f"bold {pal.TEXT}")),
    Column("waiting", 8, lambda row: (str(row.model.waiting), pal.AMBER if row.model.waiting else pal.QUIET)),
    Column("loss", 9, lambda row: ("–" if row.loss is None else figure(row.loss), pal.SKY)),
    Column("tok/s", 9, lambda row: (figure(round(row.tokens_s)), pal.GREEN)),
)
STAGES: TextTable[StageRow] = TextTable(
    Column("", 2, lambda stage: STAGE_MARKS[stage.state], left=True),
    Column("", 0, lambda stage: (stage.name, pal.TEXT)),
    Column("", 9, lambda stage: (duration(stage.took_s), pal.QUIET)),
)
EPISODES: TextTable[OpenRow] = TextTable(
    Column("", 2, lambda row: ("!" if share_used(row) >= NEAR_LIMIT else "", _urgency(row)), left=True),
    Column("episode", 0, lambda row: (name_of(row), _urgency(row)), keeps_end=True),
    Column("client", 0, lambda row: (row.client, pal.QUIET if share_used(row) < NEAR_LIMIT else _urgency(row))),
    Column("type", 6, lambda row: (row.type, pal.PURPLE if row.type == EpisodeType.EVAL else pal.QUIET), left=True),
    Column("calls", 5, lambda row: (str(row.calls), _urgency(row))),
    Column("idle", 6, lambda row: (f"{row.idle_s:.0f}", _urgency(row))),
    Column("limit ", 7, lambda row: (f"{row.limit_s:.0f} ", pal.QUIET)),
    Column("task", 0, lambda row: (row.task, pal.QUIET)),
    count=count_of,
)
OTHERS: TextTable[tuple[str, float]] = TextTable(
    Column("", 0, lambda item: (item[0], pal.QUIET)),
    Column("", 11, lambda item: (figure(item[1]), pal.TEXT)),
)
REPLICAS: TextTable[ReplicaStatus] = TextTable(
    Column("", 2, lambda replica: _health(replica), left=True),
    Column("", 0, lambda replica: (replica.replica, pal.TEXT)),
    Column("", 9, lambda replica: (_apart(replica), pal.QUIET)),
    Column("", 7, lambda replica: _served(replica)),
)
LOST: TextTable[tuple[tuple[str, str], int]] = TextTable(
    Column("", 8, lambda row: (row[0][0], pal.VERMILLION), left=True),
    Column("", 0, lambda row: (row[0][1], pal.QUIET)),
    Column("", 8, lambda row: (f"{row[1]:,}", pal.TEXT)),
    none="nothing aborted or dropped",
)
TAIL: TextTable[TailLine] = TextTable(
    Column("", 9, lambda line: (pal.clock_time(line.at_ns), pal.QUIET), left=True),
    Column("", 2, lambda line: pal.MARKS[line.tone], left=True),
    Column("", 0, lambda line: (line.text, pal.MARKS[line.tone][1])),
    none="nothing yet",
)


# ---- panels ----


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

    def retitle(self, screen: Screen) -> None:
        self.display = _serves(screen.status)
        self.border_title = f"Models {len(screen.models)}"
        found = screen.status.operations
        self.border_subtitle = f"{found.executed:,} executed, {found.failed:,} failed" if found is not None else ""

    def lines(self, screen: Screen, width: int, height: int) -> list[Text]:
        return MODELS.lines(screen.models, width, height)


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
        return STAGES.lines(screen.stages[-height:], width, height)


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
        near = sum(count_of(row) for row in screen.episodes if share_used(row) >= NEAR_LIMIT)
        self.border_title = f"Running episodes {sum(map(count_of, screen.episodes)):,}"
        self.border_subtitle = f"{near} near their idle limit" if near else ""

    def lines(self, screen: Screen, width: int, height: int) -> list[Text]:
        shown = EPISODES if width >= TASKS_FROM_WIDTH else TextTable(*EPISODES.columns[:-1], count=count_of)
        return shown.lines(screen.episodes, width, height)


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
        others = sorted((item for item in training.metrics.items() if item[0] not in shown), key=_place)
        return rows + (OTHERS.lines(others, width, height) if others else [])

    def _figures(self, screen: Screen) -> Text:
        metrics = screen.training.metrics
        row = Text("episodes/s ", pal.QUIET).append(figure(screen.episodes_s), pal.TEXT)
        if STALENESS in metrics:
            row.append("  staleness ", pal.QUIET).append(figure(metrics[STALENESS]), pal.TEXT)
        if MERGED in metrics:
            row.append("  merged ", pal.QUIET).append(f"{metrics[MERGED]:.0%}", pal.TEXT)
        return row


def _place(item: tuple[str, float]) -> tuple[int, str]:
    """Return the place of a figure in the list of figures, for sorting."""
    name = item[0]
    return next((n for n, start in enumerate(LISTED_FIRST) if name.startswith(start)), len(LISTED_FIRST)), name


def _curve(label: str, values: tuple[float, ...], room: int, colour: str, now: float | None = None) -> Text:
    row = Text(fit(label, LABEL), pal.QUIET)
    if not values:
        return row.append("–", pal.FAINT)
    row.append(fit(sparkline(values, room, 0.0 if now is not None else None), room), colour)
    return row.append(fit(figure(values[-1] if now is None else now), 9, right=True), f"bold {pal.TEXT}")


class ReplicasPanel(Panel):
    """Shows inference replicas and what they serve, followed by how many episodes were lost and why."""

    def retitle(self, screen: Screen) -> None:
        self.border_title = f"Replicas {len(screen.status.replicas)}"

    def lines(self, screen: Screen, width: int, height: int) -> list[Text]:
        lost = LOST.lines(screen.lost, width, height)
        rows = REPLICAS.lines(screen.status.replicas, width, height - len(lost))
        return [*rows, *[Text("")] * (len(rows) + len(lost) < height), *lost]


class TailPanel(Panel):
    """Shows the newest events, with the latest at the bottom."""

    def retitle(self, screen: Screen) -> None:
        self.border_title = f"Events: {screen.tail_group}"

    def lines(self, screen: Screen, width: int, height: int) -> list[Text]:
        return TAIL.lines(screen.tail[-height:], width, height)


class Banner(Panel):
    """Shows the hive and engine on the left; the link, position and time on the right."""

    def lines(self, screen: Screen, width: int, height: int) -> list[Text]:
        left = Text(" ⬢ bombus ", f"bold {pal.AMBER}")
        left.append(" hive ", pal.QUIET).append(screen.viewer.hive, f"bold {pal.TEXT}")
        if screen.engine:
            left.append("  engine ", pal.QUIET).append(screen.engine, f"bold {pal.TEXT}")
        if len(screen.engines) > 1:
            left.append(f" {screen.engines.index(screen.engine) + 1} of {len(screen.engines)}", pal.QUIET)
        right = self._link(screen.viewer)
        right.append(f"  event {screen.position:,}", pal.QUIET)
        right.append(f"  {pal.clock_time(screen.now_ns)} UTC ", pal.QUIET)
        left.append(" " * max(1, width - left.cell_len - right.cell_len))
        return [left.append_text(right)]

    def _link(self, viewer: ViewerState) -> Text:
        mark, colour = pal.LINKS[viewer.link]
        if viewer.link == Link.LIVE and viewer.held is not None:
            return Text("‖ held", f"bold {pal.YELLOW}")
        text = Text(f"{mark} {viewer.link}", f"bold {colour}")
        if viewer.link == Link.CATCHING_UP and viewer.target:
            filled, rest = bar(viewer.newest, viewer.target, 10)
            text.append(" ").append(filled, colour).append(rest, pal.FAINT)
            text.append(f" of {viewer.target:,}", pal.QUIET)
        return text


class KeyBar(Panel):
    """Shows the keys. If the view is held, also shows its place in the past; if the bus is away, the reason."""

    def lines(self, screen: Screen, width: int, height: int) -> list[Text]:
        viewer = screen.viewer
        if viewer.held is not None:
            return [self._scrubber(viewer, width)]
        if viewer.why:
            return [Text(f" {one_line(viewer.why)}", pal.VERMILLION)]
        return [keys([(key, f"filter: {screen.tail_group}" if what == "filter" else what) for key, what in KEYS])]

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
        return line.append_text(keys((("←→", "1"), ("pgup/dn", "100"), ("end", "live"))))
