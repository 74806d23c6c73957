"""`bombus replay what-if`: replay the facts of a run under other rules, to see which batches would have been made, and
when.

Episodes end and clients agree at the recorded times. The coordinator's own rules (`transitions.settle`) turn the
episodes into batches in a hive where nothing takes time: no batch waits for an open episode, and steps and weight loads
are instant, so rolling never stops.
"""

import argparse
from collections.abc import Iterator

import msgspec
from pydantic import TypeAdapter, ValidationError

from bombus.config.job import CollectionMethod
from bombus.hive import events as ev
from bombus.hive.collection import BATCH_METHODS
from bombus.hive.events import AnyEvent, Collection, DropReason, EpisodeType, Method, Weights
from bombus.hive.fold.evolve import evolve, with_calls
from bombus.hive.state import EngineState, Hive, Phase, Replica
from bombus.replay.moments import clock
from bombus.replay.opening import add_source_arguments
from bombus.replay.running import BadUsage, run_on_source
from bombus.replay.source import NotOnLog, Source
from bombus.terminal import say, say_json
from bombus_coordinator.rules.live import Live
from bombus_coordinator.rules.transitions import settle

INSTANT = "instant"  # the name of the trainer and the replica in a hive without time
ROWS_MAX = 40


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch, completed by the log's event at `position`."""

    step: int
    position: int
    at_ns: int
    tasks: int
    episodes: int
    reward: float


class WhatIfResult(msgspec.Struct, kw_only=True):
    """The batches and dropped episodes of a run under one set of rules."""

    rules: Collection
    batches: list[Batch] = []
    dropped: dict[DropReason, int] = {}
    ended: int = 0
    left: int = 0  # episodes in the pool when the log ended

    def note(self, event: AnyEvent, position: int, pool: int) -> None:
        """Count an event. `pool` is the number of episodes that were in the pool before the event."""
        match event:
            case ev.BatchReady():
                rewards = [episode.reward for group in event.groups for episode in group.episodes]
                self.batches.append(
                    Batch(
                        step=event.step,
                        position=position,
                        at_ns=event.at_ns,
                        tasks=len({group.task for group in event.groups}),
                        episodes=len(rewards),
                        reward=sum(rewards) / len(rewards),
                    )
                )
            case ev.GroupDropped():
                self.dropped[event.reason] = self.dropped.get(event.reason, 0) + len(event.episodes)
            case ev.PoolCleared():
                self.dropped[event.reason] = self.dropped.get(event.reason, 0) + pool
            case ev.EpisodeEnded() if event.type == EpisodeType.TRAIN:
                self.ended += len(event.outcomes)
            case _:
                pass


