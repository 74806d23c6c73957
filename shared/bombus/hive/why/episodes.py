"""What open episodes wait for, and what an incomplete batch of episodes waits for."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from bombus.figures import counted, duration, one_line
from bombus.hive import events as ev
from bombus.hive.collection import BATCH_METHODS, active_clients
from bombus.hive.events import AbortReason, DropReason, EpisodeType
from bombus.hive.pacing import fitting, pace
from bombus.hive.state import ACTIVE_S, EngineState, Episode
from bombus.hive.why import serving
from bombus.hive.why.links import CLIENT, OPERATOR, OVERDUE_NS, SECOND, ChainLink, View

CLIENTS_SHOWN = 3
DETAIL_CHARS = 200


class WaitEnd(NamedTuple):
    """The end of the wait for an episode: its time, and a clause that says what happens then."""

    until_ns: int
    then: str


def client_of(episode: Episode) -> str:
    return f"client {episode.client}" + (f" of key {episode.owner}" if episode.owner else "")


def idlest(episodes: Iterable[Episode]) -> Episode:
    return min(episodes, key=lambda each: (each.active_ns, each.id))


def of_episode(
    view: View, engine: EngineState, episode: Episode, before: str = "", end: WaitEnd | None = None
) -> Iterator[ChainLink]:
    """Yield what an open episode waits for: replicas that answer its calls, or else its client.

    The first sentence begins with `before`. The wait for the episode ends at `end`.
    """
    client = client_of(episode)
    kind = "evaluation episode" if episode.type == EpisodeType.EVAL else "episode"
    claimed = f"claimed by {client} {view.ago(episode.claimed_ns)}"
    called = f"a last call recorded {view.ago(episode.last_call_ns)}" if episode.calls else "no call recorded yet"
    what = f"{before}{kind} {episode.id}, {claimed}, with {called}"
    if not before:
        what = f"{kind} {episode.id} was {claimed}, and has {called}"
    yield ChainLink(what, client, episode.active_ns)
    for name, part in sorted({engine.name: episode.id, **episode.partners}.items()):
        if not fitting(view.hive.engine(name), part):
            what = f"its calls are waiting: no replica of engine {name} serves a version that it may use"
            yield ChainLink(what, "a replica", episode.active_ns)
            yield from serving.replicas(view, view.hive.engine(name))
            return
    yield _end_of(view, engine, episode, client, end)


def _end_of(view: View, engine: EngineState, episode: Episode, client: str, end: WaitEnd | None) -> ChainLink:
    active_ns = max(each.active_ns for each in (episode, *view.hive.partners(episode)))
    idle_ns = max(active_ns, view.last.anew_ns) + int(episode.discard_timeout_s * SECOND)
    silence = duration(engine.collection.client_silence_s)
    alive = f"; its process sends heartbeats: {silence} after the last one it is aborted" if episode.touches else ""
    if end is not None and (end.until_ns < idle_ns or idle_ns + OVERDUE_NS < view.now_ns):
        what = f"{end.then} {view.left(end.until_ns)} unless {client} reports its reward{alive}"
        return ChainLink(what, client, active_ns, end.until_ns)
    if idle_ns + OVERDUE_NS < view.now_ns:
        limit = duration(episode.discard_timeout_s)
        what = (
            f"no call was recorded for longer than its idle limit of {limit}, so one must be in progress; after "
            f"that {client} has to report its reward{alive}"
        )
        return ChainLink(what, client, active_ns)
    what = f"it will be aborted as idle {view.left(idle_ns)} unless {client} has a call in progress, makes one, or"
    return ChainLink(f"{what} reports its reward{alive}", client, active_ns, idle_ns)


# ---- what an incomplete batch of episodes waits for: the first of these that yields a link ------------------------


def storage(view: View, engine: EngineState) -> Iterator[ChainLink]:
    if why := view.hive.refusing_of(engine):
        since_ns = min(filled.at_ns for filled in view.hive.full.values())
        yield ChainLink(f"no new work has been accepted{view.lasting(since_ns)}: {why}", OPERATOR, since_ns)


def unserved(view: View, engine: EngineState) -> Iterator[ChainLink]:
    if not fitting(engine):
        what = f"no call can be answered: no replica serves version {engine.version}"
        yield ChainLink(what, "a replica")
        yield from serving.replicas(view, engine)


def agreement(view: View, engine: EngineState) -> Iterator[ChainLink]:
    if not BATCH_METHODS[engine.collection.method].is_by_agreement or not engine.pool:
        return
    silent = sorted(active_clients(engine, view.now_ns) - engine.agreed)
    more = f" and {len(silent) - CLIENTS_SHOWN} more" if len(silent) > CLIENTS_SHOWN else ""
    names = f"client{'s' * (len(silent) > 1)} {' and '.join(silent[:CLIENTS_SHOWN])}{more}" if silent else CLIENT
    last_ns = max((engine.rewarded_ns[client] for client in silent), default=0)
    until_ns = last_ns + int(ACTIVE_S * SECOND) if silent and engine.agreed else 0
    idle = (
        f", or that they end no episode for another {duration((until_ns - view.now_ns) / SECOND)}" if until_ns else ""
    )
    what = f"the sync needs the agreement of {names}{idle}; {counted(len(engine.agreed), 'client')} agreed"
    yield ChainLink(what, names, last_ns, until_ns)


def paced(view: View, engine: EngineState) -> Iterator[ChainLink]:
    if not engine.open_tasks and (now := pace(engine)) is not None and now.waits:
        yield ChainLink(f"new episodes are waiting: {now.waits}", serving.trainer_of(engine))
        yield from serving.training(view, engine)


def shares(view: View, engine: EngineState) -> Iterator[ChainLink]:
    """Yield which key's claims are refused because its episodes pin more calls than the key's share allows."""
    for holder, _ in view.hive.pinned_calls().most_common(1):
        if holder in engine.calls.holders and (why := view.hive.why_no_calls(holder)):
            key = f"key {holder}" if holder else "clients without a key"
            yield ChainLink(f"claims of {key} are refused: {why}", key)
            oldest = next(iter(engine.calls.holders[holder].pins), "")
            if oldest in engine.open:
                yield from of_episode(view, engine, engine.open[oldest], "its oldest is ")


def places(view: View, engine: EngineState) -> Iterator[ChainLink]:
    limit = engine.collection.max_open_claims
    if len(engine.open) >= limit:
        held = Counter(map(client_of, engine.open.values()))
        shown = ", ".join(f"{count} by {client}" for client, count in held.most_common(CLIENTS_SHOWN))
        more = f" and {len(held) - CLIENTS_SHOWN} more clients" if len(held) > CLIENTS_SHOWN else ""
        what = f"no other episode can be claimed: all {limit} (rollout.max_env_worker) are open, {shown}{more}"
        yield ChainLink(what, held.most_common(1)[0][0])
        yield from of_episode(view, engine, idlest(engine.open.values()), "the longest idle is ")


def played(view: View, engine: EngineState) -> Iterator[ChainLink]:
    training = [each for each in engine.open.values() if each.type == EpisodeType.TRAIN]
    if training:
        slowest = idlest(training)
        begun_ns = max(engine.phase_since_ns, view.last.at_ns(ev.BatchReady, engine.name))
        aborted = view.last.of(ev.EpisodeAborted, engine.name)
        if aborted is not None and aborted.at_ns >= begun_ns and aborted.failed_by is not None:
            yield ChainLink(f"episode {aborted.episodes[0]} was {_aborted(view, aborted)}", CLIENT, aborted.at_ns)
        group = f"the group of task {slowest.task_hint} is waiting for " if slowest.task_hint else "it is waiting for "
        yield from of_episode(view, engine, slowest, group)


def _aborted(view: View, aborted: ev.EpisodeAborted) -> str:
    """Return a clause that says when and why episodes were aborted."""
    by_client = aborted.failure is not None or aborted.reason == AbortReason.CLIENT
    kind = "by its client" if aborted.failed_by is None else f"as failed: {aborted.failed_by}"
    why = aborted.detail or ("" if by_client else aborted.reason)
    return f"aborted {view.ago(aborted.at_ns)} ({kind}{', ' if why else ''}{one_line(why)[:DETAIL_CHARS]})"


def cleared(view: View, engine: EngineState) -> Iterator[ChainLink]:
    """Yield a link if the pool is too small for a batch because it was cleared after the newest batch."""
    found, batch = view.last.of(ev.PoolCleared, engine.name), view.last.at_ns(ev.BatchReady, engine.name)
    if found is not None and found.run == engine.run and found.reason == DropReason.OVERFLOW and found.at_ns > batch:
        limit = engine.collection.max_pool_episodes
        what = f"the pool was cleared of {counted(found.episodes, 'episode')} {view.ago(found.at_ns)}, as it was full"
        yield ChainLink(f"{what} (collection.max_cached_episodes is {limit})", OPERATOR, found.at_ns)


def unclaimed(view: View, engine: EngineState) -> Iterator[ChainLink]:
    size, counts_tasks = engine.collection.num_repeat, BATCH_METHODS[engine.collection.method].counts_tasks
    unfinished = {task: len(ended) for task, ended in engine.by_task.items() if len(ended) < size}
    if unfinished and counts_tasks:
        task = max(unfinished, key=unfinished.__getitem__)
        groups = f"; {len(unfinished)} groups are incomplete" if len(unfinished) > 1 else ""
        yield ChainLink(f"the group of task {task} has {unfinished[task]} of {size} episodes{groups}", CLIENT)
    claimed_ns = view.last.at_ns(ev.EpisodeClaimed, engine.name)
    if claimed_ns or not engine.counters.claimed:  # otherwise it is not known when the last claim was
        claimed_ns = max(claimed_ns, engine.phase_since_ns)
    aborted, gone = view.last.of(ev.EpisodeAborted, engine.name), ""
    if aborted is not None and aborted.at_ns >= claimed_ns > 0:
        gone = f"; the last one was {_aborted(view, aborted)}"
    evals = f" besides {counted(len(engine.open), 'evaluation episode')}" if engine.open else ""
    what = f"no training episode is open{evals}, and no client has claimed one{view.lasting(claimed_ns)}{gone}"
    yield ChainLink(what, CLIENT, claimed_ns)
