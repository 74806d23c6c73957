"""The coordinator's state besides the fold: activity, waiting claims, recent answers.

None of it is on the log, and all of it may be lost: after a crash silence is counted anew (R5), and clients that wait
for a claim send it again (R13).
"""

from collections.abc import Iterable, Sequence

import msgspec

from bombus.hive.bounded import trim
from bombus.hive.inbox import Answer
from bombus.hive.pauses import Pause, led_ns
from bombus.hive.state import EngineState, Episode
from bombus_coordinator.rules.waiting import Queue, Share, share_of

ANSWERS_KEPT = 10_000
CONFIRM_S = 5.0  # a granted claim is taken back unless its answer is confirmed within this time
REPLICA_LAPSE_S = 10.0
AWAY_NS = 5_000_000_000  # this long between two ticks means that the bus was unreachable or that there was no leader
GATEWAY_AWAY_NS = 2_500_000_000  # without client touches, which each gateway sends once a second: no gateway is heard
CATCH_UP = 10  # one second in this many is left out while the hive's time is ahead of the clock


def ns(seconds: float) -> int:
    return int(seconds * 1e9)


class Unconfirmed(msgspec.Struct):
    """A grant decided at the inbox message `seq`, which is taken back at `until_ns` unless it is confirmed."""

    engine: str
    seq: int
    until_ns: int


class Heard(msgspec.Struct, frozen=True):
    """When a trainer's newest heartbeat arrived, and what the trainer was doing."""

    at_ns: int
    doing: str


