"""Claims of multi-model episodes: which are refused, which wait, and how to answer when no episode is available."""

from collections import Counter
from collections.abc import Sequence

from bombus.errors import Code, Refused
from bombus.hive.inbox import EngineGrant, MultiModelClaim, MultiModelGranted
from bombus.hive.shares import has_share
from bombus.hive.state import EngineState, Hive, Phase
from bombus_coordinator.rules import claims
from bombus_coordinator.rules.claims import CLAIM_OVER, NONE_AVAILABLE, USED_BY_OTHERS
from bombus_coordinator.rules.decision import NAMES_PER_EVENT, CommandReply, Decision, Decisions, refusal
from bombus_coordinator.rules.live import Live, ns
from bombus_coordinator.rules.waiting import has_room, share_of, why_paced

ENGINES_MAX = 8  # maximum number of engines in a multi-model episode
MULTI_MODEL_WAITING_MAX = 1_000


def _engines(hive: Hive, claim: MultiModelClaim) -> tuple[EngineState, ...]:
    """Return a claim's engines, ordered by name. Raises `Refused` if the claim is malformed."""
    names = sorted(set(claim.engines))
    if len(names) != len(claim.engines):
        raise Refused(
            Code.MALFORMED,
            "A multi-model claim may name each engine only once: roles that share an engine's model share one episode "
            "on it.",
        )
    if not 2 <= len(names) <= ENGINES_MAX:
        raise Refused(Code.MALFORMED, f"A multi-model claim must name 2 to {ENGINES_MAX} engines, not {len(names)}.")
    if claim.count * len(names) > NAMES_PER_EVENT:
        most = NAMES_PER_EVENT // len(names)
        why = f"A multi-model claim for {len(names)} engines must be for at most {most} multi-model episodes at once"
        raise Refused(Code.MALFORMED, f"{why}, not {claim.count}.")
    if claim.sampler:
        raise Refused(
            Code.UNSUPPORTED, "Multi-model episodes use the policies that their engines train: leave out `sampler`."
        )
    return tuple(map(hive.engine, names))


def _check(engine: EngineState, claim: MultiModelClaim) -> None:
    try:
        claims.check(engine, claim)
        claims.check_collects(engine)
        if engine.phase == Phase.OFFLINE:
            raise claims.why_none(engine)
    except Refused as refused:
        raise _of(engine, refused) from refused


def _of(engine: EngineState, refused: Refused) -> Refused:
    """Return the refusal, with the engine's name added."""
    return Refused(refused.code, f"Engine {engine.name}: {refused.why}")


def claim(hive: Hive, live: Live, message: MultiModelClaim) -> Decisions:
    """Grant a claim on all of its engines immediately, queue it for up to `wait_s`, or refuse it."""
    engines = _engines(hive, message)
    granted = _repeated(engines, live, message)
    if granted is not None:
        yield Decision(replies=(CommandReply(message.id, granted),))
        return
    for engine in engines:
        _check(engine, message)
    if live.refusing:
        raise claims.no_room(live)
    claims.check_share(hive, message)
    _wait(engines, live, message)
    yield from claims.grant(hive, engines[0], live)
    yield from lapse(hive, live)


def _repeated(engines: Sequence[EngineState], live: Live, claim: MultiModelClaim) -> MultiModelGranted | None:
    """Return the earlier grant of this claim id, if any. Raises `Refused` if the id belongs to another client, or if
    the grant's episodes have ended."""
    found = [engine for engine in engines if claim.claim in engine.claims]
    if not found:
        if claim.claim in live.granted:
            raise Refused(Code.OTHER_CLAIM, CLAIM_OVER)
        return None
    first = next(found[0].open[episode] for episode in found[0].claims[claim.claim] if episode in found[0].open)
    others = {engine.name for engine in engines if engine is not found[0]}
    if first.client != claim.client or first.partners.keys() != others:
        raise Refused(Code.OTHER_CLAIM, USED_BY_OTHERS)
    return MultiModelGranted(
        grants=tuple(
            EngineGrant(
                engine=engine.name,
                run=engine.run,
                episodes=engine.claims[claim.claim],
                version=_version_at(engine, claim.claim),
            )
            for engine in engines
        ),
        claimed_ns=first.claimed_ns,
        discard_timeout_s=first.discard_timeout_s,
    )


def _version_at(engine: EngineState, claim: str) -> int:
    return next(engine.open[episode].version for episode in engine.claims[claim] if episode in engine.open)


def _wait(engines: Sequence[EngineState], live: Live, claim: MultiModelClaim) -> None:
    """Queue a claim. Raises `Refused` if too many claims are waiting."""
    names = tuple(engine.name for engine in engines)
    if live.waits_otherwise(claim.claim, names):
        raise Refused(Code.OTHER_CLAIM, USED_BY_OTHERS)
    share = share_of(claim)
    queue = live.multi_model_queue(engines)
    waiting = max(live.queue(each).waiting_of(share) + live.multi_model_waiting(each.name, share) for each in engines)
    try:
        _check_room(live, claim)
        queue.add(claim, live.now_ns, live.now_ns + ns(claim.wait_s), waiting - queue.waiting_of(share))
    finally:
        if not queue:
            del live.multi_model[names]


def _check_room(live: Live, claim: MultiModelClaim) -> None:
    """Raise `Refused` OVERLOADED if too many multi-model claims are waiting, over all sets of engines together."""
    waiting = sum(map(len, live.multi_model.values()))
    if waiting < MULTI_MODEL_WAITING_MAX:
        return
    held = sum((queue.held for queue in live.multi_model.values()), Counter[str]())
    if not has_share(held, claim.holder, MULTI_MODEL_WAITING_MAX):
        raise Refused(Code.OVERLOADED, f"{waiting} multi-model claims are already waiting; try again later.")


def lapse(hive: Hive, live: Live) -> Decisions:
    """Refuse the multi-model claims whose waiting time is over, and all claims that need an engine that is offline."""
    replies: list[CommandReply] = []
    for names, queue in list(live.multi_model.items()):
        engines = tuple(map(hive.engine, names))
        is_offline = any(engine.phase == Phase.OFFLINE for engine in engines)
        for waiting in queue.clear() if is_offline else queue.over(live.now_ns):
            assert isinstance(waiting.claim, MultiModelClaim)
            answer = refusal(_why_none(engines, live, waiting.claim))
            replies += [CommandReply(command, answer) for command in waiting.commands]
        if not queue:
            del live.multi_model[names]
    if replies:
        yield Decision(replies=tuple(replies))


def _why_none(engines: Sequence[EngineState], live: Live, claim: MultiModelClaim) -> Refused:
    """Return why a multi-model claim is not granted. If there are several reasons, return the one that is likely to
    last the longest."""
    if live.refusing:
        return claims.no_room(live)
    for engine in sorted(engines, key=lambda each: each.phase != Phase.OFFLINE):
        if not engine.granting or why_paced(engine, claim):
            return _of(engine, claims.why_none(engine, claim))
    for engine in engines:
        if (refused := claims.capped(live, engine, claim)) is not None:
            return _of(engine, refused)
    for engine in engines:
        if not has_room(engine, claim):
            return _of(engine, claims.why_none(engine, claim))
    return Refused(Code.NO_EPISODES, f"{NONE_AVAILABLE} Earlier claims are waiting for the same engines.")
