"""Samplers: which weights a sampling session uses.

A sampler's id identifies its weights, so every gateway knows them, even after a restart. `S:sample:0:base-DIGEST` names
a base by the beginning of its path's digest, and `S:sample:0:ADDRESS` names a checkpoint by the beginning of its
address; neither can change. `S:sample:0` was begun by an unnamed save, and the name of that save contains the same
number.
"""

from collections.abc import Iterable, Sequence

import msgspec

from bombus.errors import Code, Refused
from bombus.hive.operations.owners import may_read, seen_by
from bombus.hive.operations.state import KeptWeights, TrainingClients
from bombus.hive.records import digest
from bombus.hive.state import EngineState, Phase
from bombus.operations import CheckpointKind
from bombus_gateway.operations.bases import base_names
from bombus_gateway.operations.listings import found_checkpoint, is_for_sync, path_of, synced_weights
from bombus_gateway.operations_wire.checkpoints import INFLIGHT_SAMPLE, UNNAMED_SAMPLE
from bombus_gateway.operations_wire.dialects import OF_SAMPLE, TrainingDialect, is_tinkers, session_of
from bombus_gateway.operations_wire.paths import CheckpointPath, read_path
from bombus_gateway.operations_wire.sampling import SamplingSession

BASE = "base"
ADDRESS_CHARACTERS = 24
MARK_CHARACTERS = 16


class Sampler(msgspec.Struct, frozen=True):
    """Weights to sample from: the base of a run and, optionally, the adapter of a checkpoint."""

    base: str
    checkpoint: CheckpointPath | None = None
    address: str = ""
    folder: str = ""


def begun_sampler(engine: EngineState, asked: SamplingSession, holder: str) -> tuple[str, Sampler]:
    """Return the id of a new sampler, and its weights. Raises `Refused` if there are no such weights."""
    if asked.checkpoint is not None:
        sampler = _of_checkpoint(engine, found_checkpoint(engine.clients, asked.checkpoint, holder))
        return f"{asked.id}:{sampler.address[:ADDRESS_CHARACTERS]}", sampler
    sampler = _of_base(engine, asked.base)
    return f"{asked.id}:{_base_mark(sampler.base)}", sampler


def sampled_base(engine: EngineState, asked: SamplingSession, holder: str) -> str:
    """Return the base that a new sampler needs. Raises `Refused` if the sampler's checkpoint is unknown or has no
    adapter."""
    if asked.checkpoint is None:
        return asked.base
    kept = found_checkpoint(engine.clients, asked.checkpoint, holder)
    _check_adapter(kept)
    return kept.noted.base


def found_sampler(engine: EngineState, name: str, holder: str) -> Sampler:
    """Return the weights of the sampler with this id, if the holder of a key may read them.

    Raises `Refused` UNKNOWN_MODEL if there are no such weights, or another code if replicas cannot sample from them.
    """
    session, _, numbered = name.rpartition(OF_SAMPLE)
    number, _, what = numbered.partition(":")
    if what.startswith(BASE) and session:
        return _of_marked_base(engine, what)
    kept = [each for each in engine.clients.kept.values() if may_read(each, holder)]
    if what:
        found = [each for each in kept if len(what) == ADDRESS_CHARACTERS and each.noted.saved.address.startswith(what)]
    else:
        found = [each for each in kept if session_of(each.noted.model) == session and _is_unnamed(each, number)]
    # Among checkpoints with equal weights, prefer one that was saved for samplers.
    first = min(found, key=lambda each: each.noted.saved.use != CheckpointKind.SAMPLER, default=None)
    if first is None:
        raise Refused(
            Code.UNKNOWN_MODEL, f"There is no sampler {name[:300]} here, or its checkpoint was removed; create one."
        )
    if not what and first.noted.saved.name.startswith(INFLIGHT_SAMPLE):
        first = _newest_inflight(kept, first)
    return _of_checkpoint(engine, first)


def named_sampler(engine: EngineState, name: str, holder: str) -> Sampler:
    """Return the weights that xorl's client calls `name`, which is the path of a checkpoint or the name under which it
    was saved.

    A name refers to the client's newest checkpoint with that name, preferably one saved for sampling. Without a name,
    the weights are those of the adapter synced last in this run, or else the base. Raises `Refused` if there is no such
    checkpoint, or if several models have one with that name.
    """
    clients = seen_by(engine.clients, holder)
    if not name:
        synced = [each for each in synced_weights(clients, CheckpointKind.SAMPLER) if _is_of_run(engine, each)]
        return _of_checkpoint(engine, synced[-1]) if synced else _of_base(engine, "")
    if "/" in name:
        return _of_checkpoint(engine, found_checkpoint(engine.clients, read_path(name), holder))
    named = [
        each for each in clients.kept.values() if each.noted.saved.name == name and not is_tinkers(each.noted.model)
    ]
    samplers = [each for each in named if each.noted.saved.use == CheckpointKind.SAMPLER] or named
    if not samplers:
        raise Refused(Code.UNKNOWN_MODEL, f"There is no checkpoint {name[:140]} here, or it is gone.")
    return _of_checkpoint(engine, _of_one_model(clients, samplers))


