"""The chain that says what an engine, a run, an episode or a model waits for, down to the cause."""

from collections.abc import Callable, Iterator

from bombus.figures import counted
from bombus.hive import events as ev
from bombus.hive.collection import BATCH_METHODS, enough, measures, progress
from bombus.hive.pacing import held_since_ns, last_chances
from bombus.hive.state import BOOTED, LOAD_FAILED, NO_TRAINER, EngineState, Hive, Phase, engine_of
from bombus.hive.status.detail import way_on
from bombus.hive.why import episodes, serving
from bombus.hive.why.episodes import WaitEnd, idlest, of_episode
from bombus.hive.why.links import CLIENT, COORDINATOR, NOBODY, OPERATOR, OVERDUE_NS, TIME, ChainLink, LastEvents, View
from bombus.hive.why.operations import of_model, operations
from bombus.hive.why.rollouts import rollout_groups
from bombus.hive.why.serving import trainer_of


def chain(hive: Hive, now_ns: int, last: LastEvents, name: str, led_ns: int = 0) -> list[ChainLink] | None:
    """Return what an engine, a run, an episode or a model waits for, or None if nothing has this name.

    The chain leads from what a user sees to the cause. It is empty if nothing is awaited. `led_ns` is the last time at
    which a leader was at work, or 0 if that is unknown.
    """
    is_led = not led_ns or now_ns - led_ns <= OVERDUE_NS
    view = View(hive, now_ns, last, now_ns if is_led else led_ns)
    found = _chain(view, name)
    if is_led or not found:
        return found
    what = f"no coordinator has led{view.lasting(led_ns)}: nothing is being decided, and no deadline is running"
    return [found[0], ChainLink(what, COORDINATOR, led_ns)]


def _chain(view: View, name: str) -> list[ChainLink] | None:
    engines = view.hive.engines
    stem, _, number = name.rpartition("-")
    model = next((each for each in engines.values() if name in each.clients.models), None)
    if name in engines:
        return list(_engine(view, engines[name]))
    if stem in engines and number.isdecimal():
        return _run(view, engines[stem], int(number))
    if model is not None:
        return list(_stopped(view, model)) or list(of_model(view, model, model.clients.models[name]))
    return _episode(view, engines[engine_of(name)], name) if engine_of(name) in engines else None


def _run(view: View, engine: EngineState, run: int) -> list[ChainLink] | None:
    if run == engine.run:
        return list(_engine(view, engine))
    over = f"run {run} of engine {engine.name} is not waiting for anything: run {engine.run} followed it"
    return [ChainLink(over, NOBODY)] if 1 <= run < engine.run else None


def _episode(view: View, engine: EngineState, name: str) -> list[ChainLink] | None:
    """Return what an episode waits for, even after it has ended, or None if no such episode was claimed."""
    closed, batch, (run, _, number) = engine.closed.get(name), engine.batch, name[len(engine.name) + 1 :].partition("-")
    if name in engine.open:
        return list(of_episode(view, engine, engine.open[name]))
    if name in engine.pool:
        what, ended_ns = f"episode {name} has ended, and is waiting in the pool for a batch", engine.pool[name].ended_ns
        return [ChainLink(what, CLIENT, ended_ns), *_engine(view, engine)]
    if batch is not None and any(each.episode == name for group in batch.groups for each in group.episodes):
        what = f"episode {name} has ended, and is in the batch of step {batch.step}"
        return [ChainLink(what, trainer_of(engine), batch.at_ns), *serving.training(view, engine)]
    if closed is None and not (run.isdecimal() and 1 <= int(run) < engine.run and number.isdecimal()):
        return None
    how = (
        f"run {run} is over, with all its episodes"
        if closed is None
        else f"it was aborted ({closed.aborted})"
        if closed.aborted
        else "it ended"
    )
    return [ChainLink(f"episode {name} is not waiting for anything: {how}", NOBODY)]


# ---- engines ------------------------------------------------------------------------------------------------------