class Instant:
    """One run of an engine in a hive without time, under `rules`."""

    def __init__(self, engine: str, run: int, rules: Collection) -> None:
        # Where nothing takes time, there is nothing to wait for, so clients that have agreed need not see the phase
        # change.
        self.result = WhatIfResult(rules=rules)
        configured = ev.EngineConfigured(
            engine=engine,
            config="{}",
            config_digest="",
            collection=msgspec.structs.replace(rules, agreed_sync_s=0.0),
            model="",
        )
        self._engine = EngineState(name=engine, run=run, phase=Phase.ROLLING, version=0)
        self._engine.configured = self._engine.active = configured
        self._engine.replicas = {INSTANT: Replica(url="", capacity=1, joined_ns=0, run=run, version=0)}
        self._engine.loaded = {INSTANT}
        self._engine.weights = ev.WeightsReady(engine=engine, run=run, version=0, weights=Weights(where=""))
        self._hive = Hive(engines={engine: self._engine})
        self._claimed: dict[str, int] = {}  # open episodes: the policy version when each was claimed

    def apply(self, event: AnyEvent, position: int) -> None:
        """Apply the next event of the log."""
        match event:
            case ev.EpisodeClaimed():
                self._claimed |= dict.fromkeys(event.episodes, self._engine.version)
                return
            case ev.EpisodeAborted():
                for episode in event.episodes:
                    self._claimed.pop(episode, None)
                return
            case ev.EpisodeEnded():
                self._evolve(self._with_simulated_age(event), position)
            case ev.SyncAgreed():
                self._evolve(event, position)
            case _:
                return
        live = Live(now_ns=event.at_ns, led_until_ns=event.at_ns)
        while self._settled(live, position):
            self._train(event.at_ns, position)
        self.result.left = len(self._engine.pool)

    def _with_simulated_age(self, event: ev.EpisodeEnded) -> ev.EpisodeEnded:
        """Return the event, changed as if its tokens had been sampled from the version that this hive had when the
        episode was claimed."""
        outcomes = tuple(
            msgspec.structs.replace(outcome, oldest=self._claimed.pop(outcome.episode, self._engine.version))
            for outcome in event.outcomes
        )
        return msgspec.structs.replace(event, outcomes=outcomes)

    def _settled(self, live: Live, position: int) -> bool:
        """Make all transitions that are due. Return whether there is a batch to train on."""
        for decision in settle(self._engine, live):
            for event in decision.events:
                self._evolve(event, position)
        return self._engine.batch is not None

    def _train(self, at_ns: int, position: int) -> None:
        name, run, step = self._engine.name, self._engine.run, self._engine.step
        self._evolve(
            ev.StepCompleted(
                at_ns=at_ns, engine=name, run=run, step=step, trainer_epoch=0, checkpoint="", checkpoint_digest=""
            ),
            position,
        )
        weights = Weights(where="")
        self._evolve(ev.WeightsReady(at_ns=at_ns, engine=name, run=run, version=step, weights=weights), position)
        self._evolve(ev.WeightsLoaded(at_ns=at_ns, engine=name, run=run, version=step, replica=INSTANT), position)

    def _evolve(self, event: ev.Event, position: int) -> None:
        self.result.note(event, position, len(self._engine.pool))  # type: ignore[arg-type]  # it is one of them
        evolve(self._hive, event)


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    engine: str
    run: int
    began_ns: int
    was: WhatIfResult
    would_be: WhatIfResult


async def compare(source: Source, engine: str, run: int | None, changes: dict[str, object]) -> Compared:
    """Compare a run (by default the last one) with the same run under rules with these `changes`.

    Raises `NotOnLog` if there is no such run or the log no longer reaches back to the run's start, and `BadUsage` for
    rules that engines do not accept.
    """
    wanted = run if run is not None else await _last_run(source, engine)
    found: Compared | None = None
    instant: Instant | None = None
    hive, _ = await source.base()
    async for entry in source.events():
        event = entry.event
        if event.engine != engine:
            continue
        if isinstance(event, ev.EngineStarted) and event.run == wanted:
            evolve(hive, event)
            rules = hive.engine(engine).collection
            instant = Instant(engine, wanted, _changed(rules, changes))
            found = Compared(
                engine=engine, run=wanted, began_ns=event.at_ns, was=WhatIfResult(rules=rules), would_be=instant.result
            )
        elif instant is None or found is None:
            evolve(hive, event)
        elif getattr(event, "run", wanted) == wanted:
            if isinstance(event, ev.EpisodeEnded):
                event = with_calls(hive, event)
            found.was.note(event, entry.seq, len(hive.engine(engine).pool))
            evolve(hive, event)
            found.was.left = len(hive.engine(engine).pool)
            instant.apply(event, entry.seq)
        elif isinstance(event, ev.EngineStarted):
            break
    if found is None:
        raise NotOnLog(f"the start of run {wanted} of engine {engine} is not in {source.title}")
    return found


def _changed(rules: Collection, changes: dict[str, object]) -> Collection:
    changed = msgspec.structs.replace(rules, **changes)
    if changed.max_staleness > 0 and BATCH_METHODS[changed.method].is_by_agreement:
        raise BadUsage(f"{changed.method} needs --max-staleness 0: agreement cannot stop an asynchronous engine")
    return changed


