"""What must hold of multi-model episodes in the simulator.

Whatever is killed, after each append the episodes of a multi-model one are all open, all ended by one report, or all
aborted.
"""

from collections import Counter
from collections.abc import Callable

from bombus.hive import events as ev
from bombus.hive.events import Event
from bombus.hive.inbox import EpisodeResult
from bombus.hive.state import EngineState, Hive, Phase
from bombus_coordinator.rules.episodes import outcome_digest

MAIN, SIDE = "main", "side"

Episodes = dict[str, str]  # the episodes of a multi-model episode, by engine


class MultiModelLedger:
    """Sees every event about episodes of either engine, and every answer to the clients of multi-model ones."""

    def __init__(self, hive: Callable[[], Hive], seen: Counter[str]) -> None:
        """`hive` is the fold of the log."""
        self.hive = hive
        self.seen = seen
        self._wholes: dict[str, Episodes] = {}  # by episode: its multi-model episode
        self._ends: dict[str, bytes] = {}  # by episode of a multi-model one: its outcome's digest, b"" for an abort
        self._changed: set[str] = set()  # episodes in what was appended last

    def check(self, event: Event, engine: EngineState) -> None:
        """Note an event before it is folded."""
        match event:
            case ev.EpisodeClaimed():
                assert engine.phase == Phase.ROLLING
                assert len(engine.open) + len(event.episodes) <= engine.collection.max_open_claims
                self._note_claimed(event)
            case ev.EpisodeEnded():
                for outcome in event.outcomes:
                    self._note_over(outcome.episode, outcome.digest)
            case ev.EpisodeAborted():
                for episode in event.episodes:
                    self._note_over(episode, b"")

    def _note_claimed(self, event: ev.EpisodeClaimed) -> None:
        for number, episode in enumerate(event.episodes if event.partners else ()):
            partners = {name: episodes[number] for name, episodes in event.partners.items()}
            self._wholes[episode] = {event.engine: episode, **partners}
            self._changed.add(episode)

    def _note_over(self, episode: str, outcome: bytes) -> None:
        if episode in self._wholes:
            assert episode not in self._ends, f"{episode} ends twice"
            self._ends[episode] = outcome
            self._changed.add(episode)

    def check_wholes(self) -> None:
        """Check the multi-model episodes that an append has changed: all of their episodes are in the same state."""
        for episode in self._changed:
            whole = self._wholes[episode]
            for name, part in whole.items():
                assert self._wholes.get(part) == whole, f"{part} does not know the partners of {episode}"
                is_open = part in self.hive().engine(name).open
                assert is_open == (part not in self._ends)
            ends = {self._ends.get(part) for part in whole.values()}
            assert len(ends) == 1, f"the episodes of {sorted(whole.values())} are not in the same state"
            self.seen["multi-model episodes aborted"] += ends == {b""}
        self._changed.clear()

    def acknowledged_grant(self, several: list[Episodes]) -> None:
        self.seen["multi-model grants acknowledged"] += 1
        for multi in several:
            for episode in multi.values():
                assert self._wholes.get(episode) == multi, f"{multi} was granted, but not on the log"

    def acknowledged_end(self, results: dict[str, EpisodeResult]) -> None:
        self.seen["multi-model ends acknowledged"] += 1
        found = {self._ends.get(result.episode) for result in results.values()}
        assert found == {outcome_digest(results)}, f"the end of {results} was acknowledged, but is not on the log"

    def acknowledged_aborted(self, multi: Episodes) -> None:
        for name, episode in multi.items():
            assert episode not in self.hive().engine(name).open, f"{episode} was aborted with its partner, but is open"

    def finish(self) -> None:
        """Check that nothing of a multi-model episode is left behind on an engine alone."""
        hive = self.hive()
        for name in (MAIN, SIDE):
            for episode in hive.engine(name).open.values():
                assert len(list(hive.partners(episode))) == len(episode.partners)