def _engine(view: View, engine: EngineState, followed: frozenset[str] = frozenset()) -> Iterator[ChainLink]:
    """Yield what an engine waits for. `followed` contains the engines whose chains have led here."""
    if stopped := list(_stopped(view, engine)):
        yield from stopped
    elif engine.phase == Phase.ROLLING:
        if engine.serves_operations:
            yield from list(operations(view, engine)) or episodes.storage(view, engine)
        elif engine.queues_groups:
            yield from rollout_groups(view, engine)
        else:
            yield from _rolling(view, engine, followed | {engine.name})
    else:
        yield from _PHASES[engine.phase](view, engine)


def _stopped(view: View, engine: EngineState) -> Iterator[ChainLink]:
    """Yield why an engine does nothing at all: it is offline, or its run is suspended."""
    if engine.phase == Phase.OFFLINE:
        yield _offline(view, engine)
        yield from episodes.storage(view, engine)
    elif engine.suspended:
        since_ns = view.last.at_ns(ev.EngineSuspended, engine.name)
        what = f"the run of engine {engine.name} has been suspended{view.lasting(since_ns)}: {engine.suspended}"
        yield ChainLink(f"{what}; {way_on(engine.until_served)}", OPERATOR, since_ns)
        if engine.until_served:
            yield from serving.replicas(view, engine)


def _offline(view: View, engine: EngineState) -> ChainLink:
    name, job, since_ns = engine.name, engine.configured, engine.phase_since_ns
    start = "client.start_engine() or POST /start_engine"
    if engine.batches_from_queue or (
        job is not None and (job.collection.rollout_groups or job.collection.episode_groups)
    ):
        start = "POST /register"
    what = f"engine {name} has not been configured: client.sync_train_config() or creating a model does that"
    if engine.failure:
        what = (
            f"run {engine.run} of engine {name} failed {view.ago(since_ns)}: {engine.failure}; {start} begins the next"
        )
    elif engine.run:
        what = f"run {engine.run} of engine {name} was stopped {view.ago(since_ns)}; {start} begins the next"
    elif job is not None:
        since_ns = job.at_ns
        what = f"engine {name} was configured {view.ago(since_ns)}, and has no run yet; {start} begins one"
    return ChainLink(what, OPERATOR, since_ns)


def _booting(view: View, engine: EngineState) -> Iterator[ChainLink]:
    since_ns = engine.phase_since_ns
    until_ns = view.deadline_ns(since_ns, engine.collection.boot_s)
    what = f"engine {engine.name} has been booting{view.lasting(since_ns)}; its run will be suspended"
    yield ChainLink(f"{what} {view.left(until_ns)} unless it boots by then", trainer_of(engine), since_ns, until_ns)
    if engine.weights is None or not engine.has_policy:
        said = engine.stage not in ("", NO_TRAINER, BOOTED)
        does = f"has been {engine.stage}" if said else "has reported no stage"
        if engine.stage.startswith(LOAD_FAILED):
            does = f"has been trying again to load the model ({engine.stage.removeprefix(LOAD_FAILED)})"
        since_ns = view.last.at_ns(ev.EngineProgressed, engine.name)
        yield from serving.trainer(view, engine, does, since_ns)
    else:
        yield from serving.replicas(view, engine)


def _rolling(view: View, engine: EngineState, followed: frozenset[str]) -> Iterator[ChainLink]:
    """Yield what the next batch of episodes waits for."""
    since_ns = max(engine.phase_since_ns, engine.steps[-1].batch.at_ns if engine.steps else 0)
    head = f"engine {engine.name} is rolling: the batch of step {engine.step + 1}"
    if enough(engine, view.now_ns):
        yield from _complete(view, engine, head, since_ns)
        return
    decides, now = next(each for each in measures(engine, view.now_ns) if each.decides), progress(engine, view.now_ns)
    method = BATCH_METHODS[engine.collection.method]
    what = "clients to agree" if method.is_by_agreement else decides.name
    missing = f"{decides.target - decides.done} of {decides.target} {what}"
    equal = now.tasks - now.non_dummy_tasks if method.needs_signal else 0
    uncounted = f"; {counted(equal, 'complete group')} with equal rewards cannot be in it" if equal else ""
    yield ChainLink(f"{head} has waited{view.lasting(since_ns)} for {missing}{uncounted}", CLIENT, since_ns)
    for rule in _RULES:
        if links := list(rule(view, engine)):
            yield from links
            return
    yield from list(_other_engine(view, engine, followed)) or episodes.unclaimed(view, engine)


