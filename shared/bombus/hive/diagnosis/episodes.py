"""Rules about episodes: how they end, which are lost, and where they come from."""

from collections.abc import Iterable
from math import sqrt

from bombus.hive.diagnosis.findings import WINDOW, FaultKind, RunFinding, Seen, average, metric_of, percent
from bombus.hive.diagnosis.run import StepFigures, totals
from bombus.hive.diagnosis.statistics import CERTAIN, EPISODES_CERTAIN, Spread, change, share_at_least
from bombus.hive.events import AbortReason

FAILED = 0.02  # of a batch's episodes: a healthy environment loses fewer, and loses them without a reward
ABORTED = 0.2  # of episodes
TRUNCATED = 0.15  # of episodes: usual are below 0.1 where answers have enough room
TOOL_FAILURES = 0.15  # more of tool calls than before
DOMINATES = 0.8  # of the groups, by one of several sources
FALLS = 0.5  # the share of its reward that a failing client loses
REASONS: dict[str, str] = {
    AbortReason.INFRA: "infrastructure failures",
    AbortReason.IDLE: "idle for too long",
    AbortReason.SILENT: "their clients fell silent",
    AbortReason.CLIENT: "given up by their clients",
    AbortReason.UNCONFIRMED: "claims that reached nobody",
    AbortReason.CROWDED: "the stream of calls is full",
}
REMEDIES: dict[str, str] = {
    AbortReason.INFRA: "read the reasons with `bombus replay timeline --kind episode.aborted`, and repair the sandbox",
    AbortReason.IDLE: "raise the discard timeout of claims, or look for agents that hang",
    AbortReason.CROWDED: "raise the limit of the stream of calls (--calls-bytes-max)",
}


def failures_rewarded(seen: Seen) -> RunFinding | None:
    """Find episodes that failed and were ended with a reward, which is then learnt as if the model had earned it."""
    failed = sum(row.failed.count for row in seen.recent)
    episodes = sum(row.rewards.count for row in seen.recent)
    before = sum(row.failed.count for row in seen.before) / max(1, sum(row.rewards.count for row in seen.before))
    if share_at_least(failed, episodes) < max(FAILED, 2 * before):
        return None
    reward = sum(row.failed.total for row in seen.recent) / failed
    return seen.found(
        FaultKind.FAILURES_REWARDED,
        f"{percent(failed / episodes)} of the episodes made no call, or their agent failed, and were ended with a "
        f"reward of {reward:.3g} on average",
        "abort such episodes (abort_episode, or raise InfraError) instead of ending them with a reward",
        lambda row: row.failed.count > FAILED * row.rewards.count,
    )


def episodes_aborted(seen: Seen) -> RunFinding | None:
    reasons = totals(seen.recent, "aborted")
    reasons.pop(AbortReason.ENGINE_STOPPED, None)
    reasons.pop(AbortReason.SUPERSEDED, None)
    aborted, ended = reasons.total(), sum(row.ended for row in seen.recent)
    if share_at_least(aborted, aborted + ended) < ABORTED:
        return None
    reason, count = max(reasons.items(), key=lambda item: item[1])
    return seen.found(
        FaultKind.EPISODES_ABORTED,
        f"{percent(aborted / (aborted + ended))} of the episodes were aborted, {count} of {aborted} of them: "
        f"{REASONS.get(reason, reason)}",
        REMEDIES.get(reason, "read the reasons with `bombus replay timeline --kind episode.aborted`"),
        lambda row: sum(row.aborted.values()) > ABORTED * (sum(row.aborted.values()) + row.ended),
    )


def client_fails(seen: Seen) -> RunFinding | None:
    """Find a client whose rewards have fallen while those of the others have not."""
    if not seen.comparable:
        return None
    before, recent = _by_name(row.clients for row in seen.before), _by_name(row.clients for row in seen.recent)
    for client, now in recent.items():
        then = before.get(client, Spread())
        others, others_then = _without(recent, client), _without(before, client)
        if min(now.count, then.count, others.count, others_then.count) < WINDOW:
            continue
        lost = then.mean - now.mean - max(0.0, others_then.mean - others.mean)
        variance = sum(each.variance / each.count for each in (now, then, others, others_then))
        if lost > max(EPISODES_CERTAIN * sqrt(variance), FALLS * abs(then.mean)):
            return seen.found(
                FaultKind.CLIENT_FAILS,
                f"the mean reward of client {client} went from {then.mean:.3g} to {now.mean:.3g}; that of the others "
                f"is {others.mean:.3g}",
                "look at its episodes (`bombus replay episodes --sort reward`), and at the environment on its machine",
            )
    return None


