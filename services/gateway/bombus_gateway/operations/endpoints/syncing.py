"""Sync a model's weights: save them by operations on the model, then have servers load them.

The trainer itself connects to no server, so an interrupted sync may leave a checkpoint behind, but never a half-changed
model.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from weakref import WeakValueDictionary

import msgspec

from bombus.errors import BusUnavailable, Code, Refused
from bombus.hive import inbox
from bombus.hive.bounded import trim
from bombus.hive.operations.owners import owner_of, seen_by
from bombus.hive.operations.state import FOR_SYNC, ClientModel, KeptWeights, kept_id
from bombus.operations import CheckpointKind, CheckpointSaved, Failed, SaveWeights
from bombus_gateway.context import Gateway
from bombus_gateway.operations.endpoints.servers import LOAD_S, EndpointOutcome, Target, given, looked_at, replica_at
from bombus_gateway.operations.listings import path_of, synced_weights
from bombus_gateway.operations.operation_log import OperationLog
from bombus_gateway.operations.results import OperationResults, Waits
from bombus_gateway.operations_wire.dialects import is_tinkers
from bombus_gateway.operations_wire.endpoints import Endpoint, SyncRequest
from bombus_gateway.operations_wire.submission import DEFAULT_MODEL, Submission

log = logging.getLogger(__name__)

SAVE_S = 900.0  # time for the model's earlier operations, and for writing the weights
LOADED_S = 120.0  # time for a replica of the hive to load the base
# Saves kept per model. The second sampler save serves samples that are still being drawn from the previous weights.
KEPT = {CheckpointKind.SAMPLER: 2, CheckpointKind.EXTERNAL: 1}
KEPT_S = {CheckpointKind.SAMPLER: 30 * 86_400.0, CheckpointKind.EXTERNAL: 86_400.0}  # unless another sync follows
REMEMBERED = 1000
NO_NCCL = "NCCL was not used, so master_address, master_port, group_name and buffer_size_mb had no effect."


class SyncReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a sync, with xorl's field names. `num_buckets` is 0, since weights are transferred as files."""

    success: bool
    message: str
    transfer_time: float = 0.0
    total_bytes: int = 0
    num_parameters: int = 0
    num_buckets: int = 0
    endpoints_synced: tuple[EndpointOutcome, ...] = ()


