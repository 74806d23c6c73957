"""Hand out episodes: which claims wait, which claim is next, and how to answer when no episode is free."""

from collections.abc import Sequence

from bombus.errors import Code, Refused
from bombus.hive import events as ev
from bombus.hive.inbox import BASE_SAMPLER, Claim, Granted
from bombus.hive.operations.owners import may_read
from bombus.hive.state import EngineState, Hive, Phase
from bombus_coordinator.rules.decision import NAMES_PER_EVENT, CommandReply, Decision, Decisions, refusal
from bombus_coordinator.rules.live import Live, ns
from bombus_coordinator.rules.multi_model.granting import episodes_claimed, granted_multi_model, next_multi_model
from bombus_coordinator.rules.waiting import has_room, next_of, over_cap, share_of, why_paced

DISCARD_TIMEOUT_S_MAX = 7 * 24 * 3600.0
WAIT_S_MAX = 60.0
NAME_SHOWN = 300
CLAIM_OVER = "The episodes of this claim have ended; use a fresh id for each claim."
USED_BY_OTHERS = "This claim id was used by another client, or for other engines; use a fresh one for each claim."
NONE_AVAILABLE = "No available episodes to claim."


def why_none(engine: EngineState, claim: Claim | None = None) -> Refused:
    """Return why no episode is available now. Clients that implement the swarm contract match on these sentences."""
    refused = _why_in_phase(engine, claim)
    if not engine.suspended:
        return refused
    why = NONE_AVAILABLE if engine.phase == Phase.ROLLING else refused.why
    ways = "its operator resumes it (`bombus resume` or client.resume_engine())"
    until = "a replica serves its weights" if engine.until_served else ways
    return Refused(refused.code, f"{why} The run is suspended until {until}: {engine.suspended}")


def _why_in_phase(engine: EngineState, claim: Claim | None) -> Refused:
    status = f"Engine not ready. Current status: [{engine.phase}]."
    match engine.phase:
        case Phase.ROLLING:
            if claim is not None and (why := why_paced(engine, claim)):
                return Refused(Code.NO_EPISODES, f"{NONE_AVAILABLE} Wait: {why}.")
            limit = engine.collection.max_open_claims
            return Refused(
                Code.NO_EPISODES,
                f"{NONE_AVAILABLE} {len(engine.open)} of at most {limit} are open: end or abort one, wait, or raise "
                "rollout.max_env_worker.",
            )
        case Phase.WEIGHT_SYNCING:
            return Refused(Code.WRONG_PHASE, f"{status} Engine is syncing weights. Try again in a moment.")
        case Phase.ROLLING_POST:
            return Refused(Code.WRONG_PHASE, f"{status} Engine is in post-rolling phase. Try again in a moment.")
        case Phase.BOOTING:
            return Refused(Code.WRONG_PHASE, f"{status} It is booting ({engine.stage}). Try again in a moment.")
    failed = f" Its last run failed: {engine.failure}" if engine.failure else ""
    return Refused(
        Code.WRONG_PHASE,
        f"{status} Configure it with sync_train_config and start it with start_engine.{failed}",
    )


def no_room(live: Live, engine: EngineState | None = None) -> Refused:
    """Return the refusal of new work (on `engine`, if given), for when the remaining storage is kept for work in
    progress."""
    why = live.refusing if engine is None else live.refusing_of(engine)
    return Refused(Code.STORAGE_FULL, f"{why} Try again when there is room.")


def check_share(hive: Hive, claim: Claim) -> None:
    """Raise `Refused`, worded so that clients retry, if the claim's holder pins more calls than the holder's share."""
    why = hive.why_no_calls(claim.holder)
    if why:
        raise Refused(Code.NO_EPISODES, f"{NONE_AVAILABLE} {why}")


def capped(live: Live, engine: EngineState, claim: Claim) -> Refused | None:
    """Return why a claim must wait because its key has too many open episodes, or None if it need not wait."""
    held = live.queue(engine).held_by(share_of(claim)).most
    if not over_cap(claim, held) or engine.phase != Phase.ROLLING:
        return None
    return Refused(
        Code.NO_EPISODES,
        f"No available episodes to claim. Key {claim.owner} has {held} of at most {claim.open_max} open: end or abort "
        "one, or wait.",
    )


