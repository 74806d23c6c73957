"""How far ahead of training episodes are handed out when `max_staleness` is above 0 (R14).

Step s trains version s - 1, so a token of version v is trained at the age s - 1 - v. Before an episode that is claimed
now come the batches whose weights no call uses yet, and those that the pool and the open episodes can still make. Their
number is the age that its samples will have, unless the episode takes longer than the others.
"""

from collections import Counter

import msgspec

from bombus.hive.collection import BATCH_METHODS
from bombus.hive.events import EpisodeType
from bombus.hive.state import EngineState, Episode, Replica


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """The batches before an episode that is claimed now, and why it has to wait ("" when it does not)."""

    unfinished: int  # sealed batches whose weights the replicas do not serve yet
    sealable: int  # at most this many more can be made of the pool and the open episodes
    max_staleness: int
    waits: str


def fitting(engine: EngineState, episode: str = "") -> dict[str, Replica]:
    """Return the replicas that may answer a call: not quarantined, with weights of this run that are recent enough.

    Recent enough is at most `max_staleness` versions older than the newest, and for a call of an open episode also not
    older than the version served when it was claimed.
    """
    oldest = max(0, engine.version - engine.collection.max_staleness)
    claimed = engine.open.get(episode)
    if claimed is not None:
        oldest = max(oldest, claimed.version)
    return {
        name: replica
        for name, replica in engine.usable.items()
        if replica.run == engine.run and replica.version >= oldest
    }


def served(engine: EngineState) -> int | None:
    """Return the oldest policy version that may answer a call of a new episode; None when no replica can answer."""
    return min((replica.version for replica in fitting(engine).values()), default=None)


def oldest_usable(engine: EngineState) -> int:
    """Return the policy version before which a token is too old for the next batch and all later ones."""
    return engine.step - engine.collection.max_staleness


def last_chances(engine: EngineState) -> int:
    """Return how many open episodes can be in the next batch but in no later one: a complete batch waits for them.

    An episode without a recorded call may have one in flight that is as old as its claim.
    """
    last = oldest_usable(engine)
    return sum(
        min((call.oldest for call in episode.trainable_calls()), default=episode.version) == last
        for episode in engine.open.values()
        if episode.type == EpisodeType.TRAIN and episode.version <= last
    )


def pace(engine: EngineState, count: int = 1, task_hint: str = "") -> Pace | None:
    """Return the pace for a claim of `count` training episodes; None when training is synchronous.

    No claim waits for ever. When no episode is open, every batch that the pool can make has been sealed; once those are
    trained the next claim is granted, whatever its size.
    """
    bound = engine.collection.max_staleness
    if bound == 0:
        return None
    version = served(engine)
    unfinished = engine.step - (engine.version if version is None else version)
    sealable = most_batches(engine, count - 1, task_hint)
    waits = ""
    if version is None:
        waits = f"no inference replica serves version {engine.version} or one of the {bound} before it"
    elif unfinished + sealable > bound and not _is_idle(engine):
        waits = (
            f"unfinished batches ({unfinished}) and those under way ({sealable}) are over collection.max_staleness "
            f"({bound}), so its samples would be too old when they are trained"
        )
    return Pace(unfinished=unfinished, sealable=sealable, max_staleness=bound, waits=waits)


def _is_idle(engine: EngineState) -> bool:
    """Return whether no step is being trained and no training episode is open."""
    if engine.version < engine.step:
        return False
    return not any(episode.type == EpisodeType.TRAIN for episode in engine.open.values())


def most_batches(engine: EngineState, more: int = 0, task_hint: str = "") -> int:
    """Return how many complete batches the pool, the open training episodes and `more` of them can make at most.

    An open episode counts for the task that its claim named, or for the one where it helps most. Episodes that can
    never be used do not count: those with a token that is too old, and full groups whose rewards are all equal when the
    method leaves these out.
    """
    rules = engine.collection
    method = BATCH_METHODS[rules.method]
    if len(engine.pool) + len(engine.open) + more < method.targets(rules).episodes:
        return 0
    named = _usable(engine)
    named[task_hint] += more
    unnamed = named.pop("", 0)
    return method.most_batches(engine, named, unnamed)


def _usable(engine: EngineState) -> Counter[str]:
    """Count the open training episodes that are not too old, by the task that their claim named."""
    bound = oldest_usable(engine)
    return Counter(
        episode.task_hint
        for episode in engine.open.values()
        if episode.type == EpisodeType.TRAIN and (episode.version >= bound or not _has_older(episode, bound))
    )


def _has_older(episode: Episode, bound: int) -> bool:
    return any(call.oldest < bound for call in episode.trainable_calls())
