"""The claims that wait for room on one or several engines: which claim is next, and which have waited long enough
(R13).

Every command looks for the next claim, and ten thousand claims may be waiting, so nothing here scans them all.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec
from sortedcontainers import SortedList

from bombus.errors import Code, Refused
from bombus.hive.events import EpisodeType
from bombus.hive.inbox import Claim
from bombus.hive.pacing import pace
from bombus.hive.shares import has_share
from bombus.hive.state import EngineState

WAITING_MAX = 10_000

Share = tuple[str, str]  # (name of a key, name of a client that has no key); one of the two is ""


class Holder(Protocol):
    """Something that belongs to a client: a claim, an episode, or the event that grants a claim."""

    @property
    def owner(self) -> str: ...

    @property
    def client(self) -> str: ...


def share_of(holder: Holder) -> Share:
    """Return the share that something counts toward: the share of the client's key, which the client cannot choose.

    A client without a named key has its own share.
    """
    return (holder.owner, "") if holder.owner else ("", holder.client)


def over_cap(claim: Claim, open_episodes: int) -> bool:
    """Return whether granting a claim would give its key more open episodes than it may have."""
    return claim.open_max > 0 and open_episodes + claim.count > claim.open_max


class Waiting(msgspec.Struct, kw_only=True):
    """A claim that is waiting for room. `commands` are the ids of the messages to answer. There are several if the
    claim was sent again."""

    claim: Claim
    share: Share
    commands: list[str]
    first_asked_ns: int
    until_ns: int


class Held(NamedTuple):
    """The number of a share's open episodes: `total` on all engines of a queue, and `most` on the engine where it has
    the most."""

    total: int = 0
    most: int = 0


class Place(NamedTuple):
    """A claim's place among other claims. The claim with the smallest place is next."""

    open_episodes: int
    first_asked_ns: int
    claim: str


class _Line:
    """The waiting claims for one type of episode, ordered by (open episodes of the share, first request, claim id).

    Within a share, claims are ordered by first request and claim id, and only the share's first claim is placed among
    those of other shares. So when the number of the share's open episodes changes, only that claim's place changes. A
    share at its limit has no place.
    """

    def __init__(self, waiting: Mapping[str, Waiting]) -> None:
        self._waiting = waiting  # all waiting claims, by claim id
        self._of_share: dict[Share, SortedList[tuple[int, str]]] = {}
        self._firsts: SortedList[Place] = SortedList()
        self._places: dict[Share, Place] = {}

    def add(self, waiting: Waiting, held: Held) -> None:
        claims = self._of_share.get(waiting.share)
        if claims is None:
            claims = self._of_share[waiting.share] = SortedList()
        claims.add((waiting.first_asked_ns, waiting.claim.claim))
        self.place(waiting.share, held)

    def remove(self, waiting: Waiting, held: Held) -> None:
        claims = self._of_share[waiting.share]
        claims.remove((waiting.first_asked_ns, waiting.claim.claim))
        if not claims:
            del self._of_share[waiting.share]
        self.place(waiting.share, held)

    def place(self, share: Share, held: Held) -> None:
        """Put a share's first claim in its place, if the share has a claim and may open more episodes."""
        before = self._places.pop(share, None)
        if before is not None:
            self._firsts.remove(before)
        claims = self._of_share.get(share)
        if claims is None:
            return
        asked_ns, claim = claims[0]
        if not over_cap(self._waiting[claim].claim, held.most):
            place = self._places[share] = Place(held.total, asked_ns, claim)
            self._firsts.add(place)

    def first(self) -> Place | None:
        return self._firsts[0] if self._firsts else None

    def waiting_of(self, share: Share) -> int:
        return len(self._of_share.get(share, ()))


