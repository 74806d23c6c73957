"""How multi-model episodes end: one report ends all of their episodes, or all are aborted."""

from collections.abc import Iterator, Mapping

import msgspec

from bombus.errors import Code, Refused
from bombus.hive import events as ev
from bombus.hive.bounded import portions
from bombus.hive.events import AbortReason, Event, Outcome
from bombus.hive.inbox import Done, EpisodeResult, MultiModelEnd
from bombus.hive.state import Episode, Hive
from bombus_coordinator.rules.decision import NAMES_PER_EVENT, CommandReply, Decision, Decisions
from bombus_coordinator.rules.episodes import (
    EPISODES_PER_COMMAND_MAX,
    ended,
    is_repeat,
    outcome_digest,
    outcome_of,
    why_incomplete,
)
from bombus_coordinator.rules.live import Live


def completed(hive: Hive, decision: Decision) -> Decision:
    """Return a decision, extended so that it also aborts the partners of every episode that it aborts."""
    aborting = [event for event in decision.events if isinstance(event, ev.EpisodeAborted)]
    if not aborting:
        return decision
    events: list[Event] = []
    gone = {name for event in aborting for name in event.episodes}
    for event in decision.events:
        events.append(event)
        if isinstance(event, ev.EpisodeAborted):
            events += _partners_aborted(hive, event, gone)
    return msgspec.structs.replace(decision, events=tuple(events))


def _partners_aborted(hive: Hive, event: ev.EpisodeAborted, gone: set[str]) -> Iterator[ev.EpisodeAborted]:
    """Yield the events that abort partners not yet in `gone`, and add the partners to `gone`."""
    partners: dict[str, list[str]] = {}
    of_engine = hive.engine(event.engine).open
    for episode in (of_engine[name] for name in event.episodes if name in of_engine):
        for engine, name in episode.partners.items():
            if name not in gone and name in hive.engine(engine).open:
                partners.setdefault(engine, []).append(name)
                gone.add(name)
    for engine, names in partners.items():
        for some in portions(names, NAMES_PER_EVENT):
            yield ev.EpisodeAborted(
                at_ns=event.at_ns,
                engine=engine,
                run=hive.engine(engine).run,
                episodes=some,
                reason=AbortReason.MULTI_MODEL,
                detail=f"the partner on engine {event.engine} was aborted: {event.reason}",
                failure=event.failed_by,
            )


def end(hive: Hive, live: Live, message: MultiModelEnd) -> Decisions:
    """End multi-model episodes, either all or none of them. Skip those that this same report has already ended."""
    listed = [result.episode for results in message.results for result in results.values()]
    if not 1 <= len(listed) <= EPISODES_PER_COMMAND_MAX:
        raise Refused(
            Code.MALFORMED,
            f"One report can end multi-model episodes with 1 to {EPISODES_PER_COMMAND_MAX} episodes in total, not "
            f"{len(listed)}.",
        )
    if len(set(listed)) != len(listed):
        raise Refused(Code.MALFORMED, "The same episode is listed twice.")
    outcomes: dict[str, list[tuple[Episode, Outcome]]] = {}
    for results in message.results:
        for engine, episode, outcome in _outcomes(hive, message.client, results):
            outcomes.setdefault(engine, []).append((episode, outcome))
    yield Decision(
        events=tuple(
            event
            for engine, those in outcomes.items()
            for event in ended(hive.engine(engine), live, message.client, those)
        ),
        replies=(CommandReply(message.id, Done()),),
    )


def _outcomes(hive: Hive, client: str, results: Mapping[str, EpisodeResult]) -> list[tuple[str, Episode, Outcome]]:
    """Return the engine, episode and outcome for each part of a multi-model episode, or an empty list for a repeated
    report.

    An engine that was restarted has forgotten its part, but the other engines still know the report. Raises `Refused`
    if the report cannot end the episodes.
    """
    report = outcome_digest(results)
    by_cause = sorted(results.items(), key=lambda item: _is_consequence(hive, *item))
    if any(is_repeat(hive.engine(name), client, result.episode, report) for name, result in by_cause):
        return []
    found: list[tuple[str, Episode, Outcome]] = []
    for name, result in results.items():
        engine = hive.engine(name)
        partners = {other: each.episode for other, each in results.items() if other != name}
        outcome = outcome_of(engine, client, result, report, partners)
        episode = engine.open[result.episode]
        if not episode.partners:
            raise Refused(Code.MALFORMED, why_incomplete(episode))
        found.append((name, episode, outcome))
    return found


def _is_consequence(hive: Hive, engine: str, result: EpisodeResult) -> bool:
    """Return whether an episode was aborted only because one of its partners was. The partner's abort gives the
    reason."""
    closed = hive.engine(engine).closed.get(result.episode)
    return closed is not None and closed.aborted == AbortReason.MULTI_MODEL
