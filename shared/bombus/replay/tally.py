"""Summarises the episodes of a log, for the error raised when an episode is not on the log."""

from bombus.hive.events import AnyEvent, EpisodeClaimed
from bombus.replay.source import NotOnLog

RUNS_NAMED = 6


class EpisodesSeen:
    """The episodes on a log, as the numbers of the first and last one in each run. All numbers in between exist too,
    because they are consecutive."""

    def __init__(self, base: int = 0) -> None:
        self._compacted = f" (everything before event {base} was compacted)" if base else ""
        self._numbers: dict[str, tuple[int, int]] = {}  # keyed by engine and run, with which episode ids begin

    def note(self, event: AnyEvent) -> None:
        if isinstance(event, EpisodeClaimed):
            for episode in event.episodes:
                stem, _, number = episode.rpartition("-")
                first, last = self._numbers.get(stem, (int(number), 0))
                self._numbers[stem] = (first, max(last, int(number)))

    def check(self, episode: str) -> None:
        """Raise `NotOnLog`, which lists existing episodes, if this episode is not among them."""
        if not self._numbers:
            raise NotOnLog(f"there is no episode {episode}: no episode was claimed in this log{self._compacted}")
        stem, _, number = episode.rpartition("-")
        if stem in self._numbers and number.isdecimal():
            first, last = self._numbers[stem]
            if len(number) <= len(str(last)) and first <= int(number) <= last:
                return
        near = [stem] if stem in self._numbers else list(self._numbers)[-RUNS_NAMED:]
        spans = ", ".join(f"{each}-{self._numbers[each][0]} to {each}-{self._numbers[each][1]}" for each in near)
        older = ", and older ones" if stem not in self._numbers and len(self._numbers) > RUNS_NAMED else ""
        raise NotOnLog(f"there is no episode {episode} in this log; there are {spans}{older}{self._compacted}")
