"""The coordinator's state outside the fold: activity, waiting claims, recent answers.

None of it is on the log, and all of it may be lost: after a crash, silence is counted from zero again (R5), and clients
that wait for a claim send it again (R13).
"""

from collections.abc import Iterable, Sequence
from typing import TypedDict

import msgspec

from bombus.hive.bounded import trim
from bombus.hive.inbox import Answer
from bombus.hive.pauses import Pause, led_ns
from bombus.hive.state import EngineState, Episode
from bombus_coordinator.rules.waiting import Queue, Share, share_of

ANSWERS_KEPT = 10_000
CONFIRM_S = 5.0  # a grant is taken back unless its answer is confirmed within this time
REPLICA_LAPSE_S = 10.0
AWAY_NS = 5_000_000_000  # a gap between ticks longer than this means that there was no bus or no leader
GATEWAY_AWAY_NS = 2_500_000_000  # gateways send touches every second; after this long without any, all count as gone
NEVER_NS = 1 << 62
CATCH_UP = 10  # while the hive's time is ahead of the clock, one second in this many is skipped


def ns(seconds: float) -> int:
    return int(seconds * 1e9)


class Unconfirmed(msgspec.Struct):
    """A grant decided at inbox message `seq`. The grant is taken back at `until_ns` unless it has been confirmed by
    then."""

    engine: str
    seq: int
    until_ns: int


class Heard(msgspec.Struct, frozen=True):
    """When a trainer's newest heartbeat arrived, and what the trainer was doing."""

    at_ns: int
    doing: str


class EventHead(TypedDict):
    """The fields that all events of a run have."""

    at_ns: int
    engine: str
    run: int