class Queue:
    """The waiting claims of one engine, or the multi-model claims that wait for a set of `engines`.

    The queue counts the open episodes of each share, as reported by the caller.
    """

    def __init__(self, engines: tuple[str, ...] = ("",)) -> None:
        self._waiting: dict[str, Waiting] = {}  # waiting claims, by claim id
        self._lines = {kind: _Line(self._waiting) for kind in EpisodeType}
        self._ends: SortedList[tuple[int, str]] = SortedList()  # when each claim's wait is over
        self._open: dict[str, Counter[Share]] = {engine: Counter() for engine in engines}
        self.held: Counter[str] = Counter()  # number of waiting claims, by the holder whose share they use

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, claim: str) -> bool:
        return claim in self._waiting

    def opened(self, share: Share, episodes: int, engine: str = "") -> None:
        """Note that a share has this many more open episodes on an engine (fewer if negative)."""
        counted = self._open[engine]
        counted[share] += episodes
        if not counted[share]:
            del counted[share]
        if self._waiting:
            held = self.held_by(share)
            for line in self._lines.values():
                line.place(share, held)

    def held_by(self, share: Share) -> Held:
        """Return how many open episodes a share has."""
        found = [counted.get(share, 0) for counted in self._open.values()]
        return Held(sum(found), max(found))

    def waiting_of(self, share: Share) -> int:
        """Return how many of a share's claims are waiting."""
        return sum(line.waiting_of(share) for line in self._lines.values())

    def place_of(self, waiting: Waiting) -> Place:
        """Return a claim's place, which can be compared with the places of claims in other queues."""
        return Place(self.held_by(waiting.share).total, waiting.first_asked_ns, waiting.claim.claim)

    def add(self, claim: Claim, now_ns: int, until_ns: int, elsewhere: int = 0) -> None:
        """Have a claim wait until `until_ns`. Raises `Refused` if too many claims are waiting.

        A claim that is already waiting keeps waiting until the later of the two times. But if the new time is now, its
        wait ends; this is how an interrupted client gives up. `elsewhere` is the number of claims in the same share
        that wait for the same engine in other queues.
        """
        waiting = self._waiting.get(claim.claim)
        if waiting is not None:
            waiting.commands.append(claim.id)
            self._ends.remove((waiting.until_ns, claim.claim))
            waiting.until_ns = max(waiting.until_ns, until_ns) if until_ns > now_ns else now_ns
        else:
            self._check_room(claim, elsewhere)
            waiting = Waiting(
                claim=claim,
                share=share_of(claim),
                commands=[claim.id],
                first_asked_ns=min(claim.first_asked_ns or now_ns, now_ns),
                until_ns=until_ns,
            )
            self._waiting[claim.claim] = waiting
            self.held[claim.holder] += 1
            self._lines[claim.type].add(waiting, self.held_by(waiting.share))
        self._ends.add((waiting.until_ns, claim.claim))

    def _check_room(self, claim: Claim, elsewhere: int) -> None:
        if len(self._waiting) >= WAITING_MAX and not has_share(self.held, claim.holder, WAITING_MAX):
            raise Refused(Code.OVERLOADED, f"{len(self._waiting)} claims are already waiting; try again later.")
        if not claim.waiting_max:
            return
        waiting = self.waiting_of(share_of(claim)) + elsewhere
        if waiting >= claim.waiting_max:
            raise Refused(
                Code.NO_EPISODES,
                f"No available episodes to claim. Key {claim.owner} has {waiting} of at most {claim.waiting_max} "
                "claims waiting already; try again later.",
            )

    def remove(self, waiting: Waiting) -> None:
        claim = waiting.claim
        del self._waiting[claim.claim]
        self.held[claim.holder] -= 1
        self._lines[claim.type].remove(waiting, self.held_by(waiting.share))
        self._ends.remove((waiting.until_ns, claim.claim))

    def first(self, kind: EpisodeType | None = None) -> Waiting | None:
        """Return the first claim of the share with the fewest open episodes or, if several shares have the fewest, the
        oldest of their first claims. If `kind` is given, consider only claims of that type."""
        if not self._waiting:
            return None
        lines = self._lines.values() if kind is None else (self._lines[kind],)
        found = min((place for line in lines if (place := line.first()) is not None), default=None)
        return None if found is None else self._waiting[found.claim]

    def over(self, now_ns: int) -> Iterator[Waiting]:
        """Remove the claims whose wait is over, and yield them."""
        while self._ends and self._ends[0][0] <= now_ns:
            waiting = self._waiting[self._ends[0][1]]
            self.remove(waiting)
            yield waiting

    def clear(self) -> Iterator[Waiting]:
        """Remove all claims, and yield them."""
        for waiting in list(self._waiting.values()):
            self.remove(waiting)
            yield waiting


def why_paced(engine: EngineState, claim: Claim) -> str:
    """Return why a claimed training episode has to wait for training, or "" if it need not. Always return "" for an
    evaluation episode (R14)."""
    if claim.type == EpisodeType.EVAL:
        return ""
    found = pace(engine, claim.count, claim.task_hint)
    return found.waits if found is not None else ""


def has_room(engine: EngineState, claim: Claim, kept: int = 0) -> bool:
    """Return whether an engine has room for a claim besides the `kept` episodes reserved for another claim."""
    return len(engine.open) + claim.count + kept <= engine.collection.max_open_claims


def next_of(queue: Queue, engines: Sequence[EngineState]) -> Waiting | None:
    """Return the next claim. While training episodes have to wait, consider only evaluation claims."""
    waiting = queue.first()
    if waiting is not None and any(why_paced(engine, waiting.claim) for engine in engines):
        return queue.first(EpisodeType.EVAL)
    return waiting