def check(engine: EngineState, claim: Claim) -> None:
    """Raise `Refused` for a claim that could never be granted."""
    limit = min(engine.collection.max_open_claims, NAMES_PER_EVENT)
    if over_cap(claim, 0):
        raise Refused(
            Code.MALFORMED,
            f"Key {claim.owner} may have at most {claim.open_max} open episodes, but this claim is for {claim.count}.",
        )
    if not 1 <= claim.count <= limit:
        whose = f"; the limit is rollout.max_env_worker, at most {NAMES_PER_EVENT}"
        raise Refused(Code.MALFORMED, f"A claim must be for 1 to {limit} episodes, not {claim.count}{whose}.")
    if not 0 < claim.discard_timeout_s <= DISCARD_TIMEOUT_S_MAX:
        raise Refused(
            Code.MALFORMED,
            f"discard_episode_timeout must be above 0 and at most {DISCARD_TIMEOUT_S_MAX:.0f} seconds, "
            f"not {claim.discard_timeout_s}.",
        )
    if not 0 <= claim.wait_s <= WAIT_S_MAX:
        raise Refused(Code.MALFORMED, f"wait_s must be 0 to {WAIT_S_MAX:.0f} seconds, not {claim.wait_s}.")


def check_collects(engine: EngineState) -> None:
    """Check a command that is about batches of episodes. Raises `Refused` if the run never makes any."""
    if engine.serves_operations:
        raise Refused(
            Code.UNSUPPORTED,
            f"Run {engine.run} of engine {engine.name} serves training operations and makes no batches: the client "
            "that sends the operations takes the episodes.",
        )
    if engine.groups_episodes:
        raise Refused(
            Code.UNSUPPORTED,
            f"Run {engine.run} of engine {engine.name} makes batches of rollout groups by itself, as soon as it can.",
        )
    if engine.queues_groups:
        raise Refused(
            Code.UNSUPPORTED,
            f"Run {engine.run} of engine {engine.name} takes rollout groups and has no episodes. Claim them from "
            "another engine, or stop this one and start it with a job.",
        )


def sampler_of(engine: EngineState, claim: Claim) -> ev.SamplerWeights | None:
    """Return the weights that a claim's episodes sample from, or None if they sample from the policy that the run
    trains.

    Raises `Refused` if the run has no episodes, or if the saved model cannot be sampled from.
    """
    if not engine.serves_operations:
        if not engine.groups_episodes:
            check_collects(engine)
        if claim.sampler:
            raise _no_sampler(engine)
        return None
    if not claim.sampler:
        raise Refused(
            Code.UNSUPPORTED,
            f"Run {engine.run} of engine {engine.name} serves training operations: say which of its saved models the "
            f"episodes sample from (`sampler`, the path that save_weights_for_sampler returned, or {BASE_SAMPLER}). "
            "To claim episodes of a job, use another engine, or stop this one first.",
        )
    if claim.sampler == BASE_SAMPLER:
        return ev.SamplerWeights()
    named = claim.sampler[:NAME_SHOWN]
    kept = engine.clients.kept.get(claim.sampler)
    if kept is None or not may_read(kept, claim.owner):
        raise Refused(Code.UNKNOWN_MODEL, f"There is no saved model {named} here, or it was removed: save one.")
    if kept.noted.adapter is None:
        raise Refused(
            Code.UNSUPPORTED,
            f"{named} contains all the weights of its model, but episodes sample only from adapters (rank 1 or more).",
        )
    assert engine.started is not None
    if kept.noted.base not in (engine.started.base, "" if engine.active is None else engine.active.model):
        raise Refused(
            Code.UNKNOWN_MODEL,
            f"{named} is an adapter on {kept.noted.base}, but engine {engine.name} now runs {engine.started.base}.",
        )
    return ev.SamplerWeights(checkpoint=claim.sampler, address=kept.noted.saved.address, folder=kept.noted.saved.folder)


def _no_sampler(engine: EngineState) -> Refused:
    if engine.phase == Phase.OFFLINE:
        why = f"Engine {engine.name} is not running, so nothing can be sampled: create a model, which starts it."
        return Refused(Code.WRONG_PHASE, why)
    return Refused(
        Code.UNSUPPORTED,
        f"Run {engine.run} of engine {engine.name} trains the model that its episodes sample from: leave out "
        "`sampler`, or claim from an engine whose run serves training operations.",
    )


