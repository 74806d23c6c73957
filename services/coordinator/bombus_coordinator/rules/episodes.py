"""End and abort episodes, and look after the calls that belong to them."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from bombus.errors import Code, Refused
from bombus.hive import events as ev
from bombus.hive.bounded import portions
from bombus.hive.episodes import METADATA_BYTES_MAX, REWARD_MAX
from bombus.hive.events import AbortReason, EpisodeType, NotedCall, Outcome
from bombus.hive.failures import FailureKind
from bombus.hive.inbox import Abort, CallRecorded, Done, End, EpisodeResult, Found, Lookup, Take
from bombus.hive.records import digest
from bombus.hive.state import EngineState, Episode, Hive
from bombus_coordinator.rules.decision import NAMES_PER_EVENT, CommandReply, Decision, Decisions
from bombus_coordinator.rules.live import NEVER_NS, Live

EPISODES_PER_COMMAND_MAX = 1024
OUTCOMES_BYTES = 256 << 10  # approximate size of the outcomes in one event; the rest go into further events

_deterministic = msgspec.msgpack.Encoder(order="deterministic")


def outcome_digest(result: EpisodeResult | Mapping[str, EpisodeResult]) -> bytes:
    """Return a digest of the report that ends an episode or a multi-model episode. Equal reports have equal digests."""
    return digest(_deterministic.encode(result))


def _why_aborted(engine: EngineState, reason: AbortReason) -> str:
    """Return why an aborted episode cannot be ended. Swarm clients ignore a reason that names WEIGHT_SYNCING."""
    match reason:
        case AbortReason.CLIENT | AbortReason.INFRA:
            return "its client has aborted it. Claim another one."
        case AbortReason.IDLE:
            return "it was idle for too long. Claim with a longer discard_episode_timeout, or send a heartbeat."
        case AbortReason.SILENT:
            return (
                f"nothing was heard from its client for {engine.collection.client_silence_s:g} s "
                "(collection.client_silence_s), so its process may be dead. Claim another one."
            )
        case AbortReason.SUPERSEDED:
            return f"its batch was closed while it was running. Current status: [{engine.phase}]. Claim another one."
        case AbortReason.MULTI_MODEL:
            return "another episode of its multi-model episode was aborted. Claim another one."
        case AbortReason.CROWDED:
            return (
                "the stream of calls was full, and its key pinned more than its share. Claim another one, end episodes "
                "sooner, or raise the limit with --calls-bytes-max."
            )
    return f"it was taken away ({reason}). Claim another one."


def _check_reward(episode: Episode, result: EpisodeResult, call_rewards: tuple[float, ...] | None) -> float:
    """Return the episode's reward, or the mean of its calls' rewards if the calls have rewards of their own. Auxiliary
    calls are not trained on and have no reward.

    Raises `Refused` if there is no reward, if a reward is not finite or is too large, if the number of rewards differs
    from the number of calls, or if the episode failed in a way that allows no reward.
    """
    if result.failure is not None and not result.failure.is_trained:
        raise Refused(
            Code.BAD_REWARD,
            f"Episode {result.episode} has failed ({result.failure}), so it cannot end with a reward: abort it.",
        )
    if call_rewards is None:
        if result.reward is None:
            raise Refused(Code.BAD_REWARD, f"Episode {result.episode} has no reward: report one, or abort it.")
        rewards: tuple[float, ...] = (result.reward,)
    else:
        rewards = call_rewards
        calls = len(episode.trainable_calls())
        if len(rewards) != calls:
            raise Refused(
                Code.BAD_REWARD,
                f"Episode {result.episode} has {len(rewards)} rewards for {calls} completed calls{_aside(episode)}: "
                "give one for each call, in order, or a single number.",
            )
        if not rewards:
            raise Refused(Code.BAD_REWARD, f"Episode {result.episode} has an empty list of rewards.")
    if not all(abs(reward) <= REWARD_MAX for reward in rewards):  # NaN fails this too
        raise Refused(
            Code.BAD_REWARD,
            f"Episode {result.episode} has a reward that is not finite or exceeds {REWARD_MAX:.0e}, which would "
            "give gradients that are not finite. Send a smaller number.",
        )
    return sum(rewards) / len(rewards)


def _call_rewards(episode: Episode, result: EpisodeResult) -> tuple[float, ...] | None:
    """Return the rewards of the calls in order, or None if the episode has a single reward.

    Only the log knows the order of concurrent calls, so a client may give rewards by call id instead. Raises `Refused`
    unless the ids are exactly those of the completed calls.
    """
    given = result.rewards_by_call
    if given is None:
        return result.call_rewards
    ids = [call.ref.id for call in episode.trainable_calls()]
    if set(ids) != set(given):
        lacking, foreign = len(set(ids) - set(given)), len(set(given) - set(ids))
        raise Refused(
            Code.BAD_REWARD,
            f"Episode {result.episode} has {len(given)} rewards by call for {len(ids)} completed calls"
            f"{_aside(episode)}: {lacking} calls have none, and {foreign} ids belong to none of its calls. Give one "
            "reward for the id of each answer.",
        )
    return tuple(given[call] for call in ids)


def _aside(episode: Episode) -> str:
    """Return the part of an error message that mentions auxiliary calls, which are not counted."""
    masked = sum(call.masked for call in episode.complete_calls())
    return f" (auxiliary calls of its harness, {masked} here, have none)" if masked else ""


def is_repeat(engine: EngineState, client: str, episode: str, report: bytes) -> bool:
    """Return whether this same report has already ended the episode. Raises `Refused` if the episode ended in another
    way."""
    closed = engine.closed.get(episode)
    if closed is None:
        return False
    if closed.client and closed.client != client:
        raise Refused(Code.NOT_YOUR_EPISODE, f"Episode {episode} was claimed by a different client.")
    if closed.aborted is not None:
        why = _why_aborted(engine, closed.aborted)
        raise Refused(Code.UNKNOWN_EPISODE, f"Episode {episode} is not in claimed status: {why}")
    if closed.outcome != report:
        raise Refused(Code.OTHER_OUTCOME, f"Episode {episode} has already ended with another outcome, which is final.")
    return True


def outcome_of(
    engine: EngineState, client: str, result: EpisodeResult, report: bytes, partners: Mapping[str, str]
) -> Outcome:
    """Return the outcome that a report gives an open episode. `partners` are the partner episodes named in the report.

    Raises `Refused` if the episode cannot end in this way.
    """
    if not engine.rolling:
        raise Refused(
            Code.WRONG_PHASE,
            f"Engine is not in rolling state. Current status: [{engine.phase}]. Cannot end episode.",
        )
    episode = engine.open.get(result.episode)
    if episode is None:
        raise Refused(Code.UNKNOWN_EPISODE, f"Episode {result.episode} not found: claim one first.")
    if episode.client != client:
        raise Refused(Code.NOT_YOUR_EPISODE, f"Episode {result.episode} is claimed by a different client.")
    if episode.partners != partners:
        raise Refused(Code.MALFORMED, why_incomplete(episode))
    if not result.task and episode.type == EpisodeType.TRAIN:
        raise Refused(Code.MALFORMED, f"Episode {result.episode} needs a task_id, which identifies its group.")
    if len(_deterministic.encode((result.metadata, result.log_metrics))) > METADATA_BYTES_MAX:
        raise Refused(Code.TOO_LARGE, f"The metadata of episode {result.episode} exceeds {METADATA_BYTES_MAX} bytes.")
    call_rewards = _call_rewards(episode, result)
    reward = _check_reward(episode, result, call_rewards)
    return Outcome(
        episode=result.episode,
        task=result.task,
        reward=reward,
        digest=report,
        call_rewards=call_rewards,
        is_success=result.is_success,
        metadata=result.metadata,
        log_metrics=result.log_metrics,
        completion_tokens=sum(call.completion_tokens for call in episode.complete_calls()),
        oldest=min((call.oldest for call in episode.trainable_calls()), default=episode.version),
        data_set=result.data_set,
        failure=result.failure,
    )


def why_incomplete(episode: Episode) -> str:
    """Return why a report cannot end an episode: the report either omits the episode's partners or names the wrong
    ones."""
    if not episode.partners:
        return f"Episode {episode.id} is not part of a multi-model episode: end it on its own."
    others = " and ".join(episode.partners.values())
    return (
        f"Episode {episode.id} is part of a multi-model episode, with {others}: report all of them at once, with "
        "end_multi_model_episode of the SDK or POST /end_multi_model_episodes."
    )


def _fitting(outcomes: Sequence[Outcome]) -> Iterator[tuple[Outcome, ...]]:
    """Split outcomes into portions that each fit into a message."""
    portion: list[Outcome] = []
    size = 0
    for outcome in outcomes:
        more = len(_deterministic.encode(outcome)) if len(outcomes) > 1 else 0
        if portion and size + more > OUTCOMES_BYTES:
            yield tuple(portion)
            portion, size = [], 0
        portion.append(outcome)
        size += more
    yield tuple(portion)


def end(engine: EngineState, live: Live, message: End) -> Decisions:
    """End episodes, either all or none of them. Skip episodes that this same report has already ended."""
    if not 1 <= len(message.results) <= EPISODES_PER_COMMAND_MAX:
        raise Refused(Code.MALFORMED, f"One request can end 1 to {EPISODES_PER_COMMAND_MAX} episodes.")
    if len({result.episode for result in message.results}) != len(message.results):
        raise Refused(Code.MALFORMED, "The same episode is listed twice.")
    outcomes: list[tuple[Episode, Outcome]] = []
    for result in message.results:
        report = outcome_digest(result)
        if not is_repeat(engine, message.client, result.episode, report):
            outcome = outcome_of(engine, message.client, result, report, partners={})
            outcomes.append((engine.open[result.episode], outcome))
    events = ended(engine, live, message.client, outcomes)
    yield Decision(events=events, replies=(CommandReply(message.id, Done(run=engine.run)),))


def ended(
    engine: EngineState, live: Live, client: str, outcomes: Sequence[tuple[Episode, Outcome]]
) -> tuple[ev.EpisodeEnded, ...]:
    """Return the events that end episodes: one for each type and version, or several where a single one would be too
    large."""
    alike: dict[tuple[EpisodeType, int], list[Outcome]] = {}
    for episode, outcome in outcomes:
        alike.setdefault((episode.type, episode.version), []).append(outcome)
    return tuple(
        ev.EpisodeEnded(
            at_ns=live.now_ns,
            engine=engine.name,
            run=engine.run,
            client=client,
            type=kind,
            version=version,
            outcomes=some,
        )
        for (kind, version), those in alike.items()
        for some in _fitting(those)
    )


def aborted(  # noqa: PLR0913 - the parts of an event
    engine: EngineState,
    live: Live,
    episodes: Sequence[str],
    reason: AbortReason,
    detail: str = "",
    failure: FailureKind | None = None,
    by: str = "",
) -> tuple[ev.EpisodeAborted, ...]:
    """Return the events that abort episodes. A very large number of episodes is split into several events, so that each
    event fits into a message."""
    return tuple(
        ev.EpisodeAborted(**live.at(engine), episodes=some, reason=reason, detail=detail, failure=failure, by=by)
        for some in portions(episodes, NAMES_PER_EVENT)
    )


def abort(engine: EngineState, live: Live, message: Abort) -> Decisions:
    """Abort episodes. Skip episodes that have already ended."""
    if len(message.episodes) > EPISODES_PER_COMMAND_MAX:
        raise Refused(Code.MALFORMED, f"One request can abort at most {EPISODES_PER_COMMAND_MAX} episodes.")
    still_open = [engine.open[episode] for episode in dict.fromkeys(message.episodes) if episode in engine.open]
    if any(episode.client != message.client for episode in still_open):
        raise Refused(Code.NOT_YOUR_EPISODE, "An episode can be aborted only by the client that claimed it.")
    failure = message.failure
    reason = AbortReason.INFRA if (failure.is_infra if failure else message.infra) else AbortReason.CLIENT
    ids = tuple(episode.id for episode in still_open)
    events = aborted(engine, live, ids, reason, message.detail[:1000], failure, message.by) if ids else ()
    yield Decision(events=events, replies=(CommandReply(message.id, Done(run=engine.run)),))


def take(engine: EngineState, live: Live, message: Take) -> Decisions:
    """Remove an operations run's ended episodes from the pool. Skip episodes that are no longer in the pool.

    This is also possible after the run has ended. Raises `Refused` if an episode belongs to another client, or if the
    run itself trains on its episodes.
    """
    if len(message.episodes) > EPISODES_PER_COMMAND_MAX:
        raise Refused(Code.MALFORMED, f"One request can take at most {EPISODES_PER_COMMAND_MAX} episodes.")
    if not engine.clients_take_episodes:
        raise Refused(Code.UNSUPPORTED, f"Engine {engine.name} itself trains on the episodes of run {engine.run}.")
    ended = [engine.pool[episode] for episode in dict.fromkeys(message.episodes) if episode in engine.pool]
    if any(each.client != message.client for each in ended):
        raise Refused(Code.NOT_YOUR_EPISODE, "An episode can be taken only by the client that claimed it.")
    reply = (CommandReply(message.id, Done(run=engine.run)),)
    ids = tuple(each.episode for each in ended)
    taken = ev.EpisodesTaken(**live.at(engine), client=message.client, episodes=ids)
    yield Decision(events=(taken,) if ids else (), replies=reply)


def lookup(engine: EngineState, live: Live, message: Lookup) -> Decisions:
    """Answer with the calls of an open episode, in the order of the log (R10)."""
    episode = engine.open.get(message.episode)
    if episode is None:
        code = Code.EPISODE_OVER if engine.is_over(message.episode) else Code.UNKNOWN_EPISODE
        raise Refused(code, f"Episode {message.episode} is not open: claim another.")
    found = Found(run=engine.run, open=True, calls=tuple(episode.calls))
    yield Decision(replies=(CommandReply(message.id, found),))


def note(engine: EngineState, live: Live, message: CallRecorded) -> NotedCall | None:
    """Return the call as the log will note it, or None if it is from another run or has already been noted."""
    call = message.call
    if message.run != engine.run or call.ref.id in engine.noted:
        return None
    episode = engine.open.get(call.episode)
    if not call.episode:
        return call
    if episode is None:
        return msgspec.structs.replace(call, late=True)
    known = live.calls_of(episode)
    if call.ref.id in known:
        return None
    known.add(call.ref.id)
    return call


def _idle_deadline_ns(hive: Hive, live: Live, episode: Episode) -> int:
    """Return when an episode's idle time will be used up. Activity in one episode of a multi-model episode counts for
    all of them."""
    deadlines = (live.idle_deadline_ns(partner) for partner in hive.partners(episode))
    return max(live.idle_deadline_ns(episode), *deadlines) if episode.partners else live.idle_deadline_ns(episode)


def _expire_silent(engine: EngineState, live: Live) -> Decisions:
    limit_s = engine.collection.client_silence_s
    silent = live.silent_clients(limit_s)
    held: dict[str, list[str]] = {}
    for episode in engine.open.values() if silent else ():
        if episode.touches and episode.client in silent:
            held.setdefault(episode.client, []).append(episode.id)
    for client, episodes in held.items():
        detail = f"nothing was heard from client {client} for {limit_s:g} s"
        yield Decision(events=aborted(engine, live, episodes, AbortReason.SILENT, detail))


def expire(hive: Hive, engine: EngineState, live: Live) -> Decisions:
    """Abort three kinds of episodes: those idle for too long, those of silent clients, and those whose client never
    confirmed that it had received the answer to its claim."""
    now = live.now_ns
    yield from _expire_silent(engine, live)
    if live.idle_from_ns.get(engine.name, 0) <= now:
        # Activity only postpones deadlines, so none of those that are left has passed before the first of them.
        live.idle_from_ns[engine.name] = min(map(live.idle_deadline_ns, engine.open.values()), default=NEVER_NS)
        idle = tuple(e.id for e in engine.open.values() if _idle_deadline_ns(hive, live, e) <= now)
        if idle:
            yield Decision(events=aborted(engine, live, idle, AbortReason.IDLE))
    for claim, grant in list(live.unconfirmed.items()):
        if grant.engine != engine.name or grant.until_ns > now:
            continue
        del live.unconfirmed[claim]
        lost = [engine.open[e] for e in engine.claims.get(claim, ()) if e in engine.open]
        claimed = [*lost, *(partner for episode in lost for partner in hive.partners(episode))]
        if lost and not any(e.calls or e.id in live.activity for e in claimed):
            yield Decision(events=aborted(engine, live, [e.id for e in lost], AbortReason.UNCONFIRMED))
