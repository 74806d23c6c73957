"""The answers that the clients of one engine got, all of which must be found on the log."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Ledger:
    """A record of answers, each added once it has arrived and never before."""

    claims: set[str] = field(default_factory=set)  # episodes
    calls: dict[str, list[str]] = field(default_factory=dict)  # episode: call ids, in order
    texts: dict[str, str] = field(default_factory=dict)  # call: the text of the model
    ends: dict[str, float] = field(default_factory=dict)  # episode: reward
    refused: dict[str, list[float]] = field(default_factory=dict)  # episode: rewards that were not taken
    evals: set[str] = field(default_factory=set)  # those of the ended episodes that evaluated
    aborts: set[str] = field(default_factory=set)
    troubles: Counter[str] = field(default_factory=Counter)  # errors that reached an agent through its SDK's retries

    def called(self, episode: str, call: str, text: str) -> None:
        self.calls.setdefault(episode, []).append(call)
        self.texts[call] = text

    @property
    def acknowledged_calls(self) -> int:
        return len(self.texts)

    @property
    def refused_rewards(self) -> int:
        return sum(map(len, self.refused.values()))
