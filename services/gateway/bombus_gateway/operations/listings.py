"""Find models and checkpoints in the folded state, and list them in the form that clients expect."""

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import TypeVar

from bombus.errors import Code, Refused
from bombus.hive.events import AdapterShape, WeightsKept
from bombus.hive.operations.owners import may_read, may_use, seen_model, seen_session
from bombus.hive.operations.state import ClientModel, KeptWeights, TrainingClients, TrainingSession, kept_id
from bombus.operations import AdapterPart, AdapterSpec, CheckpointKind
from bombus_gateway.operations_wire.dialects import TrainingDialect, is_tinkers
from bombus_gateway.operations_wire.paths import CheckpointPath

PAGE_MAX = 1000
UNMARKED = re.compile(r"synced-(\d{8}-\d{6})-\d{3}")  # names of saves for a sync made before such saves were marked
UNMARKED_S = 3600.0  # longest delay between the time in such a name and the save
CLOCKS_S = 60.0  # allowed difference between the clocks of a gateway and the bus

_T = TypeVar("_T")


def path_of(kept: KeptWeights) -> CheckpointPath:
    saved = kept.noted.saved
    return CheckpointPath(kept.noted.model, CheckpointKind(saved.use), saved.name)


def found_checkpoint(clients: TrainingClients, path: CheckpointPath, holder: str) -> KeptWeights:
    """Return a saved model. Raises `Refused` UNKNOWN_MODEL if there is none that the holder of a key may read."""
    kept = clients.kept.get(kept_id(path.model, path.kind, path.name))
    if kept is None or not may_read(kept, holder):
        raise no_checkpoint(path)
    return kept


def own_checkpoint(clients: TrainingClients, path: CheckpointPath, holder: str) -> KeptWeights:
    """Return a saved model. Raises `Refused` UNKNOWN_MODEL if there is none that the holder of a key may change or
    remove."""
    kept = found_checkpoint(clients, path, holder)
    if not may_use(kept.noted.owner, holder):
        raise no_checkpoint(path)
    return kept


def no_checkpoint(path: CheckpointPath) -> Refused:
    return Refused(Code.UNKNOWN_MODEL, f"There is no checkpoint {path.id} of {path.model}, or it is gone.")


def synced_weights(clients: TrainingClients, kind: CheckpointKind, model: str = "") -> list[KeptWeights]:
    """Return the weights that were saved to sync servers, newest last: those of one model, or those of all xorl
    models."""
    return [
        kept
        for kept in clients.kept.values()
        if kept.noted.saved.use == kind
        and model in ("", kept.noted.model)
        and not is_tinkers(kept.noted.model)
        and is_for_sync(kept)
    ]


def is_for_sync(kept: KeptWeights) -> bool:
    """Return whether a model was saved to sync servers, possibly by a gateway that did not mark such saves.

    An unmarked save counts if the time in its name roughly matches the time when it was saved, and no client has since
    given it a lifetime or metadata, or published it.
    """
    saved = kept.noted.saved
    named = UNMARKED.fullmatch(saved.name)
    if kept.is_for_sync or named is None:
        return kept.is_for_sync
    if saved.use == CheckpointKind.TRAINING or kept.until_ns or kept.noted.metadata or kept.noted.public:
        return False
    first, last = (_second_of(kept.saved_ns / 1e9 + after_s) for after_s in (-UNMARKED_S, CLOCKS_S))
    return first <= named[1] <= last