class WeightSync:
    """Runs one engine's syncs at this gateway.

    Syncs of the same model run one after another, and so do loads at the same endpoint. An endpoint that does not
    answer delays only the syncs that include it.
    """

    def __init__(self, gateway: Gateway, operations: OperationLog) -> None:
        self._gateway = gateway
        self._operations = operations
        self._results = OperationResults(gateway, operations)
        self._of_endpoints: WeakValueDictionary[tuple[str, int], asyncio.Lock] = WeakValueDictionary()
        self._of_models: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._saved_here: dict[str, None] = {}  # by path; servers may still be reading other gateways' saves

    async def sync(self, asked: SyncRequest, holder: str, only: Endpoint | None = None) -> SyncReport:
        """Give a model's weights to all of its owner's endpoints, or only to `only`.

        `holder` is the holder of a key, who must be allowed to use the model and the endpoints. Raises `Refused` if no
        endpoint can get the weights.
        """
        model = self._model(asked.model, holder)
        lock = self._of_models.setdefault(model.name, asyncio.Lock())
        async with lock:
            start_s = time.monotonic()
            endpoints = seen_by(self._operations.clients, holder or owner_of(self._operations.clients, model)).endpoints
            targets = await self._targets([Endpoint(each.host, each.port) for each in endpoints.values()], only)
            name = f"synced-{_stamp(time.time())}"
            kinds = self._wanted(model, targets)
            saved = await self._saved(model, name, kinds)
            label = asked.label or f"{model.name}/{name}"
            found = await asyncio.gather(*(self._given(each, saved, label) for each in targets))
            newer = self._newest(model, saved)
            if newer != saved:  # another gateway saved newer weights, which we may have just replaced on the servers
                label = asked.label or f"{model.name}/{max(each.name for each in newer.values())}"
                found = await asyncio.gather(*(self._given(each, newer, label) for each in targets))
            await self._remove_older(model, name, newer)
            sizes = [_of(each, saved) for each, outcome in zip(targets, found, strict=True) if outcome.success]
            return SyncReport(
                success=bool(found) and all(outcome.success for outcome in found),
                message=_message(model, found, bool(endpoints)),
                transfer_time=time.monotonic() - start_s,
                total_bytes=sum(each.size_bytes for each in sizes if each is not None),
                num_parameters=model.parameters,
                endpoints_synced=tuple(found),
            )

    # ---- what, and where ------------------------------------------------------------------------------------------

    def _model(self, name: str, holder: str) -> ClientModel:
        """Return the model to sync. If the client names no model, as xorl's clients usually do not, return the model
        `default` or, if there is none, the only model."""
        if self._operations.state.rest_wanted:
            raise Refused(Code.WRONG_PHASE, "The trainer is asleep, so it has no weights: POST /wake_up first.")
        open_models = seen_by(self._operations.clients, holder).open_models
        models = {model.name: model for model in open_models if not is_tinkers(model.name)}
        if name not in models and name:
            why = f"There is no xorl model {name[:140]} here: create it, or name one of these: {_some(models)}."
            raise Refused(Code.UNKNOWN_MODEL, why)
        found = models.get(name or DEFAULT_MODEL)
        if found is None and len(models) == 1:
            (found,) = models.values()
        if found is None:
            raise Refused(Code.UNKNOWN_MODEL, f"Set model_id to the model to sync, one of these: {_some(models)}.")
        if found.suspended:
            raise Refused(Code.WRONG_PHASE, f"{found.name} cannot be saved now: {found.suspended}")
        return found

    async def _targets(self, endpoints: Sequence[Endpoint], only: Endpoint | None) -> list[Target]:
        """Return the registered servers, or the hive's own replicas if none is registered."""
        if endpoints:
            wanted = [each for each in endpoints if only in (None, each)]
            return list(await asyncio.gather(*(looked_at(self._gateway, each) for each in wanted)))
        if self._operations.state.usable:  # replicas need a moment to load the base of a new run
            await self._operations.until(lambda: bool(self._operations.state.loaded), LOADED_S)
        engine = self._operations.state
        loaded = [engine.replicas[name] for name in sorted(engine.loaded) if name in engine.replicas]
        own = [replica_at(self._gateway, each.url) for each in loaded]
        if not own:
            why = "No inference endpoint is registered, and no replica of the hive has loaded the base"
            raise Refused(Code.NO_REPLICA, f"{why}: call add_inference_endpoint, or wait for a replica.")
        return own

    def _wanted(self, model: ClientModel, targets: Sequence[Target]) -> set[CheckpointKind]:
        """Return the kinds of checkpoint to save: an adapter for our own replicas, a whole model for other servers."""
        usable = [target for target in targets if not target.failure]
        if not usable:
            failures = "; ".join(target.failure for target in targets)
            raise Refused(Code.NO_REPLICA, f"No inference endpoint can be used: {failures}")
        wanted = {CheckpointKind.SAMPLER if each.takes_adapters else CheckpointKind.EXTERNAL for each in usable}
        if model.adapter is None and wanted == {CheckpointKind.SAMPLER}:
            why = f"{model.name} is a full-weight model, but the hive's replicas take only adapters"
            raise Refused(Code.UNSUPPORTED, f"{why}: register an SGLang or vLLM server with add_inference_endpoint.")
        return wanted if model.adapter is not None else {CheckpointKind.EXTERNAL}

    # ---- the weights ----------------------------------------------------------------------------------------------

    async def _saved(
        self, model: ClientModel, name: str, kinds: set[CheckpointKind]
    ) -> dict[CheckpointKind, CheckpointSaved]:
        """Save the weights by operations on the model.

        Both kinds contain the weights of the same step, unless another operation comes between the two saves.
        """
        futures = {}
        for kind in sorted(kinds):
            save = SaveWeights(checkpoint=kind, name=name, ttl_s=KEPT_S[kind], merged=kind is CheckpointKind.EXTERNAL)
            submission = Submission(model=model.name, seq=0, operation=save, metadata=FOR_SYNC)
            futures[kind] = await self._operations.submit(model.session, submission)
        return {kind: await self._outcome(model, future) for kind, future in futures.items()}

    async def _outcome(self, model: ClientModel, future: str) -> CheckpointSaved:
        outcome = await self._results.outcome(future, SAVE_S)
        if isinstance(outcome, CheckpointSaved):
            return outcome
        why = "the outcome is no longer known"
        if isinstance(outcome, Failed):
            why = outcome.error
        elif isinstance(outcome, Waits):
            why = f"the save is still waiting: {outcome.reason}"
        raise Refused(Code.WRONG_PHASE, f"The weights of {model.name} could not be saved: {why}")

    def _newest(
        self, model: ClientModel, saved: dict[CheckpointKind, CheckpointSaved]
    ) -> dict[CheckpointKind, CheckpointSaved]:
        """Return the newest checkpoints, of the kinds in `saved`, that any gateway has saved to sync this model."""
        found = dict(saved)
        for kind, its in saved.items():
            every = [each.noted.saved for each in synced_weights(self._operations.clients, kind, model.name)]
            if every and every[-1].name != its.name and its.name in [each.name for each in every]:
                newest = every[-1]
                found[kind] = CheckpointSaved(
                    checkpoint=kind,
                    name=newest.name,
                    folder=newest.folder,
                    address=newest.address,
                    size_bytes=newest.size_bytes,
                )
        return found

    async def _given(self, target: Target, saved: dict[CheckpointKind, CheckpointSaved], label: str) -> EndpointOutcome:
        found = _of(target, saved)
        if found is None:
            why = target.failure or "It takes only adapters, but this is a full-weight model."
            return EndpointOutcome(target.at.host, target.at.port, False, why)
        lock = self._of_endpoints.setdefault((target.at.host, target.at.port), asyncio.Lock())
        async with lock:
            return await given(target, found, label)

    async def _remove_older(self, model: ClientModel, own: str, given: dict[CheckpointKind, CheckpointSaved]) -> None:
        """Remove those checkpoints from the model's earlier syncs that no server is reading anymore.

        `own` is the name under which this sync saved its checkpoints, and `given` contains the checkpoints that servers
        got last. The newest checkpoints are kept, whichever gateway saved them.
        """
        for kind, count in KEPT.items():
            every = synced_weights(self._operations.clients, kind, model.name)
            self._saved_here.update({path_of(each).id: None for each in every if each.noted.saved.name == own})
            current = {each.noted.saved.name for each in every[-1:]}
            if kind in given:
                current.add(given[kind].name)
            older = [each for each in every if each.noted.saved.name not in current][: max(0, len(every) - count)]
            to_load = self._operations.clients.read_by_waiting()
            for each in filter(self._is_read, older):
                name = each.noted.saved.name
                if kept_id(model.name, kind, name) not in to_load:
                    await self._remove(model, kind, name)
        trim(self._saved_here, REMEMBERED)

    async def _remove(self, model: ClientModel, kind: CheckpointKind, name: str) -> None:
        """Remove a checkpoint made for a sync. If the removal fails, a later sync removes the checkpoint, or it
        expires."""
        remove = inbox.RemoveWeights(
            id=f"remove-{model.name}-{kind}-{name}",
            engine=self._operations.engine,
            model=model.name,
            use=kind,
            name=name,
        )
        try:
            await self._gateway.carry_out(remove)
        except (BusUnavailable, Refused) as error:
            log.warning("%s of model %s could not be removed yet: %s", name, model.name, error)

    def _is_read(self, kept: KeptWeights) -> bool:
        """Return whether the sync that saved a checkpoint has ended. Another gateway's sync counts as ended after
        `LOAD_S`."""
        return path_of(kept).id in self._saved_here or kept.saved_ns < time.time_ns() - LOAD_S * 1e9


