"""The claims that wait for room in an engine: which of them is next, and which have waited long enough (R13).

Every command asks for the next claim, and ten thousand may wait, so nothing here looks at all of them.
"""

from collections import Counter
from collections.abc import Iterator

import msgspec
from sortedcontainers import SortedList

from bombus.errors import Code, Refused
from bombus.hive.events import EpisodeType
from bombus.hive.inbox import Claim

WAITING_MAX = 10_000


class Waiting(msgspec.Struct, kw_only=True):
    """A claim that waits for room. `commands` are the message ids to answer: one, unless it was sent again."""

    claim: Claim
    commands: list[str]
    first_asked_ns: int
    until_ns: int


class _Line:
    """The waiting claims of one type of episode, in the order (open episodes of the client, first request, claim id).

    A client's claims are in the order of the last two, so that only the first of them has a place among those of other
    clients. When the client's open episodes change, that one place does.
    """

    def __init__(self) -> None:
        self._of_client: dict[str, SortedList[tuple[int, str]]] = {}
        self._firsts: SortedList[tuple[int, int, str]] = SortedList()
        self._places: dict[str, tuple[int, int, str]] = {}  # by client

    def add(self, waiting: Waiting, open_episodes: int) -> None:
        claims = self._of_client.setdefault(waiting.claim.client, SortedList())
        claims.add((waiting.first_asked_ns, waiting.claim.claim))
        self.place(waiting.claim.client, open_episodes)

    def remove(self, waiting: Waiting, open_episodes: int) -> None:
        claims = self._of_client[waiting.claim.client]
        claims.remove((waiting.first_asked_ns, waiting.claim.claim))
        if not claims:
            del self._of_client[waiting.claim.client]
        self.place(waiting.claim.client, open_episodes)

    def place(self, client: str, open_episodes: int) -> None:
        """Put the first claim of a client, if it has one, into its place."""
        before = self._places.pop(client, None)
        if before is not None:
            self._firsts.remove(before)
        if client in self._of_client:
            place = self._places[client] = (open_episodes, *self._of_client[client][0])
            self._firsts.add(place)

    def first(self) -> tuple[int, int, str] | None:
        return self._firsts[0] if self._firsts else None


class Queue:
    """The waiting claims of one engine. It counts the open episodes of each client, which its user reports."""

    def __init__(self) -> None:
        self._waiting: dict[str, Waiting] = {}  # by claim
        self._lines = {kind: _Line() for kind in EpisodeType}
        self._ends: SortedList[tuple[int, str]] = SortedList()  # when each claim has waited long enough
        self._open: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._waiting)

    def opened(self, client: str, episodes: int) -> None:
        """Note that a client has so many open episodes more, or fewer if the number is negative."""
        self._open[client] += episodes
        if not self._open[client]:
            del self._open[client]
        for line in self._lines.values():
            line.place(client, self._open[client])

    def add(self, claim: Claim, now_ns: int, until_ns: int) -> None:
        """Let a claim wait until a time. One that waits already goes on waiting. Raises `Refused` for one too many."""
        waiting = self._waiting.get(claim.claim)
        if waiting is not None:
            waiting.commands.append(claim.id)
            self._ends.remove((waiting.until_ns, claim.claim))
            waiting.until_ns = max(waiting.until_ns, until_ns)
        elif len(self._waiting) >= WAITING_MAX:
            raise Refused(Code.OVERLOADED, f"{WAITING_MAX} claims are waiting already; try again later.")
        else:
            first_asked_ns = min(claim.first_asked_ns or now_ns, now_ns)
            waiting = Waiting(claim=claim, commands=[claim.id], first_asked_ns=first_asked_ns, until_ns=until_ns)
            self._waiting[claim.claim] = waiting
            self._lines[claim.type].add(waiting, self._open[claim.client])
        self._ends.add((waiting.until_ns, claim.claim))

    def remove(self, waiting: Waiting) -> None:
        claim = waiting.claim
        del self._waiting[claim.claim]
        self._lines[claim.type].remove(waiting, self._open[claim.client])
        self._ends.remove((waiting.until_ns, claim.claim))

    def first(self, kind: EpisodeType | None = None) -> Waiting | None:
        """Return the claim, of any type or of one, whose client has the fewest open episodes; the oldest of several."""
        if not self._waiting:
            return None
        lines = self._lines.values() if kind is None else (self._lines[kind],)
        found = min((place for line in lines if (place := line.first()) is not None), default=None)
        return None if found is None else self._waiting[found[2]]

    def over(self, now_ns: int) -> Iterator[Waiting]:
        """Remove the claims that have waited long enough, and yield them."""
        while self._ends and self._ends[0][0] <= now_ns:
            waiting = self._waiting[self._ends[0][1]]
            self.remove(waiting)
            yield waiting

    def clear(self) -> Iterator[Waiting]:
        """Remove all claims, and yield them."""
        for waiting in list(self._waiting.values()):
            self.remove(waiting)
            yield waiting