_RULES: tuple[Callable[[View, EngineState], Iterator[ChainLink]], ...] = (
    episodes.storage,
    episodes.unserved,
    episodes.agreement,
    episodes.paced,
    episodes.shares,
    episodes.places,
    episodes.cleared,
    episodes.played,
)


def _complete(view: View, engine: EngineState, head: str, since_ns: int) -> Iterator[ChainLink]:
    """Yield what a complete batch waits for before it is sealed. Batches wait only in asynchronous runs."""
    last = last_chances(engine) if engine.collection.max_staleness > 0 else []
    if engine.batch is not None or engine.version < engine.step:
        yield ChainLink(f"{head} is complete, and is waiting for step {engine.step}", trainer_of(engine), since_ns)
        yield from serving.training(view, engine)
        return
    if not last:
        yield ChainLink(f"{head} is complete, and will be sealed next", COORDINATOR, since_ns)
        return
    what = f"{head} is complete, and is waiting for {counted(len(last), 'episode')}"
    end = WaitEnd(view.deadline_ns(held_since_ns(engine), engine.collection.drain_s), "the batch is sealed without it")
    yield ChainLink(f"{what} that would be too old for the batch after it", CLIENT, since_ns, end.until_ns)
    yield from of_episode(view, engine, idlest(last), "the longest idle is ", end)


def _other_engine(view: View, engine: EngineState, followed: frozenset[str]) -> Iterator[ChainLink]:
    """Yield what an engine waits for because its newest claim is for a multi-model episode, which also needs another
    engine."""
    claimed = view.last.of(ev.EpisodeClaimed, engine.name)
    for name in () if claimed is None else sorted(claimed.partners.keys() - followed):
        if not view.hive.engine(name).granting:
            what = f"its newest claim was for multi-model episodes with engine {name}, which is not handing out any"
            yield ChainLink(what, CLIENT)
            yield from _engine(view, view.hive.engine(name), followed)
            return


def _draining(view: View, engine: EngineState) -> Iterator[ChainLink]:
    since_ns, count = engine.phase_since_ns, counted(len(engine.open), "open episode")
    end = WaitEnd(view.deadline_ns(since_ns, engine.collection.drain_s), "the drain will end and abort it")
    what = f"engine {engine.name} is handing out no episodes: the batch of step {engine.step + 1} has waited"
    if not engine.open:
        yield ChainLink(f"engine {engine.name} hands out no episodes until its batch is sealed", COORDINATOR, since_ns)
    else:
        yield ChainLink(f"{what}{view.lasting(since_ns)} for {count}", CLIENT, since_ns, end.until_ns)
        yield from of_episode(view, engine, idlest(engine.open.values()), "the longest idle is ", end)


def _syncing(view: View, engine: EngineState) -> Iterator[ChainLink]:
    since_ns = engine.phase_since_ns
    until = f"step {engine.step} is trained" if engine.batch is not None else f"version {engine.step} is served"
    what = f"engine {engine.name} has handed out no episodes{view.lasting(since_ns)}: it is waiting until {until}"
    yield ChainLink(what, trainer_of(engine), since_ns)
    if waits := list(serving.training(view, engine)):
        yield from waits
        return
    if not BATCH_METHODS[engine.collection.method].is_by_agreement:
        yield ChainLink(f"version {engine.step} is being served, and rolling will start next", COORDINATOR, since_ns)
        return
    until_ns = view.deadline_ns(since_ns, engine.collection.agreed_sync_s)
    what = f"the clients that agreed need time to see this phase, which ends {view.left(until_ns)}"
    yield ChainLink(what, TIME, since_ns, until_ns)


_PHASES: dict[Phase, Callable[[View, EngineState], Iterator[ChainLink]]] = {
    Phase.BOOTING: _booting,
    Phase.ROLLING_POST: _draining,
    Phase.WEIGHT_SYNCING: _syncing,
}
