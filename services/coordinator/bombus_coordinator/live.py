"""What the coordinator knows beside the fold: signs of life, claims that wait, answers lately given.

None of it is on the log and all of it may be lost: after a crash deadlines start again at `epoch.opened` (R5), and
whoever waits for a claim asks again (R13).
"""

import msgspec

from bombus.errors import Code, Refused
from bombus.hive.inbox import Answer, Claim
from bombus.hive.state import EngineState, Episode, trim

ANSWERS_KEPT = 10_000
WAITING_MAX = 10_000
CONFIRM_S = 5.0  # a granted claim whose answer reached nobody goes back after this long
REPLICA_LAPSE_S = 10.0
AWAY_S = 5.0  # between two ticks of the leader: then nobody could reach the bus, or nobody led


def ns(seconds: float) -> int:
    return int(seconds * 1e9)


class Waiting(msgspec.Struct, kw_only=True):
    """A claim that waits for room. `commands` are the message ids to answer: one, unless it was asked again."""

    claim: Claim
    commands: list[str]
    first_asked_ns: int
    until_ns: int


class Unconfirmed(msgspec.Struct):
    """A grant of the inbox message at `seq`, which goes back at `until_ns`."""

    engine: str
    seq: int
    until_ns: int


class Live(msgspec.Struct, kw_only=True):
    now_ns: int = 0
    epoch_ns: int = 0
    beat_ns: int = 0  # when the leader's clock struck last
    refusing: str = ""  # the hive's: why no new work is taken
    seq: int = 0  # in the inbox, of the message that is being decided
    activity: dict[str, int] = {}  # episode: last sign of life
    unconfirmed: dict[str, Unconfirmed] = {}  # by claim
    waiting: dict[str, dict[str, Waiting]] = {}  # engine: claim: what waits
    replica_seen: dict[tuple[str, str], int] = {}  # (engine, replica)
    answers: dict[str, Answer] = {}  # command: its answer
    granted: dict[str, None] = {}  # claims that were granted, also after their episodes are over; oldest first

    def idle_deadline_ns(self, episode: Episode) -> int:
        last = max(self.activity.get(episode.id, 0), episode.claimed_ns, episode.last_call_ns, self.epoch_ns)
        return last + ns(episode.discard_timeout_s)

    def since(self, at_ns: int) -> int:
        """When a deadline that was set at `at_ns` began to run: not before this epoch."""
        return max(at_ns, self.epoch_ns)

    def queue(self, engine: EngineState) -> dict[str, Waiting]:
        return self.waiting.setdefault(engine.name, {})

    def enqueue(self, engine: EngineState, claim: Claim) -> None:
        queue = self.queue(engine)
        until_ns = self.now_ns + ns(claim.wait_s)
        before = queue.get(claim.claim)
        if before is not None:
            before.commands.append(claim.id)
            before.until_ns = max(before.until_ns, until_ns)
            return
        if len(queue) >= WAITING_MAX:
            raise Refused(Code.OVERLOADED, f"{WAITING_MAX} claims are waiting already; try again later.")
        first_asked_ns = min(claim.first_asked_ns or self.now_ns, self.now_ns)
        queue[claim.claim] = Waiting(claim=claim, commands=[claim.id], first_asked_ns=first_asked_ns, until_ns=until_ns)

    def remember(self, command: str, answer: Answer) -> None:
        self.answers[command] = answer
        trim(self.answers, ANSWERS_KEPT)

    def remember_grant(self, claim: str) -> None:
        self.granted[claim] = None
        trim(self.granted, ANSWERS_KEPT)

    def beat(self, answered: int) -> None:
        """The leader's clock has struck, when the answers to all messages up to `answered` had left.

        Time in which nobody can show life ends nothing (R5): a claim has its time to be confirmed once its answer has
        left, and after a long silence all deadlines begin again, as in a new epoch.
        """
        if self.now_ns - self.beat_ns > ns(AWAY_S):
            self.epoch_ns = self.now_ns
            self.replica_seen.clear()
            answered = 0
        self.beat_ns = self.now_ns
        for grant in self.unconfirmed.values():
            if grant.seq > answered:
                grant.until_ns = self.now_ns + ns(CONFIRM_S)

    def forget(self, episode: str) -> None:
        self.activity.pop(episode, None)
