"""End and abort episodes, and look after the calls that belong to them."""

from collections.abc import Iterator, Sequence

import msgspec

from bombus.errors import Code, Refused
from bombus.hive import events as ev
from bombus.hive.bounded import portions
from bombus.hive.episodes import REWARD_MAX
from bombus.hive.events import AbortReason, EpisodeType, NotedCall, Outcome, RunKind
from bombus.hive.inbox import Abort, CallRecorded, Done, End, EpisodeResult, Found, Lookup, Take
from bombus.hive.records import digest
from bombus.hive.state import EngineState, Episode
from bombus_coordinator.rules.decision import NAMES_PER_EVENT, CommandReply, Decision, Decisions
from bombus_coordinator.rules.live import Live

EPISODES_PER_COMMAND_MAX = 1024
METADATA_BYTES_MAX = 64 << 10
OUTCOMES_BYTES = 256 << 10  # of one event, roughly: those that end more episodes are several

_deterministic = msgspec.msgpack.Encoder(order="deterministic")


def outcome_digest(result: EpisodeResult) -> bytes:
    """Return a digest that is equal for equal reports of an episode's end."""
    return digest(_deterministic.encode(result))


def _why_aborted(engine: EngineState, reason: AbortReason) -> str:
    """Return why an aborted episode cannot be ended. Swarm clients ignore a reason that names WEIGHT_SYNCING."""
    match reason:
        case AbortReason.CLIENT | AbortReason.INFRA:
            return "its client has aborted it. Claim another one."
        case AbortReason.IDLE:
            return "it was idle for too long. Claim with a longer discard_episode_timeout, or send a heartbeat."
        case AbortReason.SUPERSEDED:
            return f"its batch was closed while it was running. Current status: [{engine.phase}]. Claim another one."
    return f"it was taken away ({reason}). Claim another one."


def _check_reward(episode: Episode, result: EpisodeResult, call_rewards: tuple[float, ...] | None) -> float:
    """Return the episode's reward, the mean where each of its calls has one; side calls that are not trained have none.

    Raises `Refused` for no reward, one that is no number, and a list of another length.
    """
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
    if not all(abs(reward) <= REWARD_MAX for reward in rewards):  # which NaN is not either
        raise Refused(
            Code.BAD_REWARD,
            f"Episode {result.episode} has a reward that is not finite, or over {REWARD_MAX:.0e} in size, which would "
            "give gradients that are not finite. Send a smaller number.",
        )
    return sum(rewards) / len(rewards)