async def _last_run(source: Source, engine: str) -> int:
    run = (await source.base())[0].engine(engine).run
    async for entry in source.events():
        if isinstance(entry.event, ev.EngineStarted) and entry.event.engine == engine:
            run = entry.event.run
    if run == 0:
        raise NotOnLog(f"engine {engine} has never been started in {source.title}")
    return run


# ---- the command ------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    more = (__doc__ or "").partition("\n\n")[2].replace("\n", " ").replace("`", "")
    parser.description = f"{parser.description} {more}"
    parser.add_argument(
        "--method", metavar="NAME", help=f"one of {', '.join(Method)} (default for all rules: the run's own)"
    )
    parser.add_argument("--batch-size", type=int, metavar="N", help="how many tasks a batch has")
    parser.add_argument("--num-repeat", type=int, metavar="N", help="how many episodes each task has")
    parser.add_argument(
        "--max-staleness", type=int, metavar="N", help="maximum age of a sample, in policy versions; 0: synchronous"
    )
    parser.add_argument(
        "--max-carry-staleness",
        type=int,
        metavar="N",
        help="how many policy versions an episode may wait when training is synchronous",
    )
    parser.add_argument("--max-pool-episodes", type=int, metavar="N", help="episodes above which the pool is cleared")
    parser.add_argument("--engine", default="main", metavar="NAME", help="the engine (default: %(default)s)")
    parser.add_argument(
        "--run", type=int, metavar="R", help="the number of the run (default: the last)", dest="which_run"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    add_source_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    return run_on_source("bombus replay what-if", _show, arguments)


async def _show(source: Source, arguments: argparse.Namespace) -> None:
    compared = await compare(source, arguments.engine, arguments.which_run, _changes(arguments))
    if arguments.json:
        say_json(msgspec.to_builtins(compared))
    else:
        say(*render(compared))


def _changes(arguments: argparse.Namespace) -> dict[str, object]:
    """Return the rules given as options. Raises `BadUsage` if an option's value is invalid."""
    changes: dict[str, object] = {}
    if arguments.method is not None:
        try:
            changes["method"] = TypeAdapter(CollectionMethod).validate_python(arguments.method)
        except ValidationError:
            known = ", ".join(Method)
            raise BadUsage(f"there is no method {arguments.method!r}: use one of {known}") from None
    for name in ("batch_size", "num_repeat", "max_staleness", "max_carry_staleness", "max_pool_episodes"):
        value = getattr(arguments, name)
        least = 0 if name.endswith("staleness") else 1
        if value is not None and value < least:
            raise BadUsage(f"--{name.replace('_', '-')} is {value}, but must be at least {least}")
        if value is not None:
            changes[name] = value
    return changes


def render(compared: Compared) -> Iterator[str]:
    """Yield the lines that show both results, one after the other."""
    yield f"run {compared.run} of engine {compared.engine}, since {clock(compared.began_ns)}"
    yield ""
    yield from _render("as it was", compared.was, compared.began_ns)
    yield ""
    yield from _render("as it would have been if nothing had taken any time", compared.would_be, compared.began_ns)


def _render(title: str, result: WhatIfResult, began_ns: int) -> Iterator[str]:
    rules = result.rules
    yield f"{title}: {rules.method}, {rules.batch_size} tasks x {rules.num_repeat}"
    if result.batches:
        yield "   step  after s     event  tasks  episodes   reward"
    shown = result.batches if len(result.batches) <= ROWS_MAX else result.batches[: ROWS_MAX - 1]
    for batch in shown:
        after_s = (batch.at_ns - began_ns) / 1e9
        yield (
            f"  {batch.step:5}  {after_s:7.1f}  {batch.position:8}  {batch.tasks:5}  {batch.episodes:8}  "
            f"{batch.reward:7.4f}"
        )
    if len(shown) < len(result.batches):
        yield f"  ... and {len(result.batches) - len(shown)} more; --json has them all"
    used = sum(batch.episodes for batch in result.batches)
    dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(result.dropped.items())) or "none"
    yield (
        f"  {len(result.batches)} batches; of {result.ended} ended episodes {used} in batches, "
        f"{result.left} left over, dropped: {dropped}"
    )
