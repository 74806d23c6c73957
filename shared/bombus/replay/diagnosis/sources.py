"""Faults in the sources of episodes: clients and data sets."""

from collections.abc import Callable, Sequence
from functools import partial
from math import sqrt

from bombus.replay.diagnosis.findings import WINDOW, FaultKind, RunFinding, Seen
from bombus.replay.diagnosis.statistics import EPISODES_CERTAIN, Spread, share_at_least, total
from bombus.replay.diagnosis.steps import StepFigures

DOMINATES = 0.8  # fraction of the groups above which their source dominates
DOMINATED = 0.6  # upper limit of the same source's fraction in earlier steps
STUCK = 20  # groups of a client that has a constant reward: fewer may be of tasks that are too hard
FALLS = 0.5  # fraction of its reward that a failing client loses


def client_fails(seen: Seen) -> RunFinding | None:
    """Find a client whose rewards have fallen while the other clients' rewards have not."""
    for split in seen.splits:
        before, recent = (_by_name(rows, lambda row: row.clients) for rows in split)
        for client, now in recent.items():
            then = before.get(client, Spread())
            others, others_then = (
                total([spread for name, spread in each.items() if name != client], Spread) for each in (recent, before)
            )
            if min(now.count, then.count, others.count, others_then.count) < WINDOW:
                continue
            lost = then.mean - now.mean - max(0.0, others_then.mean - others.mean)
            variance = sum(each.variance / each.count for each in (now, then, others, others_then))
            if lost > max(EPISODES_CERTAIN * sqrt(variance), FALLS * abs(then.mean)):
                return seen.found(
                    FaultKind.CLIENT_FAILS,
                    f"the mean reward of client {client} went from {then.mean:.3g} to {now.mean:.3g}; for the others "
                    f"it is {others.mean:.3g}",
                    "look at its episodes (`bombus replay episodes --sort reward`), and at the environment on its "
                    "machine",
                )
    return None


def client_is_stuck(seen: Seen) -> RunFinding | None:
    """Find a client that reports the same low reward for every episode, perhaps since the first step."""
    recent = _by_name(seen.recent, lambda row: row.clients)
    for client, now in recent.items():
        others = total([spread for name, spread in recent.items() if name != client], Spread)
        if min(now.count, others.count) < STUCK or not _is_constant(now):
            continue
        error = sqrt(others.variance * (1 / others.count + 1 / now.count))  # as if the client's varied as theirs do
        if others.mean - now.mean > EPISODES_CERTAIN * error:
            return seen.found(
                FaultKind.CLIENT_FAILS,
                f"client {client} reports the reward {now.mean:.3g} for all episodes in {now.count} groups; for the "
                f"others the mean is {others.mean:.3g}",
                "look at its episodes (`bombus replay episodes --sort reward`), and at the environment on its machine",
                partial(_is_stuck, client),
            )
    return None


def _is_stuck(client: str, row: StepFigures) -> bool | None:
    return _is_constant(row.clients[client]) if client in row.clients else None


def _is_constant(rewards: Spread) -> bool:
    return rewards.variance <= 1e-12 * rewards.mean * rewards.mean


def client_dominates(seen: Seen) -> RunFinding | None:
    return _dominates(seen, "client", lambda row: row.clients)


def data_set_dominates(seen: Seen) -> RunFinding | None:
    return _dominates(seen, "data set", lambda row: row.data_sets)


def _dominates(seen: Seen, what: str, of: Callable[[StepFigures], dict[str, Spread]]) -> RunFinding | None:
    """Find a source that supplies nearly all groups, although other sources used to supply many."""
    before, recent = _by_name(seen.before, of), _by_name(seen.recent, of)
    if not seen.comparable or not recent or len(before) < 2:
        return None
    name = max(recent, key=lambda each: recent[each].count)
    count, every = recent[name].count, sum(each.count for each in recent.values())
    then = before.get(name, Spread()).count / max(1, sum(each.count for each in before.values()))
    if share_at_least(count, every) <= DOMINATES or then >= DOMINATED:
        return None
    return seen.found(
        FaultKind.SOURCE_DOMINATES,
        f"{count / every:.0%} of the groups are from the {what} {name or '(unnamed)'}, {then:.0%} before",
        f"find out why the other {what}s give so few; a limit for each key or data set keeps the mixture",
    )


def _by_name(rows: Sequence[StepFigures], of: Callable[[StepFigures], dict[str, Spread]]) -> dict[str, Spread]:
    names = {name for row in rows for name in of(row)}
    return {name: total([of(row)[name] for row in rows if name in of(row)], Spread) for name in sorted(names)}


RULES = (client_fails, client_is_stuck, client_dominates, data_set_dominates)