class Live(msgspec.Struct, kw_only=True):
    """The state of a leader that is not on the log.

    `now_ns` is the hive's time: the time of the server's clock, or ahead of it if the clock was set back.
    """

    now_ns: int = 0
    epoch_ns: int = 0
    ticked_ns: int | None = None  # time of the last tick; None: no ticks are expected
    led_until_ns: int = 0  # time of the last tick that this leader has read
    pauses: Sequence[Pause] = ()  # the same as `Hive.pauses`
    stamp_ns: int | None = None  # what the server's clock said when it stored the last message
    ahead_ns: int = 0  # how far `now_ns` is ahead of the server's clock
    event_bytes_max: int = 0
    refusing: str = ""  # why the hive refuses new work, "" while it accepts it
    refusing_groups: str = ""  # why it refuses rollout groups
    released: int = 0  # messages of the stream `ops` before this sequence may be purged
    began_after: int = 0  # the last event before this epoch
    inherited: int = 0  # the newest inbox message before this epoch
    seq: int = 0  # inbox sequence of the message that is being decided
    activity: dict[str, int] = {}  # episode: its last activity, in ns
    unconfirmed: dict[str, Unconfirmed] = {}  # by claim
    queues: dict[str, Queue] = {}  # of waiting claims, by engine
    multi_model: dict[tuple[str, ...], Queue] = {}  # of waiting multi-model claims, by their engines; none is empty
    replica_seen: dict[tuple[str, str], int] = {}  # (engine, replica): its last heartbeat, in ns
    trainers: dict[str, Heard] = {}  # by engine
    session_seen: dict[tuple[str, str], int] = {}  # (engine, session): when its client was heard from, in ns
    unfilled: dict[str, tuple[int, ...]] = {}  # by engine: the state of a queue of rollout groups that made no batch
    environment_seen: dict[tuple[str, int], int] = {}  # (engine, environment): when it was heard from, in ns
    client_seen: dict[str, int] = {}  # client that holds episodes and touches: when it was heard from, in ns
    gateways_ns: int = 0  # when a gateway was heard from last
    gateways_since_ns: int = 0  # since when gateways have been heard from without a pause
    answers: dict[str, Answer] = {}  # by command
    granted: dict[str, None] = {}  # granted claims, even after their episodes have ended; oldest first

    def refusing_of(self, engine: EngineState) -> str:
        """Return why an engine refuses new work, "" while it accepts it (see `Hive.refusing_of`)."""
        return self.refusing_groups if self.refusing_groups and engine.queues_groups else self.refusing

    def idle_deadline_ns(self, episode: Episode) -> int:
        last = max(self.activity.get(episode.id, 0), episode.active_ns, self.epoch_ns)
        return last + ns(episode.discard_timeout_s)

    def silent_clients(self, limit_s: float) -> set[str]:
        """Return the clients that hold episodes and send touches, but were silent for longer than `limit_s`.

        Silence counts only while gateways are heard from, because touches arrive only through them.
        """
        last_ns = self.now_ns - ns(limit_s)
        is_cut_off = self.now_ns - self.gateways_ns > GATEWAY_AWAY_NS
        if is_cut_off or max(self.gateways_since_ns, self.epoch_ns) > last_ns:
            return set()
        return {client for client, seen_ns in self.client_seen.items() if seen_ns <= last_ns}

    def touched(self, clients: Sequence[str]) -> None:
        """Record that a gateway is at work, and that it has heard from these clients."""
        if self.now_ns - self.gateways_ns > GATEWAY_AWAY_NS:
            self.gateways_since_ns = self.now_ns
        self.gateways_ns = self.now_ns
        for client in clients:
            if client in self.client_seen:
                self.client_seen[client] = self.now_ns

    def follow_clients(self, episodes: Iterable[Episode]) -> None:
        """Track only the clients that hold these open episodes and send touches: a touch may name any client."""
        self.client_seen = {each.client: self.client_seen.get(each.client, 0) for each in episodes if each.touches}

    def silent_since(self, at_ns: int) -> int:
        """Return since when a sender that was last heard from at `at_ns` counts as silent: not before this epoch.

        Earlier messages may not have been read, or are not remembered.
        """
        return max(at_ns, self.epoch_ns)

    def is_over(self, since_ns: int, limit_s: float) -> bool:
        """Return whether work that began at `since_ns` has used up its time limit.

        Only time in which there was a leader, up to the last tick, counts.
        """
        return self.led_ns(since_ns) >= ns(limit_s)

    def led_ns(self, since_ns: int) -> int:
        """Return for how long the hive was led between `since_ns` and the last tick."""
        return led_ns(self.pauses, max(since_ns, self.led_until_ns)) - led_ns(self.pauses, since_ns)

    def queue(self, engine: EngineState) -> Queue:
        """Return the engine's queue of waiting claims. It is made from the state, and kept up to date from then on."""
        queue = self.queues.get(engine.name)
        if queue is None:
            queue = self.queues[engine.name] = Queue()
            for episode in engine.open.values():
                queue.opened(share_of(episode), 1)
        return queue

    def opened(self, engine: str, share: Share, episodes: int) -> None:
        """Note that a share has this many more open episodes, or fewer if the number is negative."""
        if engine in self.queues:
            self.queues[engine].opened(share, episodes)
        for engines, queue in self.multi_model.items():
            if engine in engines:
                queue.opened(share, episodes, engine)

    def multi_model_queue(self, engines: Sequence[EngineState]) -> Queue:
        """Return the queue of waiting multi-model claims of these engines, made from the state as `queue` does."""
        names = tuple(engine.name for engine in engines)
        queue = self.multi_model.get(names)
        if queue is None:
            queue = self.multi_model[names] = Queue(names)
            for engine in engines:
                for episode in engine.open.values():
                    queue.opened(share_of(episode), 1, engine.name)
        return queue

    def waits_otherwise(self, claim: str, engines: tuple[str, ...]) -> bool:
        """Return whether this claim id waits for one of these engines as a single claim, or with other engines."""
        single = len(engines) > 1 and any(claim in self.queues[name] for name in engines if name in self.queues)
        others = (
            queue
            for names, queue in self.multi_model.items()
            if names != engines and not set(names).isdisjoint(engines)
        )
        return single or any(claim in queue for queue in others)

    def multi_model_waiting(self, engine: str, share: Share) -> int:
        """Return how many multi-model claims of a share wait for an engine."""
        return sum(queue.waiting_of(share) for engines, queue in self.multi_model.items() if engine in engines)

    def remember(self, command: str, answer: Answer) -> None:
        self.answers[command] = answer
        trim(self.answers, ANSWERS_KEPT)

    def remember_grant(self, claim: str, engine: EngineState) -> None:
        """Remember a grant, which `engine` takes back unless it is confirmed."""
        self.unconfirmed[claim] = Unconfirmed(engine.name, self.seq, self.now_ns + ns(CONFIRM_S))
        self.granted[claim] = None
        trim(self.granted, ANSWERS_KEPT)

    def arrived(self, seq: int, stamp_ns: int) -> None:
        """Record that the server stored the next message, at `stamp_ns` by its clock.

        No activity can be seen during a long time without ticks (R5): after one, or if the clock was set far ahead, all
        silence is counted anew, as in a new epoch. If the clock is set back, the hive's time continues at the clock's
        pace, a tenth slower until the clock has caught up.
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
        """Return whether the last tick is long ago: no bus, no leader, or the clock was set ahead."""
        return self.ticked_ns is not None and self.now_ns - self.ticked_ns > AWAY_NS

    def tick(self, answered: int) -> None:
        """Record a tick, sent when the answers to all messages up to `answered` had been sent.

        The time to confirm a claim starts once its answer has been sent.
        """
        if self.is_away:
            answered = 0
        self.ticked_ns = self.now_ns
        for grant in self.unconfirmed.values():
            if grant.seq > answered:
                grant.until_ns = self.now_ns + ns(CONFIRM_S)

    def forget(self, episode: str) -> None:
        self.activity.pop(episode, None)
