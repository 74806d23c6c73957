"""What an audit keeps of an engine: what is outstanding, and how many tokens each client's episodes have sampled."""

from collections import Counter
from typing import NamedTuple

from bombus.hive.events import EpisodeType, NotedCall, Outcome
from bombus.replay.audit.operations import Operations


class Account:
    """How many tokens the episodes of a client have sampled in a run, and what became of them."""

    __slots__ = ("client", "engine", "fates", "run", "sampled")

    def __init__(self, engine: str, run: int, client: str) -> None:
        self.engine = engine
        self.run = run
        self.client = client
        self.sampled = 0
        self.fates: Counter[str] = Counter()


class AuditedEpisode:
    """An episode that is open, in the pool, in a rollout group or in a batch. `known` says that its claim is on this
    log.

    `version` is the policy version at its claim, and `oldest` the oldest one among the tokens that may be trained on.
    `task` and `reward` are those of its last end.
    """

    __slots__ = ("account", "auxiliary", "calls", "kind", "known", "oldest", "reward", "task", "tokens", "version")

    def __init__(
        self, account: Account, known: bool = True, kind: EpisodeType = EpisodeType.TRAIN, version: int = 0
    ) -> None:
        self.account = account
        self.known = known
        self.kind = kind
        self.version = version
        self.oldest: int | None = None
        self.task = ""
        self.reward = 0.0
        self.calls: set[str] = set()
        self.tokens = 0  # tokens of complete calls that may be trained on
        self.auxiliary = 0  # tokens of complete calls that the job masks

    def add(self, call: NotedCall) -> None:
        """Add a complete call."""
        self.calls.add(call.ref.id)
        if call.masked:
            self.auxiliary += call.completion_tokens
        else:
            self.tokens += call.completion_tokens
            self.oldest = call.oldest if self.oldest is None else min(self.oldest, call.oldest)

    def settle(self, fate: str) -> None:
        """Count all tokens of the episode as those of a fate."""
        self.account.fates[fate] += self.tokens + self.auxiliary

    def end(self, outcome: Outcome) -> None:
        self.task, self.reward = outcome.task, outcome.reward


class AuditedGroup(NamedTuple):
    tokens: int
    episodes: tuple[AuditedEpisode, ...]


class AuditedStep(NamedTuple):
    number: int
    episodes: dict[str, AuditedEpisode]
    groups: dict[int, AuditedGroup]

    def all_episodes(self) -> list[AuditedEpisode]:
        return [*self.episodes.values(), *(each for group in self.groups.values() for each in group.episodes)]


class Books:
    """What is outstanding for one engine."""

    def __init__(self, operations: Operations) -> None:
        self.operations = operations
        self.open: dict[str, AuditedEpisode] = {}
        self.pool: dict[str, AuditedEpisode] = {}
        self.batch: AuditedStep | None = None
        self.queue: dict[int, AuditedGroup] = {}
        self.handed: dict[int, dict[int, AuditedGroup]] = {}
        self.arrived = 0
        self.published: dict[int, str] = {}  # hash of each version's weights
        self.earlier = 0  # versions below this one were published before the log was compacted
        self.counted = 0  # tokens that the run's calls have sampled
        self.calls: dict[str, str | None] = {}  # the episode of each of the newest calls, by id (None: unknown)
        self.versions: Counter[tuple[int, int, int, str]] = (
            Counter()
        )  # tokens by run, oldest and newest version, weights
        self.adapters: set[str] = set()  # the hashes of the adapters that training clients have saved

    def handed_groups(self) -> list[AuditedGroup]:
        return [group for batch in self.handed.values() for group in batch.values()]

    def take_groups(self) -> list[AuditedGroup]:
        """Remove all rollout groups that are queued or handed out, and return them."""
        groups = [*self.queue.values(), *self.handed_groups()]
        self.queue, self.handed = {}, {}
        return groups
