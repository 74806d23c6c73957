"""What is shown of a log: its state at one position, and the figures of its runs. Pure."""

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from typing import Self

import msgspec

from bombus.hive import events as ev
from bombus.hive.fold.evolve import evolve
from bombus.hive.state import Hive
from bombus.hive.why.links import LastEvents
from bombus.insight.runs import Runs
from bombus.replay.diagnosis.diagnose import at_step, merged
from bombus.replay.diagnosis.findings import RunFinding
from bombus.replay.diagnosis.steps import RunSeries, StepFigures

SECOND = 1_000_000_000
SECONDS_KEPT = 300
DIGITS_MAX = 18  # of a number in a URL: more do not fit 64 bits


class SecondLoad(msgspec.Struct, array_like=True):
    """Tokens and episodes that came in during one second of log time."""

    second: int
    tokens: int = 0
    episodes: int = 0


class Moment(msgspec.Struct):
    """A hive after the event at `position`, and what its state does not keep: the newest event of each kind, and how
    many tokens and episodes came in during each of the last seconds, by engine."""

    hive: Hive
    position: int
    now_ns: int = 0
    last: LastEvents = msgspec.field(default_factory=LastEvents)
    seconds: dict[str, list[SecondLoad]] = {}

    def __post_init__(self) -> None:
        self.now_ns = max(self.now_ns, self.hive.now_ns)

    def fold(self, position: int, event: ev.AnyEvent, stored_ns: int) -> None:
        """Fold the event at `position`, which was stored at `stored_ns`."""
        evolve(self.hive, event)
        self.last.note(event, stored_ns)
        self.position, self.now_ns = position, max(self.hive.now_ns, stored_ns)
        if isinstance(event, ev.CallsNoted):
            self._second(event).tokens += sum(call.completion_tokens for call in event.calls)
        elif isinstance(event, ev.EpisodeEnded):
            self._second(event).episodes += len(event.outcomes)

    def _second(self, event: ev.CallsNoted | ev.EpisodeEnded) -> SecondLoad:
        seconds = self.seconds.setdefault(event.engine, [])
        second = event.at_ns // SECOND
        if not seconds or seconds[-1].second < second:
            seconds.append(SecondLoad(second))
            del seconds[:-SECONDS_KEPT]
        return seconds[-1]

    def per_second(self, engine: str, now_ns: int, window_s: int = 10) -> tuple[float, float]:
        """Return how many tokens and episodes came in per second during the last `window_s` whole seconds."""
        until = now_ns // SECOND
        counted = [each for each in self.seconds.get(engine, ()) if until - window_s <= each.second < until]
        return sum(each.tokens for each in counted) / window_s, sum(each.episodes for each in counted) / window_s

    def encode(self) -> bytes:
        return _encoder.encode(self)

    def copy(self) -> Self:
        return msgspec.msgpack.decode(self.encode(), type=type(self))


_encoder = msgspec.msgpack.Encoder()


class Record:
    """The state after the newest event of a log, as `live`, and the runs. `first` is the earliest position that can be
    shown. Call `fold` with each event in order.

    What a run had at an earlier position is a prefix of its series: its steps have increasing `done_seq`.
    """

    def __init__(self, hive: Hive, position: int, moment: type[Moment] = Moment) -> None:
        self.first = position
        self.live = moment(hive, position)
        self.runs = Runs(hive)
        # By engine and run, with which episode ids begin: the number of each claim's first episode, and the claim's
        # position. Numbers are consecutive.
        self._claims: dict[str, tuple[array[int], array[int]]] = {}
        self._found: dict[str, dict[int, list[RunFinding]]] = {}  # by run and `done_seq`

    def fold(self, position: int, event: ev.AnyEvent, stored_ns: int) -> None:
        self.live.fold(position, event, stored_ns)
        self.runs.note(position, event)
        if isinstance(event, ev.EpisodeClaimed) and event.episodes:
            stem, number = _parts(event.episodes[0])
            numbers, positions = self._claims.setdefault(stem, (array("q"), array("q")))
            numbers.append(number)
            positions.append(position)

    def claimed_at(self, episode: str) -> int:
        """Return the position of the claim of an episode, or `first` if the log has no such claim."""
        stem, number = _parts(episode)
        numbers, positions = self._claims.get(stem, ((), ()))
        index = bisect_right(numbers, number) - 1
        return positions[index] if index >= 0 else self.first

    def findings(self, series: RunSeries, steps: Sequence[StepFigures]) -> list[RunFinding]:
        """Return what is wrong with the learning of a run, judging by its first `steps`. Each step is examined once."""
        known = self._found.setdefault(series.name, {})
        found = []  # `known` may lose some: this runs in a thread
        for end, row in enumerate(steps, 1):
            if (each := known.get(row.done_seq)) is None:
                each = known[row.done_seq] = at_step(steps, end, series.job)
            found.append(each)
        return merged(steps, found)

    def examine_again(self, series: RunSeries, since: int) -> None:
        """Forget the findings of the steps from event `since` on, whose answers are known by now."""
        known = [*self._found.get(series.name, {}).items()]  # a thread that examines steps goes on with the old ones
        self._found[series.name] = {seq: found for seq, found in known if seq < since}

    def runs_at(self, position: int) -> list[RunSeries]:
        """Return the runs that had started by a position, oldest first."""
        return [series for series in self.runs.series.values() if series.started_seq <= position]


def _parts(episode: str) -> tuple[str, int]:
    stem, _, number = episode.rpartition("-")
    return stem, int(number) if number.isdecimal() and len(number) <= DIGITS_MAX else 0