def source_dominates(seen: Seen) -> RunFinding | None:
    """Find a client or a data set that gives nearly all episodes, although others gave many before."""
    if not seen.comparable:
        return None
    for what, of in (("client", lambda row: row.clients), ("data set", lambda row: row.data_sets)):
        before, recent = _by_name(map(of, seen.before)), _by_name(map(of, seen.recent))
        every, every_before = sum(each.count for each in recent.values()), sum(each.count for each in before.values())
        if not recent or len(before) < 2:
            continue
        name = max(recent, key=lambda each: recent[each].count)
        share, then = recent[name].count / max(1, every), before.get(name, Spread()).count / max(1, every_before)
        if share_at_least(recent[name].count, every) > DOMINATES and then < 0.75 * DOMINATES:
            return seen.found(
                FaultKind.SOURCE_DOMINATES,
                f"{percent(share)} of the groups are from the {what} {name or '(unnamed)'}, {percent(then)} before",
                f"find out why the other {what}s give so few; a limit for each key or data set keeps the mixture",
            )
    return None


def tools_fail(seen: Seen) -> RunFinding | None:
    def share(row: StepFigures) -> float | None:
        calls, failures = row.metrics.get("tool_calls"), row.metrics.get("tool_failures")
        return failures.total / calls.total if calls is not None and failures is not None and calls.total else None

    before, recent = seen.means(share)
    if not seen.comparable or not before or not recent:
        return None
    then, now = average(seen.before, share), average(seen.recent, share)
    if now - then < TOOL_FAILURES or change(before, recent) < CERTAIN:
        return None
    return seen.found(
        FaultKind.TOOLS_FAIL,
        f"{percent(now)} of the tool calls fail, {percent(then)} before",
        "read an episode (`bombus replay episode ID`): the tool may be down, or the model calls it in another form",
        lambda row: (share(row) or 0.0) - then > TOOL_FAILURES / 2,
    )


def truncated(seen: Seen) -> RunFinding | None:
    if not seen.metric("episodes_cut")[1]:
        return _reported_truncation(seen)
    cut = sum(row.trainer.get("episodes_cut", 0.0) for row in seen.recent)
    episodes = sum(row.trainer.get("episodes", 0.0) for row in seen.recent)
    if share_at_least(cut, episodes) < TRUNCATED:
        return _reported_truncation(seen)
    return seen.found(
        FaultKind.TRUNCATED,
        f"{percent(cut / episodes)} of the episodes have an answer that was cut at a limit of the job or the model",
        f"set rollout.max_response_length to {2 * seen.settings.max_response_length}, or trainer.overlong to mask",
        lambda row: row.trainer.get("episodes_cut", 0.0) > TRUNCATED * row.trainer.get("episodes", 0.0),
    )


def _reported_truncation(seen: Seen) -> RunFinding | None:
    """Find episodes that say themselves that they ran out of turns or time, more of them than before."""
    share = metric_of("truncated")
    before, recent = seen.means(share)
    if not seen.comparable or not before or not recent:
        return None
    then, now = average(seen.before, share), average(seen.recent, share)
    if now - then < TRUNCATED or change(before, recent) < CERTAIN:
        return None
    return seen.found(
        FaultKind.TRUNCATED,
        f"{percent(now)} of the episodes report that they were truncated, {percent(then)} before",
        "raise the budget of turns, tokens or time of the environment, or the limit of the reward's program",
    )


def _by_name(steps: Iterable[dict[str, Spread]]) -> dict[str, Spread]:
    found: dict[str, Spread] = {}
    for spreads in steps:
        for name, spread in spreads.items():
            found.setdefault(name, Spread()).include(spread)
    return found


def _without(spreads: dict[str, Spread], name: str) -> Spread:
    found = Spread()
    for other, spread in spreads.items():
        if other != name:
            found.include(spread)
    return found