def _of(target: Target, saved: dict[CheckpointKind, CheckpointSaved]) -> CheckpointSaved | None:
    """Return the checkpoint in `saved` for a server to load, or None if no checkpoint suits it."""
    if target.failure:
        return None
    return saved.get(CheckpointKind.SAMPLER if target.takes_adapters else CheckpointKind.EXTERNAL)


def _message(model: ClientModel, found: Sequence[EndpointOutcome], are_registered: bool) -> str:
    count = sum(outcome.success for outcome in found)
    if are_registered:
        text = f"{count} of {len(found)} endpoints now have the weights of {model.name}, read from files."
    else:
        text = (
            f"No endpoint is registered, so the hive's own replicas were put in sync: {count} of {len(found)} now have "
            f"the adapter of {model.name}, and /generate without lora_path samples from it."
        )
    failures = "; ".join(f"{each.host}:{each.port}: {each.message}" for each in found if not each.success)
    return " ".join([text, NO_NCCL, *([f"Failed: {failures}"] if failures else [])])


def _stamp(now_s: float) -> str:
    """Return a time, to the millisecond, in a form that can be part of a name."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now_s))}-{int(now_s * 1000) % 1000:03d}"


def _some(names: Sequence[str] | dict[str, ClientModel]) -> str:
    return ", ".join(list(names)[:10]) or "there is none"