def repeated(engine: EngineState, live: Live, claim: Claim) -> Granted | None:
    """Return the earlier grant of this claim id, if any. Raises `Refused` if the id belongs to another client, or if
    all episodes of the grant have ended."""
    episodes = engine.claims.get(claim.claim)
    if episodes is None:
        if claim.claim in live.granted:
            raise Refused(Code.OTHER_CLAIM, CLAIM_OVER)
        return None
    first = next(engine.open[episode] for episode in episodes if episode in engine.open)
    if first.client != claim.client or first.partners:
        raise Refused(Code.OTHER_CLAIM, USED_BY_OTHERS)
    return Granted(
        run=engine.run,
        episodes=episodes,
        claimed_ns=first.claimed_ns,
        discard_timeout_s=first.discard_timeout_s,
        version=first.version,
    )


def claim(hive: Hive, live: Live, message: Claim) -> Decisions:
    """Grant a claim immediately, queue it for up to `wait_s`, or refuse it."""
    engine = hive.engine(message.engine)
    check(engine, message)
    granted = repeated(engine, live, message)
    if granted is not None:
        yield Decision(replies=(CommandReply(message.id, granted),))
        return
    sampler_of(engine, message)
    if live.refusing_of(engine):
        raise no_room(live, engine)
    check_share(hive, message)
    if engine.phase == Phase.OFFLINE:
        raise why_none(engine)
    queue = live.queue(engine)
    if not queue and not live.multi_model and _is_granting(engine, live) and _fits(engine, live, message):
        yield _granted(engine, live, message, [message.id])
        return
    if live.waits_otherwise(message.claim, (engine.name,)):
        raise Refused(Code.OTHER_CLAIM, USED_BY_OTHERS)
    elsewhere = live.multi_model_waiting(engine.name, share_of(message))
    queue.add(message, live.now_ns, live.now_ns + ns(message.wait_s), elsewhere)
    yield from grant(hive, engine, live)
    yield from lapse(engine, live)


def _is_granting(engine: EngineState, live: Live) -> bool:
    return engine.granting and not live.refusing_of(engine)


def _fits(engine: EngineState, live: Live, claim: Claim) -> bool:
    """Return whether a claim could be granted immediately if no other claim were waiting."""
    held = live.queue(engine).held_by(share_of(claim)).most
    return has_room(engine, claim) and not over_cap(claim, held) and not why_paced(engine, claim)


def grant(hive: Hive, engine: EngineState, live: Live) -> Decisions:
    """Grant the waiting claims that have room, including multi-model ones. A claim never overtakes a larger one that is
    waiting for room."""
    while _is_granting(engine, live):
        due = next_multi_model(hive, live, engine)
        if due is not None and due.has_room:
            yield granted_multi_model(due, live)
            continue
        kept = 0 if due is None else due.waiting.claim.count
        waiting = next_of(live.queue(engine), (engine,))
        if waiting is None or not has_room(engine, waiting.claim, kept):
            return
        live.queue(engine).remove(waiting)
        yield _granted(engine, live, waiting.claim, waiting.commands)


def _granted(engine: EngineState, live: Live, claim: Claim, commands: Sequence[str]) -> Decision:
    """Return the decision that answers these commands: it grants the claim, or refuses it if the sampler that it needs
    was removed."""
    try:
        sampler = sampler_of(engine, claim)
    except Refused as refused:
        return Decision(replies=tuple(CommandReply(command, refusal(refused)) for command in commands))
    claimed = episodes_claimed(engine, live, claim, sampler=sampler)
    granted = Granted(
        run=engine.run,
        episodes=claimed.episodes,
        claimed_ns=live.now_ns,
        discard_timeout_s=claim.discard_timeout_s,
        version=claimed.version,
    )
    live.remember_grant(claim.claim, engine)
    return Decision(events=(claimed,), replies=tuple(CommandReply(command, granted) for command in commands))


def lapse(engine: EngineState, live: Live) -> Decisions:
    """Refuse the claims whose waiting time is over, or all of them if the engine is offline."""
    queue = live.queue(engine)
    replies: list[CommandReply] = []
    for waiting in queue.clear() if engine.phase == Phase.OFFLINE else queue.over(live.now_ns):
        claim = waiting.claim
        full = no_room(live, engine) if live.refusing_of(engine) else None
        answer = refusal(full or capped(live, engine, claim) or why_none(engine, claim))
        replies += [CommandReply(command, answer) for command in waiting.commands]
    if replies:
        yield Decision(replies=tuple(replies))