def _second_of(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y%m%d-%H%M%S")


def found_model(clients: TrainingClients, name: str, holder: str) -> ClientModel:
    """Return a model, even if it has ended. Raises `Refused` UNKNOWN_MODEL if the holder of a key has no such model."""
    model = seen_model(clients, name, holder)
    if model is None:
        raise Refused(Code.UNKNOWN_MODEL, f"There is no model {name[:100]} here, or it is gone.")
    return model


def found_session(clients: TrainingClients, name: str, holder: str) -> TrainingSession:
    """Return a session, even if it has ended. Raises `Refused` UNKNOWN_SESSION if the holder of a key has no such
    session."""
    session = seen_session(clients, name, holder)
    if session is None:
        raise Refused(Code.UNKNOWN_SESSION, f"There is no session {name[:100]} here, or it is gone.")
    return session


def checkpoint_entry(kept: KeptWeights) -> dict[str, object]:
    noted, path = kept.noted, path_of(kept)
    dialect = TrainingDialect.TINKER if is_tinkers(noted.model) else TrainingDialect.XORL
    return {
        "checkpoint_id": path.id,
        "checkpoint_type": noted.saved.use,
        "time": iso_time(kept.saved_ns),
        "tinker_path": path.uri(TrainingDialect.TINKER),
        "path": path.uri(dialect),
        "size_bytes": noted.saved.size_bytes,
        "public": noted.public,
        "user_metadata": noted.metadata or None,
        "expires_at": iso_time(kept.until_ns) if kept.until_ns else None,
    }


def checkpoints_of(clients: TrainingClients, model: str = "") -> list[dict[str, object]]:
    """Return the checkpoints of one model, or of all models, newest first."""
    wanted = [kept for kept in clients.kept.values() if model in ("", kept.noted.model)]
    return [checkpoint_entry(kept) for kept in reversed(wanted)]


def run_entry(clients: TrainingClients, model: ClientModel) -> dict[str, object]:
    """Return a model in the form of a Tinker training run."""
    session = clients.sessions.get(model.session)
    newest = {kept.noted.saved.use: kept for kept in clients.kept.values() if kept.noted.model == model.name}
    training, sampler = newest.get(CheckpointKind.TRAINING), newest.get(CheckpointKind.SAMPLER)
    return {
        "training_run_id": model.name,
        "base_model": model.base,
        "model_owner": "" if session is None else session.owner,
        "is_lora": model.adapter is not None,
        "lora_rank": None if model.adapter is None else model.adapter.rank,
        "corrupted": False,
        "last_request_time": iso_time(model.last_ns),
        "user_metadata": model.metadata or None,
        "last_checkpoint": checkpoint_entry(training) if training else None,
        "last_sampler_checkpoint": checkpoint_entry(sampler) if sampler else None,
    }


def weights_entry(of: WeightsKept | ClientModel) -> dict[str, object]:
    return {"base_model": of.base, "optimizer_config": {"type": "adamw"}, **lora_fields(of.adapter)}


def has_adapter(model: ClientModel, wanted: AdapterSpec | None) -> bool:
    """Return whether a model has the adapter that its client wants (None for no adapter), ignoring the seed."""
    shape = model.adapter
    if shape is None or wanted is None:
        return shape is None and wanted is None
    has_parts = bool(shape.targets) or set(shape.parts) == set(wanted.parts)
    return (
        has_parts
        and set(shape.targets) == set(wanted.targets)
        and (shape.rank, shape.alpha) == (wanted.rank, wanted.alpha)
    )


def lora_fields(adapter: AdapterShape | None) -> dict[str, object]:
    if adapter is None:
        return {"is_lora": False}
    return {
        "is_lora": True,
        "lora_rank": adapter.rank,
        "lora_config": {"rank": adapter.rank, "alpha": adapter.alpha, "target_modules": list(adapter.targets) or None},
        "train_attn": AdapterPart.ATTENTION in adapter.parts,
        "train_mlp": AdapterPart.MLP in adapter.parts,
        "train_unembed": AdapterPart.UNEMBEDDING in adapter.parts,
    }


def page(entries: Iterable[_T], query: Mapping[str, str]) -> tuple[list[_T], dict[str, int]]:
    """Return the entries selected by a query's `limit` and `offset`, and the cursor that Tinker's client expects."""
    every = list(entries)
    limit, offset = _number(query, "limit", 100), _number(query, "offset", 0)
    limit = min(limit, PAGE_MAX)
    return every[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(every)}


def _number(query: Mapping[str, str], name: str, otherwise: int) -> int:
    given = query.get(name, str(otherwise))
    if not given.isascii() or not given.isdigit():
        raise Refused(Code.MALFORMED, f"{name} is {given[:40]!r}, but must be a number of 0 or more.")
    return int(given[:9])


def iso_time(at_ns: int) -> str:
    return datetime.fromtimestamp(at_ns / 1e9, UTC).isoformat()
