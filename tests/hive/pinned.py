"""Count what holders pin of the stream of calls from the events alone, beside the fold."""

from collections import Counter, defaultdict

from bombus.hive import events as ev
from bombus.hive.shares import share_name
from bombus.hive.state import Hive
from bombus.hive.steps import episodes_of


class PinLedger:
    """All calls that were noted, in their order, and how many of them there were at each claim."""

    def __init__(self) -> None:
        self._calls: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)  # by engine: whose, and their bytes
        self._claims: dict[str, tuple[str, int]] = {}

    def note(self, event: ev.Event) -> None:
        calls = self._calls[event.engine]
        match event:
            case ev.EpisodeClaimed():
                claim = share_name(event.owner, event.admin), len(calls)
                self._claims |= dict.fromkeys(event.episodes, claim)
            case ev.CallsNoted():
                calls += ((self._claims[call.episode][0], call.bytes) for call in event.calls)

    def check(self, hive: Hive) -> int:
        """Check that the fold counts the same. Return how much is pinned."""
        found: Counter[str] = Counter()
        for engine in hive.engines.values():
            needed = [*engine.open, *engine.pool, *episodes_of(engine.needed_steps)]
            since: dict[str, int] = {}
            for holder, at in map(self._claims.__getitem__, needed):
                since[holder] = min(since.get(holder, at), at)
            for holder, at in since.items():
                found[holder] += sum(size for whose, size in self._calls[engine.name][at:] if whose == holder)
        assert +found == +hive.pinned_calls(), "what holders pin is what they have stored since their oldest claim"
        assert found.total() == sum(engine.calls.pinned for engine in hive.engines.values())
        return found.total()
