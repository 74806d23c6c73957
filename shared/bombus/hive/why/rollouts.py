"""What a batch of rollout groups waits for."""

from collections.abc import Iterator

from bombus.hive import events as ev
from bombus.hive.loading import all_loaded
from bombus.hive.state import EngineState
from bombus.hive.trajectories.forming import form, lacking, minimums
from bombus.hive.trajectories.queue_status import stranded
from bombus.hive.why import episodes, serving
from bombus.hive.why.links import ChainLink, View

OUTSIDE = "the outside trainer"
ENVIRONMENTS_SHOWN = 3


def rollout_groups(view: View, engine: EngineState) -> Iterator[ChainLink]:
    """Yield what an engine waits for if its batches are formed from a queue of rollout groups."""
    state, queue, ours = engine.trajectories, engine.trajectories.queue, engine.makes_steps
    handed_ns = 0 if state.batch is None else state.batch.handed_ns
    since_ns = max(engine.phase_since_ns, engine.steps[-1].batch.at_ns if ours and engine.steps else handed_ns)
    queued = f"{queue.sequences} of {queue.batch_size} sequences are queued"
    head = f"engine {engine.name} has waited{view.lasting(since_ns)} for"
    if ours and state.trainer is not None and engine.version >= state.trainer.num_steps:
        what = f"engine {engine.name} has made its last step, {state.trainer.num_steps} (num_steps)"
        yield ChainLink(what, "a client that registers again", since_ns)
    elif ours and (engine.batch is not None or engine.version < engine.step or not all_loaded(engine)):
        yield ChainLink(f"{head} step {engine.step}; for the next batch {queued}", serving.trainer_of(engine), since_ns)
        yield from serving.training(view, engine)
    elif not ours and state.batch is not None and not state.batch.delivered:
        what = f"batch {state.batch.number} of engine {engine.name} was handed out {view.ago(handed_ns)}"
        yield ChainLink(f"{what}, but was not delivered: the next request will get it again", OUTSIDE, handed_ns)
    elif form(queue) is not None:
        yield ChainLink(f"{head} {OUTSIDE} to ask for a batch; one is complete", OUTSIDE, since_ns)
    else:
        yield ChainLink(f"{head} a batch: {queued}", "an environment", since_ns)
        yield from _too_few(view, engine)


def _too_few(view: View, engine: EngineState) -> Iterator[ChainLink]:
    """Yield why too few groups are queued for a batch, or why no selection of them makes up a batch."""
    state = engine.trajectories
    connected = [each for each in state.queue.environments.values() if each.connected]
    short = [state.queue.environments[each] for each in lacking(state.queue, minimums(state.queue))] or connected
    names = ", ".join(f"environment {each.id} ({each.name})" for each in short[:ENVIRONMENTS_SHOWN])
    if full := list(episodes.storage(view, engine)):
        yield from full
    elif reasons := stranded(state.queue):
        yield ChainLink(reasons[0], names or "an environment")
    elif engine.plays_episodes:
        rules = (episodes.unserved, episodes.paced, episodes.places, episodes.played, episodes.unclaimed)
        yield from next(filter(None, (list(rule(view, engine)) for rule in rules)))
    elif not engine.makes_steps and not state.begun:
        what = f"environments cannot join before {OUTSIDE} asks for its first batch"
        yield ChainLink(what, OUTSIDE, engine.phase_since_ns)
    elif connected:
        more = f" and {len(connected) - ENVIRONMENTS_SHOWN} more" if len(connected) > ENVIRONMENTS_SHOWN else ""
        pushed_ns = max(state.heard_ns.get(each.id, 0) for each in connected)
        yield ChainLink(f"{names}{more} last joined or pushed a group {view.ago(pushed_ns)}", names, pushed_ns)
    else:
        left_ns = view.last.at_ns(ev.EnvironmentLeft, engine.name)
        since = f"; the last one left {view.ago(left_ns)}" if left_ns else ""
        yield ChainLink(f"no environment is connected{since}", "an environment", left_ns)