class Live(msgspec.Struct, kw_only=True):
    """The part of a leader's state that is not on the log.

    `now_ns` is the hive's time: the server's clock, or a later time if the clock was set back.
    """

    now_ns: int = 0
    epoch_ns: int = 0
    ticked_ns: int | None = None  # time of the last tick; None if no ticks are expected
    led_until_ns: int = 0  # time of the last tick that this leader has read
    pauses: Sequence[Pause] = ()  # the same as `Hive.pauses`
    stamp_ns: int | None = None  # the server's clock when it stored the last message
    ahead_ns: int = 0  # how far `now_ns` is ahead of the server's clock
    event_bytes_max: int = 0
    refusing: str = ""  # why the hive refuses new work, "" while it accepts work
    refusing_groups: str = ""  # why the hive refuses rollout groups, "" while it accepts them
    released: int = 0  # messages before this sequence in the stream `ops` may be purged
    began_after: int = 0  # the last event before this epoch began
    inherited: int = 0  # the newest inbox message when this epoch began
    seq: int = 0  # inbox sequence of the message that is being decided
    activity: dict[str, int] = {}  # time of each episode's last activity
    idle_from_ns: dict[str, int] = {}  # no episode of this engine is idle for too long before
    calls: dict[str, set[str]] = {}  # the ids of an open episode's calls, by episode
    unconfirmed: dict[str, Unconfirmed] = {}  # unconfirmed grants, by claim
    queues: dict[str, Queue] = {}  # waiting claims, by engine
    multi_model: dict[tuple[str, ...], Queue] = {}  # waiting multi-model claims, by engines; never empty
    replica_seen: dict[tuple[str, str], int] = {}  # (engine, replica): time of its last heartbeat
    trainers: dict[str, Heard] = {}  # each trainer's newest heartbeat, by engine
    session_seen: dict[tuple[str, str], int] = {}  # (engine, session): when its client was last heard from
    unfilled: dict[str, tuple[int, ...]] = {}  # engine: the state of a queue of rollout groups that yielded no batch
    environment_seen: dict[tuple[str, int], int] = {}  # (engine, environment): when it was last heard from
    client_seen: dict[str, int] = {}  # client with episodes that sends touches: when last heard from
    gateways_ns: int = 0  # when any gateway was last heard from
    gateways_since_ns: int = 0  # start of the present period of hearing from gateways
    answers: dict[str, Answer] = {}  # recent answers, by command
    granted: dict[str, None] = {}  # granted claims, kept after their episodes have ended; oldest first

    def at(self, engine: EngineState) -> EventHead:
        """Return the fields of an event that happens now, in the engine's current run."""
        return {"at_ns": self.now_ns, "engine": engine.name, "run": engine.run}

    def refusing_of(self, engine: EngineState) -> str:
        """Return why an engine refuses new work, or "" while it accepts work (see `Hive.refusing_of`)."""
        return self.refusing_groups if self.refusing_groups and engine.queues_groups else self.refusing

    def idle_deadline_ns(self, episode: Episode) -> int:
        last = max(self.activity.get(episode.id, 0), episode.active_ns, self.epoch_ns)
        return last + ns(episode.discard_timeout_s)

    def silent_clients(self, limit_s: float) -> set[str]:
        """Return the clients that hold episodes and send touches but have been silent for at least `limit_s`.

        Silence counts only while gateways are heard from, because touches arrive only through them.
        """
        last_ns = self.now_ns - ns(limit_s)
        is_cut_off = self.now_ns - self.gateways_ns > GATEWAY_AWAY_NS
        if is_cut_off or max(self.gateways_since_ns, self.epoch_ns) > last_ns:
            return set()
        return {client for client, seen_ns in self.client_seen.items() if seen_ns <= last_ns}

    def touched(self, clients: Sequence[str]) -> None:
        """Record that a gateway is alive, and that it has heard from these clients."""
        if self.now_ns - self.gateways_ns > GATEWAY_AWAY_NS:
            self.gateways_since_ns = self.now_ns
        self.gateways_ns = self.now_ns
        for client in clients:
            if client in self.client_seen:
                self.client_seen[client] = self.now_ns

    def follow_clients(self, episodes: Iterable[Episode]) -> None:
        """Track only those clients that hold these open episodes and send touches, since a touch may name any
        client."""
        self.client_seen = {each.client: self.client_seen.get(each.client, 0) for each in episodes if each.touches}

    def silent_since(self, at_ns: int) -> int:
        """Return when a sender's silence began, if the sender was last heard from at `at_ns`. No silence begins before
        this epoch.

        Messages from before the epoch may be unread or forgotten.
        """
        return max(at_ns, self.epoch_ns)

    def is_over(self, since_ns: int, limit_s: float) -> bool:
        """Return whether work that began at `since_ns` has used up its time limit.

        Only time during which there was a leader counts, and only up to the last tick.
        """
        return self.led_ns(since_ns) >= ns(limit_s)

    def led_ns(self, since_ns: int) -> int:
        """Return how long the hive had a leader between `since_ns` and the last tick."""
        return led_ns(self.pauses, max(since_ns, self.led_until_ns)) - led_ns(self.pauses, since_ns)

    def queue(self, engine: EngineState) -> Queue:
        """Return the engine's queue of waiting claims. It is built from the state on first use, and then kept up to
        date."""
        queue = self.queues.get(engine.name)
        if queue is None:
            queue = self.queues[engine.name] = Queue()
            for episode in engine.open.values():
                queue.opened(share_of(episode), 1)
        return queue

    def calls_of(self, episode: Episode) -> set[str]:
        """Return the ids of an open episode's calls, of those too that wait for their event: whoever notes a call adds
        its id."""
        known = self.calls.get(episode.id)
        if known is None:
            known = self.calls[episode.id] = {call.ref.id for call in episode.calls}
        return known

    def opened(self, engine: str, share: Share, episodes: int) -> None:
        """Note that a share has this many more open episodes (fewer if negative)."""
        if engine in self.queues:
            self.queues[engine].opened(share, episodes)
        for engines, queue in self.multi_model.items():
            if engine in engines:
                queue.opened(share, episodes, engine)

    def multi_model_queue(self, engines: Sequence[EngineState]) -> Queue:
        """Return the queue of multi-model claims that wait for these engines. Like `queue`, it is built from the state
        on first use."""
        names = tuple(engine.name for engine in engines)
        queue = self.multi_model.get(names)
        if queue is None:
            queue = self.multi_model[names] = Queue(names)
            for engine in engines:
                for episode in engine.open.values():
                    queue.opened(share_of(episode), 1, engine.name)
        return queue

    def waits_otherwise(self, claim: str, engines: tuple[str, ...]) -> bool:
        """Return whether this claim id already waits as a single claim on one of these engines, or as a multi-model
        claim for another set that includes one of them."""
        single = len(engines) > 1 and any(claim in self.queues[name] for name in engines if name in self.queues)
        others = (
            queue
            for names, queue in self.multi_model.items()
            if names != engines and not set(names).isdisjoint(engines)
        )
        return single or any(claim in queue for queue in others)

    def multi_model_waiting(self, engine: str, share: Share) -> int:
        """Return how many of a share's multi-model claims wait for an engine."""
        return sum(queue.waiting_of(share) for engines, queue in self.multi_model.items() if engine in engines)

    def remember(self, command: str, answer: Answer) -> None:
        self.answers[command] = answer
        trim(self.answers, ANSWERS_KEPT)

    def remember_grant(self, claim: str, engine: EngineState) -> None:
        """Remember a grant. The engine takes it back unless it is confirmed."""
        self.unconfirmed[claim] = Unconfirmed(engine.name, self.seq, self.now_ns + ns(CONFIRM_S))
        self.granted[claim] = None
        trim(self.granted, ANSWERS_KEPT)

    def arrived(self, seq: int, stamp_ns: int) -> None:
        """Record that the server stored the next message, at `stamp_ns` by its clock.

        During a long time without ticks, no activity can be seen (R5). So after such a time, or if the clock was set
        far ahead, all silence is counted from zero again, as in a new epoch. If the clock is set back, the hive's time
        keeps advancing, but a tenth slower than the clock until the clock has caught up.
        """
        self.seq = seq
        passed_ns = stamp_ns - (self.now_ns if self.stamp_ns is None else self.stamp_ns)
        if passed_ns < 0:
            self.ahead_ns -= passed_ns
        else:
            self.ahead_ns = max(0, self.ahead_ns - passed_ns // CATCH_UP)
        self.stamp_ns = stamp_ns
        self.now_ns = max(self.now_ns, stamp_ns + self.ahead_ns)
        if self.is_away:
            self.epoch_ns = self.now_ns
            self.replica_seen.clear()

    @property
    def is_away(self) -> bool:
        """Return whether the last tick was long ago, because there was no bus or no leader, or because the clock was
        set ahead."""
        return self.ticked_ns is not None and self.now_ns - self.ticked_ns > AWAY_NS

    def tick(self, answered: int) -> None:
        """Record a tick. The tick was sent once the answers to all messages up to `answered` had been sent.

        The time allowed for confirming a claim starts when the answer to the claim has been sent.
        """
        if self.is_away:
            answered = 0
        self.ticked_ns = self.now_ns
        for grant in self.unconfirmed.values():
            if grant.seq > answered:
                grant.until_ns = self.now_ns + ns(CONFIRM_S)

    def forget(self, episode: str) -> None:
        self.activity.pop(episode, None)
        self.calls.pop(episode, None)
