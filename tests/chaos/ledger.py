"""What clients were told: every line of it must be found on the log."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Ledger:
    """A line is written when its answer has arrived, never before."""

    claims: set[str] = field(default_factory=set)  # episodes
    calls: dict[str, list[str]] = field(default_factory=dict)  # episode: call ids, in order
    texts: dict[str, str] = field(default_factory=dict)  # call: what the model said
    ends: dict[str, float] = field(default_factory=dict)  # episode: reward
    evals: set[str] = field(default_factory=set)  # of the ended episodes
    aborts: set[str] = field(default_factory=set)
    troubles: Counter[str] = field(default_factory=Counter)  # errors that reached an agent through its SDK's retries

    def called(self, episode: str, call: str, text: str) -> None:
        self.calls.setdefault(episode, []).append(call)
        self.texts[call] = text

    @property
    def acknowledged_calls(self) -> int:
        return len(self.texts)
