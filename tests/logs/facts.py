"""The content of a golden log as facts that are the same for every version that can read it."""

import json
from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from bombus.hive.events import AnyEvent, BatchReady, EpochOpened, kind_of
from bombus.hive.fold.evolve import evolve
from bombus.hive.state import EngineState, Hive
from bombus.replay.export import calls_of
from bombus.replay.source import Source

FOLDER = Path(__file__).parent
TINY = FOLDER / "0.1.0-tiny.bombuslog"


def recorded(path: Path) -> dict[str, Any]:
    """Return the result of `facts_of` when the log was recorded."""
    facts: dict[str, Any] = json.loads(path.with_suffix(".json").read_text())
    return facts


async def facts_of(source: Source) -> dict[str, Any]:
    """Return everything that must be the same in a later version, which may add other fields to the state."""
    hive, _ = await source.base()
    kinds: Counter[str] = Counter()
    batches: list[Any] = []
    leaders: list[str] = []
    calls = set()
    last = 0
    async for entry in source.events():
        evolve(hive, entry.event)
        kinds[kind_of(entry.event)] += 1
        calls.update(calls_of(entry.event))
        batches += _batch(entry.event)
        leaders += [entry.event.leader] if isinstance(entry.event, EpochOpened) else []
        last = entry.seq
    records = await source.records(sorted(calls, key=lambda ref: ref.seq))
    return {
        "events": last,
        "kinds": dict(sorted(kinds.items())),
        "epoch": hive.epoch,
        "leaders": leaders,
        "engines": {name: _engine(engine) for name, engine in sorted(hive.engines.items())},
        "batches": batches,
        "calls": len(records),
        "sampled_tokens": sum(record.completion_tokens() for record in records),
        "messages": sum(len(record.messages) for record in records),
        "open_episodes": _open(hive),
    }


def _batch(event: AnyEvent) -> list[Any]:
    if not isinstance(event, BatchReady):
        return []
    groups = {group.task: [member.episode for member in group.episodes] for group in event.groups}
    return [{"run": event.run, "step": event.step, "groups": groups}]


def _engine(engine: EngineState) -> dict[str, Any]:
    closed = [(name, each.client, each.outcome.hex(), each.aborted) for name, each in sorted(engine.closed.items())]
    return {
        "phase": engine.phase,
        "failure": engine.failure,
        "run": engine.run,
        "version": engine.version,
        "step": engine.step,
        "model": engine.configured.model if engine.configured is not None else "",
        "method": engine.collection.method,
        "counters": msgspec.to_builtins(engine.counters),
        "pool": list(engine.pool),
        "evals": {str(version): [stats.episodes, stats.reward_sum] for version, stats in sorted(engine.evals.items())},
        "checkpoint_digest": engine.step_done.checkpoint_digest if engine.step_done is not None else "",
        "closed": sha256(json.dumps(closed).encode()).hexdigest(),
    }


def _open(hive: Hive) -> list[str]:
    return sorted(episode for engine in hive.engines.values() for episode in engine.open)