def _of_one_model(clients: TrainingClients, named: Sequence[KeptWeights]) -> KeptWeights:
    """Return the newest of several checkpoints with the same name.

    If the checkpoints have different weights and belong to several models, return the newest one of the only model that
    is open; raise `Refused` unless exactly one of the models is open.
    """
    if len({each.noted.saved.address for each in named}) > 1 and len({each.noted.model for each in named}) > 1:
        names = {model.name for model in clients.open_models}
        of_open = [each for each in named if each.noted.model in names]
        if len({each.noted.model for each in of_open}) != 1:
            models = ", ".join(dict.fromkeys(each.noted.model for each in named))
            path = path_of(named[-1]).uri(TrainingDialect.XORL)
            raise Refused(
                Code.MALFORMED,
                f"Several models have a checkpoint {named[-1].noted.saved.name}: {models[:300]}. Give its path as "
                f"lora_path, such as {path}, or save each under its own name.",
            )
        named = of_open
    return named[-1]


def _is_of_run(engine: EngineState, kept: KeptWeights) -> bool:
    return engine.phase != Phase.OFFLINE and kept.noted.run == engine.run


def _is_unnamed(kept: KeptWeights, number: str) -> bool:
    saved = kept.noted.saved
    return saved.use == CheckpointKind.SAMPLER and saved.name in (UNNAMED_SAMPLE + number, INFLIGHT_SAMPLE + number)


def _newest_inflight(every: Iterable[KeptWeights], one: KeptWeights) -> KeptWeights:
    """Return a model's inflight save with the highest number. The samplers of all the model's inflight saves use its
    weights."""
    of_model = (each for each in every if each.noted.model == one.noted.model)
    return max((one, *of_model), key=_inflight_number)


def _inflight_number(kept: KeptWeights) -> int:
    """Return the number of an inflight save, or -1 for any other checkpoint."""
    saved = kept.noted.saved
    number = saved.name.removeprefix(INFLIGHT_SAMPLE)
    is_one = saved.use == CheckpointKind.SAMPLER and number != saved.name and number.isdecimal()
    return int(number) if is_one else -1


def _base_mark(base: str) -> str:
    """Return the part of a sampler's id that identifies its base."""
    return f"{BASE}-{digest(base.encode()).hex()[:MARK_CHARACTERS]}"


def _of_marked_base(engine: EngineState, mark: str) -> Sampler:
    sampler = _of_base(engine, "")
    if mark not in (BASE, _base_mark(sampler.base)):  # earlier gateways used the plain word for every base
        why = f"This sampler's base differs from the current base of engine {engine.name}, {sampler.base}"
        raise Refused(Code.UNKNOWN_MODEL, f"{why}: create another sampler.")
    return sampler


def _of_base(engine: EngineState, wanted: str) -> Sampler:
    names = base_names(engine)
    if not names or (wanted and wanted not in names):
        here = f"Engine {engine.name} has {names[0]}" if names else f"Engine {engine.name} has no model yet"
        why = f"{here}, not {wanted[:200]}: to start a free engine with that base, create a model on it."
        raise Refused(Code.UNKNOWN_MODEL, why)
    return Sampler(names[0])


def _check_adapter(kept: KeptWeights) -> None:
    """Raise `Refused` unless replicas can sample from a checkpoint, which must be an adapter."""
    noted = kept.noted
    if noted.adapter is None:
        why = f"{path_of(kept).id} contains all weights of its model, but only adapters can be sampled from here."
        raise Refused(
            Code.UNSUPPORTED,
            f"{why} Train an adapter (rank 1 or more) to sample from it, or put an inference server elsewhere in sync "
            "with the model (sync_inference_weights), and sample from that.",
        )
    if noted.saved.use == CheckpointKind.EXTERNAL and is_for_sync(kept):
        why = f"{path_of(kept).id} is a whole model for external inference servers: sample from those."
        raise Refused(Code.UNSUPPORTED, why)


def _of_checkpoint(engine: EngineState, kept: KeptWeights) -> Sampler:
    _check_adapter(kept)
    noted, started = kept.noted, engine.started
    if engine.phase != Phase.OFFLINE and started is not None and noted.base not in (started.base, *base_names(engine)):
        why = f"{path_of(kept).id} is an adapter on {noted.base}, but engine {engine.name} now runs {started.base}."
        raise Refused(Code.UNKNOWN_MODEL, why)
    return Sampler(noted.base, path_of(kept), noted.saved.address, noted.saved.folder)
