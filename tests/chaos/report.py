"""What an audit has found, and how it is printed."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class EngineReport:
    """What was found of one engine. `wrong` is empty when every guarantee was kept."""

    calls_acknowledged: int = 0
    calls_found: int = 0
    episodes_ended: int = 0
    rewards_refused: int = 0
    episodes_trained_once: int = 0
    episodes_waiting: int = 0  # in the pool or in the batch that is being trained
    episodes_dropped: int = 0  # with the reason in an event
    episodes_evaluated: int = 0
    steps: int = 0
    steps_after: int = 0  # those of them that were made once the killing had ended
    trained_again: bool = False  # the last step, from the log, with the same bytes
    replicas_quarantined: int = 0
    pauses: int = 0  # without any replica that could load
    errors_seen: int = 0  # by agents, of calls and claims that were not acknowledged
    lost: int = 0
    doubled: int = 0
    wrong: list[str] = field(default_factory=list)

    def lose(self, what: str) -> None:
        self.lost += 1
        self.wrong.append(f"lost: {what}")

    def double(self, what: str) -> None:
        self.doubled += 1
        self.wrong.append(f"doubled: {what}")

    @property
    def otherwise_wrong(self) -> int:
        return len(self.wrong) - self.lost - self.doubled


@dataclass
class Report:
    """What was found of a hive, and of each of its engines."""

    engines: dict[str, EngineReport] = field(default_factory=dict)
    events: int = 0  # of the log, when it was checked
    leaders: int = 0
    verified: bool = False  # by `bombus log check`, with the state that the last leader had
    wrong_in_hive: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> list[str]:
        return [
            *self.wrong_in_hive,
            *(f"{name}: {wrong}" for name, report in self.engines.items() for wrong in report.wrong),
        ]


_LINES: Mapping[str, str] = {
    "calls acknowledged": "calls_acknowledged",
    "calls found": "calls_found",
    "episodes ended": "episodes_ended",
    "rewards refused": "rewards_refused",
    "episodes trained once": "episodes_trained_once",
    "  waiting": "episodes_waiting",
    "  dropped": "episodes_dropped",
    "  evaluation": "episodes_evaluated",
    "steps": "steps",
    "  after the killing": "steps_after",
    "replicas quarantined": "replicas_quarantined",
    "waits for a replica": "pauses",
    "lost": "lost",
    "doubled": "doubled",
    "otherwise wrong": "otherwise_wrong",
    "errors seen by agents": "errors_seen",
}


def lines(report: Report) -> list[str]:
    """Return a table with a column for each engine, and a line for the hive."""
    engines = report.engines.values()
    table = [f"{'':24}" + "".join(f"{name:>12}" for name in report.engines)]
    table += [
        f"{name:24}" + "".join(f"{getattr(each, value):12}" for each in engines) for name, value in _LINES.items()
    ]
    again = ("same bytes" if each.trained_again else "OTHER BYTES" for each in engines)
    table.append(f"{'last step made again':24}" + "".join(f"{each:>12}" for each in again))
    state = "the log's, folded again" if report.verified else "NOT THAT OF THE LOG"
    return [
        *table,
        f"state of the last leader      {state}",
        f"leaders                 {report.leaders:12}",
        f"events                  {report.events:12}",
    ]
