"""What a run needs from its trainer and its replicas, and waits for."""

from collections.abc import Iterator

from bombus.figures import counted, duration
from bombus.hive import events as ev
from bombus.hive.describe import why_quarantined
from bombus.hive.loading import awaited, loading_since_ns
from bombus.hive.state import EngineState, Phase
from bombus.hive.status.detail import no_trainer
from bombus.hive.why.links import OPERATOR, ChainLink, View

QUARANTINED_SHOWN = 3


def trainer_of(engine: EngineState) -> str:
    return f"trainer {engine.trainer}" if engine.trainer else "a trainer"


def trainer(view: View, engine: EngineState, does: str, since_ns: int) -> Iterator[ChainLink]:
    """Yield why the trainer has not finished: there is no trainer, the trainer's step has failed, or the trainer is
    still at work.

    `does` is a clause that says what the trainer has been doing since `since_ns`.
    """
    who, failed, stalled = trainer_of(engine), view.last.of(ev.StepFailed, engine.name), engine.stalled
    if not engine.trainer:
        since_ns = engine.phase_since_ns if stalled is None else stalled.at_ns
        never = f"no trainer has opened run {engine.run} of engine {engine.name}{view.lasting(since_ns)}"
        yield ChainLink(no_trainer(engine, view.now_ns) or never, who, since_ns)
    elif failed is not None and not failed.failures and (failed.run, failed.step) == (engine.run, engine.step):
        what = f"{who} is waiting for disk space, and last tried {view.ago(failed.at_ns)}"
        yield ChainLink(f"{what}: {failed.reason}", OPERATOR, failed.at_ns)
    elif engine.step_failures and failed is not None and (failed.run, failed.step) == (engine.run, engine.step):
        yield ChainLink(
            f"step {failed.step} has failed {counted(engine.step_failures, 'time')}, the last {view.ago(failed.at_ns)} "
            f"because: {failed.reason}; {who} will try again, and {engine.collection.max_step_failures} failures in a "
            "row suspend the run",
            who,
            failed.at_ns,
        )
    else:
        since_ns, patience = max(since_ns, engine.trainer_since_ns), engine.trainer_patience_s
        silent = f"; it will be replaced if it gives no sign of life for {duration(patience)}" if patience else ""
        yield ChainLink(f"{who} {does}{view.lasting(since_ns)}{silent}", who, since_ns)


def training(view: View, engine: EngineState) -> Iterator[ChainLink]:
    """Yield what a run is waiting for once a batch has been sealed: the training step, the publication of its weights,
    or replicas that have yet to load them."""
    done = engine.step_done
    if engine.batch is not None:
        yield from trainer(view, engine, f"has had step {engine.batch.step} pending", engine.batch.at_ns)
    elif engine.version < engine.step and done is not None:
        what = f"step {done.step} was completed {view.ago(done.at_ns)}, and its weights have not been published yet"
        yield ChainLink(what, trainer_of(engine), done.at_ns)
        yield from trainer(view, engine, f"has had the weights of step {done.step} to publish", done.at_ns)
    else:
        yield from replicas(view, engine)


def replicas(view: View, engine: EngineState) -> Iterator[ChainLink]:
    """Yield which replicas do not serve the newest weights yet, and why."""
    loading = awaited(engine) if engine.loaded else list(engine.usable)
    if loading and engine.weights is not None:
        yield _loading(view, engine, loading)
        return
    quarantined = [each.quarantined for each in engine.replicas.values() if each.quarantined is not None]
    names = " or ".join(why.replica for why in quarantined[:QUARANTINED_SHOWN])
    for why in quarantined[:QUARANTINED_SHOWN]:
        what = f"replica {why.replica} has been quarantined{view.lasting(why.at_ns)}: {why_quarantined(why)}"
        yield ChainLink(what, f"replica {names}, or the operator, with `bombus resume`", why.at_ns)
    if not engine.replicas:
        left = view.last.of(ev.ReplicaLeft, engine.name)
        gone = f": replica {left.replica} left {view.ago(left.at_ns)} ({left.reason})" if left is not None else ""
        since_ns = engine.phase_since_ns if left is None else left.at_ns
        yield ChainLink(f"engine {engine.name} has no replica{gone}", "a replica", since_ns)


def _loading(view: View, engine: EngineState, names: list[str]) -> ChainLink:
    """Return the link for replicas that are loading. Slow replicas are quarantined, except while the run boots."""
    since_ns, name = min((loading_since_ns(engine, engine.replicas[name]), name) for name in names)
    until_ns = view.deadline_ns(since_ns, engine.collection.sync_s)
    then = f"; it will be quarantined {view.left(until_ns)} unless it does"
    if engine.phase == Phase.BOOTING and not engine.loaded:
        then, until_ns = "", view.deadline_ns(engine.phase_since_ns, engine.collection.boot_s)
    more = f", as has {counted(len(names) - 1, 'other')}" if len(names) > 1 else ""
    loading = f"replica {name} has had version {engine.version} to load{view.lasting(since_ns)}{more}"
    return ChainLink(f"{loading}{then}", f"replica {name}", since_ns, until_ns)