def _call_rewards(episode: Episode, result: EpisodeResult) -> tuple[float, ...] | None:
    """Return the rewards of the calls in their order, None where the episode has one reward.

    Only the log knows the order of calls that were made at the same time, so they may be rewarded by their ids. Raises
    `Refused` for ids that are not those of the completed calls.
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
            f"{_aside(episode)}: {lacking} calls have none, and {foreign} ids are not of its calls. Give one for the "
            "id of each answer.",
        )
    return tuple(given[call] for call in ids)


def _aside(episode: Episode) -> str:
    """Return what an error says of side calls, which are not counted."""
    masked = sum(call.masked for call in episode.complete_calls())
    return f" (side calls of its harness, {masked} here, have none)" if masked else ""


def _outcome(engine: EngineState, client: str, result: EpisodeResult) -> Outcome | None:
    """Return how this episode ends; None if it has ended in the same way before. Raises `Refused`."""
    outcome = outcome_digest(result)
    closed = engine.closed.get(result.episode)
    if closed is not None:
        if closed.client and closed.client != client:
            raise Refused(Code.NOT_YOUR_EPISODE, f"Episode {result.episode} was claimed by a different client.")
        if closed.aborted is not None:
            why = _why_aborted(engine, closed.aborted)
            raise Refused(Code.UNKNOWN_EPISODE, f"Episode {result.episode} is not in claimed status: {why}")
        if closed.outcome == outcome:
            return None
        raise Refused(
            Code.OTHER_OUTCOME,
            f"Episode {result.episode} has ended already with another outcome; that one stands.",
        )
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
    if not result.task and episode.type == EpisodeType.TRAIN:
        raise Refused(Code.MALFORMED, f"Episode {result.episode} needs a task_id: its group is found by it.")
    if len(_deterministic.encode((result.metadata, result.log_metrics))) > METADATA_BYTES_MAX:
        raise Refused(Code.TOO_LARGE, f"Metadata of episode {result.episode} is over {METADATA_BYTES_MAX} bytes.")
    call_rewards = _call_rewards(episode, result)
    reward = _check_reward(episode, result, call_rewards)
    return Outcome(
        episode=result.episode,
        task=result.task,
        reward=reward,
        digest=outcome,
        call_rewards=call_rewards,
        is_success=result.is_success,
        metadata=result.metadata,
        log_metrics=result.log_metrics,
        completion_tokens=sum(call.completion_tokens for call in episode.complete_calls()),
        oldest=min((call.oldest for call in episode.trainable_calls()), default=episode.version),
    )


def _fitting(outcomes: Sequence[Outcome]) -> Iterator[tuple[Outcome, ...]]:
    """Cut outcomes into portions that fit into a message each."""
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
    """End episodes, all or none. Those that have ended in the same way before are skipped."""
    if not 1 <= len(message.results) <= EPISODES_PER_COMMAND_MAX:
        raise Refused(Code.MALFORMED, f"Between 1 and {EPISODES_PER_COMMAND_MAX} episodes can be ended at once.")
    if len({result.episode for result in message.results}) != len(message.results):
        raise Refused(Code.MALFORMED, "The same episode is listed twice.")
    outcomes: dict[tuple[EpisodeType, int], list[Outcome]] = {}
    for result in message.results:
        outcome = _outcome(engine, message.client, result)
        if outcome is not None:
            episode = engine.open[result.episode]
            outcomes.setdefault((episode.type, episode.version), []).append(outcome)
    yield Decision(
        events=tuple(
            ev.EpisodeEnded(
                at_ns=live.now_ns,
                engine=engine.name,
                run=engine.run,
                client=message.client,
                type=kind,
                version=version,
                outcomes=some,
            )
            for (kind, version), ended in outcomes.items()
            for some in _fitting(ended)
        ),
        replies=(CommandReply(message.id, Done(run=engine.run)),),
    )


def aborted(
    engine: EngineState, live: Live, episodes: Sequence[str], reason: AbortReason, detail: str = ""
) -> tuple[ev.EpisodeAborted, ...]:
    """Return the events that abort episodes: several for very many, so that each fits into a message."""
    return tuple(
        ev.EpisodeAborted(
            at_ns=live.now_ns,
            engine=engine.name,
            run=engine.run,
            episodes=some,
            reason=reason,
            detail=detail,
        )
        for some in portions(episodes, NAMES_PER_EVENT)
    )


def abort(engine: EngineState, live: Live, message: Abort) -> Decisions:
    """Abort episodes. Those that are not open are skipped: there is nothing left to abort."""
    if len(message.episodes) > EPISODES_PER_COMMAND_MAX:
        raise Refused(Code.MALFORMED, f"At most {EPISODES_PER_COMMAND_MAX} episodes can be aborted at once.")
    still_open = [engine.open[episode] for episode in dict.fromkeys(message.episodes) if episode in engine.open]
    if any(episode.client != message.client for episode in still_open):
        raise Refused(Code.NOT_YOUR_EPISODE, "An episode can be aborted only by the client that claimed it.")
    reason = AbortReason.INFRA if message.infra else AbortReason.CLIENT
    ids = tuple(episode.id for episode in still_open)
    events = aborted(engine, live, ids, reason, message.detail[:1000]) if ids else ()
    yield Decision(events=events, replies=(CommandReply(message.id, Done(run=engine.run)),))


def take(engine: EngineState, live: Live, message: Take) -> Decisions:
    """Let ended episodes of a run of operations leave the pool. Those that have left it already are skipped.

    This holds after the run, too. Raises `Refused` for the episodes of others, and of a run that trains them itself.
    """
    if len(message.episodes) > EPISODES_PER_COMMAND_MAX:
        raise Refused(Code.MALFORMED, f"At most {EPISODES_PER_COMMAND_MAX} episodes can be taken at once.")
    if engine.run_kind != RunKind.OPERATIONS:
        raise Refused(Code.UNSUPPORTED, f"Engine {engine.name} trains the episodes of run {engine.run} itself.")
    ended = [engine.pool[episode] for episode in dict.fromkeys(message.episodes) if episode in engine.pool]
    if any(each.client != message.client for each in ended):
        raise Refused(Code.NOT_YOUR_EPISODE, "An episode can be taken only by the client that claimed it.")
    reply = (CommandReply(message.id, Done(run=engine.run)),)
    ids = tuple(each.episode for each in ended)
    taken = ev.EpisodesTaken(at_ns=live.now_ns, engine=engine.name, run=engine.run, client=message.client, episodes=ids)
    yield Decision(events=(taken,) if ids else (), replies=reply)


def lookup(engine: EngineState, live: Live, message: Lookup) -> Decisions:
    """Answer with the calls of an open episode, in the order of the log (R10)."""
    episode = engine.open.get(message.episode)
    if episode is None:
        code = Code.EPISODE_OVER if engine.is_over(message.episode) else Code.UNKNOWN_EPISODE
        raise Refused(code, f"Episode {message.episode} is not open: claim another.")
    found = Found(run=engine.run, open=True, calls=tuple(episode.calls))
    yield Decision(replies=(CommandReply(message.id, found),))


def note(engine: EngineState, message: CallRecorded) -> NotedCall | None:
    """Return the call as it will be noted; None if it is of another run or noted already."""
    call = message.call
    if message.run != engine.run:
        return None
    episode = engine.open.get(call.episode)
    if episode is None:
        return msgspec.structs.replace(call, late=True)
    if any(noted.ref.id == call.ref.id for noted in episode.calls):
        return None
    return call


def expire(engine: EngineState, live: Live) -> Decisions:
    """Abort episodes that have been idle for too long, and those of claims whose answer reached nobody."""
    now = live.now_ns
    idle = tuple(e.id for e in engine.open.values() if live.idle_deadline_ns(e) <= now)
    if idle:
        yield Decision(events=aborted(engine, live, idle, AbortReason.IDLE))
    for claim, grant in list(live.unconfirmed.items()):
        if grant.engine != engine.name or grant.until_ns > now:
            continue
        del live.unconfirmed[claim]
        lost = tuple(e for e in engine.claims.get(claim, ()) if e in engine.open)
        if lost and not any(engine.open[e].calls or e in live.activity for e in lost):
            yield Decision(events=aborted(engine, live, lost, AbortReason.UNCONFIRMED))
