"""Execute training operations: here models, their optimizers and their checkpoints meet. It does not know the bus."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import assert_never

import torch

from bombus.errors import Code, EngineFault, Refused, in_one_line
from bombus.operations import (
    AbortEpoch,
    AdapterSpec,
    Category,
    CheckpointKind,
    CheckpointLoaded,
    CheckpointSaved,
    CreateModel,
    EndModel,
    EpochAborted,
    Failed,
    ForwardBackward,
    LoadWeights,
    ModelEnded,
    ModelReady,
    Operation,
    OptimStep,
    Rejected,
    Result,
    SaveWeights,
    Scores,
    StepTaken,
)
from bombus.weights.models import hub_name, load_tokenizer_files
from bombus_trainer.backend import BackendLost
from bombus_trainer.backends.torch.base import Base
from bombus_trainer.backends.torch.model import PolicyModel
from bombus_trainer.backends.torch.optim import AdamW
from bombus_trainer.publish.checkpoint import Seal
from bombus_trainer.ranks import Ranks
from bombus_trainer.serving.memory import give_back
from bombus_trainer.settings import TrainerSettings
from bombus_trainer.tenants.batches import DataLimits, read_batch
from bombus_trainer.tenants.checkpoints import CheckpointFolder, CheckpointName, TenantFacts, TenantMarks
from bombus_trainer.tenants.client_losses import read_loss
from bombus_trainer.tenants.room import check_room, free_bytes, need_of
from bombus_trainer.tenants.saving import Contents, check_origin, load_tenant, weights_file, write_tenant
from bombus_trainer.tenants.settings import TenantSettings
from bombus_trainer.tenants.shelf import OptimizerShelf
from bombus_trainer.tenants.specs import check_adapter
from bombus_trainer.tenants.tenant import GradientEpoch, TrainedTenant

log = logging.getLogger(__name__)


class OperationExecutor:
    """Several models on one base: any number of adapters, or one model of all its weights.

    It executes one operation at a time. Everything that a model is lies in memory and in its checkpoints.
    """

    def __init__(
        self,
        folder: Path,
        settings: TrainerSettings,
        options: TenantSettings,
        free: Callable[[torch.device], int] = free_bytes,
        ranks: Ranks | None = None,
    ) -> None:
        """Load the base in `folder`, which callers name as the job does (`model.path`). Raises `EngineFault`.

        `free` says how many bytes of a device's memory are free. `ranks` compute together, and each has all models;
        None: this process alone.
        """
        self._free = free
        self._ranks = ranks or Ranks.alone()
        self._folder, self._settings, self._options = folder, settings, options
        self._base: Base | None = Base(folder, settings, False, self._ranks)
        self._tenants: dict[str, TrainedTenant] = {}
        self._checkpoints = CheckpointFolder(options.checkpoints, options.run, options.trainer_epoch)
        self._covers = CheckpointFolder(options.covers, options.run, options.trainer_epoch)
        self._shelf = OptimizerShelf(options.scratch, options.optimizer_bytes_max)

    @property
    def models(self) -> dict[str, int]:
        """The models by their ids, each with the steps that it has taken."""
        return {model: tenant.step for model, tenant in self._tenants.items()}

    @property
    def base(self) -> PolicyModel:
        """The model below all models. It is as it was loaded as long as no model trains all of its weights."""
        return self._need_base(None).policy

    @property
    def shelved(self) -> list[str]:
        """The models whose optimizers wait in files."""
        return self._shelf.shelved

    def checkpoint_facts(self, checkpoint: str) -> TenantFacts:
        """Return what the checkpoint `MODEL/KIND/NAME` is. Raises `Refused` or `EngineFault`."""
        return self._checkpoints.facts(CheckpointName.read(checkpoint))

    def remove_checkpoint(self, checkpoint: str) -> None:
        """Remove the checkpoint `MODEL/KIND/NAME`, if there is one. Raises `Refused` for what names none."""
        self._checkpoints.remove(CheckpointName.read(checkpoint))

    # ---- covers ---------------------------------------------------------------------------------------------------

    def cover(self, model: str, name: str, executed: bytes) -> CheckpointSaved:
        """Save all that a model is, with the gradient of the step to come, apart from its callers' checkpoints.

        `recover` goes on from there as if nothing had happened in between. A cover of the same name stays as it is.
        Raises `Refused` where there is no such model, `EngineFault` and `OSError` where it cannot be written.
        """
        tenant, where = self._tenant(model), _cover_name(model, name)
        optimizer = self._shelf.bring(model)
        contents = replace(self._contents(tenant, CheckpointKind.TRAINING, optimizer), gradient=True)
        fill = partial(write_tenant, tenant=tenant, contents=contents)
        marks = TenantMarks(operation=name, executed=executed)
        facts = partial(self._facts, where, tenant, marks)
        return self._ranks.by_leader(lambda: self._covers.save(where, False, name, fill, facts))

    def recover(self, model: str, name: str) -> bytes:
        """Make a model again from its cover, in the place of any model of this id. Returns what was `executed`.

        Raises `Refused` where there is none of this name, `EngineFault` where it is damaged.
        """
        where = _cover_name(model, name)
        facts = self._covers.facts(where)
        self.drop(model)
        self._take(model, self._new_from(self._covers, where, facts, with_optimizer=True))
        return facts.marks.executed

    def rescue(self, model: str, made_by: str, at_least: int) -> int | None:
        """Make a model again from a checkpoint of its callers, in the place of any model of this id.

        The checkpoint is the newest without a gradient of the step to come, whose operation is called `made_by` and a
        number of at least `at_least`. Returns the number, None where there is none such that can be read.
        """
        found: list[tuple[int, CheckpointName, TenantFacts]] = []
        for name in self._checkpoints.names(model, CheckpointKind.TRAINING):
            where = CheckpointName(model, CheckpointKind.TRAINING, name)
            try:
                facts = self._checkpoints.facts(where)
            except (Refused, EngineFault) as error:
                log.warning("the checkpoint %s does not help: %s", where, error)
                continue
            text = facts.marks.operation.removeprefix(made_by)
            if facts.marks.operation != text and text.isdigit() and facts.unstepped == GradientEpoch():
                found.append((int(text), where, facts))
        for number, where, facts in sorted(found, key=lambda each: each[0], reverse=True):
            if number < at_least:
                break
            try:
                tenant = self._new_from(self._checkpoints, where, facts, with_optimizer=True)
            except (Refused, EngineFault) as error:
                log.warning("the checkpoint %s does not help: %s", where, error)
                continue
            self.drop(model)
            self._take(model, tenant)
            return number
        return None

    # ---- operations -----------------------------------------------------------------------------------------------

    def execute(self, model: str, operation: Operation, name: str = "", executed: bytes = b"") -> Result:
        """Execute an operation on a model.

        `name` is the caller's for this operation: a checkpoint that an operation has made is not refused to it when it
        is executed again. `executed` is kept in a checkpoint that this operation makes, see `TenantMarks`. Raises
        `BackendLost` where it failed on some ranks alone.
        """
        result = self._attempt(model, operation, name, executed)
        errors = self._ranks.gather(result.error if isinstance(result, Failed) else "")
        if len(set(errors)) > 1:
            which, why = next((rank, error) for rank, error in enumerate(errors) if error)
            raise BackendLost(f"rank {which} failed alone, and its models are not those of the others: {why}")
        return result

    def _attempt(self, model: str, operation: Operation, name: str, executed: bytes) -> Result:
        try:
            return self._run(model, operation, name, executed)
        except Refused as refused:
            failed = Failed(error=refused.why, category=Category.USER)
        except EngineFault as fault:
            failed = Failed(error=str(fault), category=Category.SERVER)
        except torch.OutOfMemoryError as error:
            failed = Failed(
                error=f"the device ran out of memory; send less data in one operation ({in_one_line(error)})",
                category=Category.SERVER,
            )
        except OSError as error:
            failed = Failed(
                error=f"a file could not be written or read: {in_one_line(error)}", category=Category.SERVER
            )
        self.spoil(model, operation, failed.error)
        return failed

    def spoil(self, model: str, operation: Operation, why: str) -> None:
        """Note that the gradient is incomplete where a failed operation belongs to it: the step that takes it fails."""
        tenant = self._tenants.get(model)
        if tenant is not None and adds_to_gradient(operation):
            tenant.spoil(why)

    def clear(self, model: str) -> None:
        """Forget a model's gradient, and that an operation on it failed."""
        self._tenant(model).clear()

    def release(self) -> None:
        """Forget all models and the base, which is loaded again when it is needed."""
        for model in list(self._tenants):
            self.drop(model)
        self._base = None
        give_back()

    def drop(self, model: str) -> None:
        """Forget a model, if there is one."""
        self._tenants.pop(model, None)
        self._shelf.remove(model)

    def _run(self, model: str, operation: Operation, name: str, executed: bytes) -> Result:
        match operation:
            case CreateModel():
                return self._create(model, operation)
            case ForwardBackward():
                return self._forward_backward(self._tenant(model), operation)
            case OptimStep():
                return self._step(model, operation)
            case AbortEpoch():
                return self._abort(self._tenant(model))
            case SaveWeights():
                return self._save(model, operation, name, executed)
            case LoadWeights():
                return self._load(model, operation)
            case EndModel():
                return self._end(model, operation, name, executed)
            case Rejected():
                self.spoil(model, operation, operation.failure.error)
                return operation.failure
            case _:
                assert_never(operation)

    def _tenant(self, model: str) -> TrainedTenant:
        tenant = self._tenants.get(model)
        if tenant is None:
            raise Refused(Code.UNKNOWN_MODEL, f"there is no model {model[:140]!r} here: create it first")
        return tenant

    # ---- models ---------------------------------------------------------------------------------------------------

    def _create(self, model: str, operation: CreateModel) -> ModelReady:
        CheckpointName(model, CheckpointKind.TRAINING, "_")  # its checkpoints are below a folder of its name
        if model in self._tenants:
            raise Refused(Code.BAD_CONFIG, f"there is a model {model} already: use another id, or end that one first")
        if operation.base != self._base_name:
            raise Refused(
                Code.UNKNOWN_MODEL,
                f"the base of the models here is {self._base_name}, and this one is to be on {operation.base[:200]}",
            )
        if len(self._tenants) >= self._options.models_max:
            raise Refused(Code.OVERLOADED, f"there are {len(self._tenants)} models here, as many as may be: end one")
        if operation.checkpoint:
            name = CheckpointName.read(operation.checkpoint)
            facts = self._checkpoints.facts(name)
            self._check_room(facts.adapter)
            tenant = self._new_from(self._checkpoints, name, facts, operation.with_optimizer)
            loaded = facts.content(operation.with_optimizer)
        else:
            self._check_room(operation.adapter)
            tenant, loaded = self._new(operation), ""
        self._take(model, tenant)
        return ModelReady(adapter=tenant.spec, parameters=tenant.size, loaded=loaded)

    def _check_room(self, spec: AdapterSpec | None) -> None:
        """Raise `Refused` where there is no memory for one more model; the system would end this process."""
        base, tenants = self._need_base(None), self._tenants.values()
        device = base.policy.device
        check_adapter(base, spec, self._options.rank_max)
        need = need_of(base.numbers(spec), tenants, self._options.optimizer_bytes_max)
        if need.own + need.others > self._free_everywhere(device):
            give_back()  # what ended models had may still be kept by this process
        # A model of all weights is loaded in the place of the base.
        freed = sum(each.nbytes for each in base.network.parameters()) if spec is None else 0
        check_room(need, self._free_everywhere(device) + freed, device, len(tenants))

    def _free_everywhere(self, device: torch.device) -> int:
        """Return how many bytes every rank has free: the least of them."""
        return min(self._ranks.gather(self._free(device)))

    def _take(self, model: str, tenant: TrainedTenant) -> None:
        self._tenants[model] = tenant
        self._shelf.add(model, tenant.optimizer)

    def _new_from(
        self, folder: CheckpointFolder, name: CheckpointName, facts: TenantFacts, with_optimizer: bool
    ) -> TrainedTenant:
        check_origin(name, facts, self._base_name, with_optimizer)
        tenant = self._new(CreateModel(base=self._base_name, adapter=facts.adapter))
        load_tenant(tenant, folder, name, facts, with_optimizer)
        return tenant

    @property
    def _base_name(self) -> str:
        return self._settings.job.model.path

    def _new(self, operation: CreateModel) -> TrainedTenant:
        all_weights = operation.adapter is None
        if self._tenants and all_weights:
            raise Refused(
                Code.WRONG_PHASE,
                f"a model of all weights has its base for itself, and there are {len(self._tenants)} models on it: end "
                "them first, or ask for an adapter",
            )
        if self._tenants and self._need_base(None).all_weights:
            raise Refused(
                Code.WRONG_PHASE,
                f"the model {next(iter(self._tenants))} trains all weights of the base, so there can be no other: end "
                "it first",
            )
        base = self._need_base(all_weights)
        check_adapter(base, operation.adapter, self._options.rank_max)
        return TrainedTenant(base, operation.adapter)

    def _need_base(self, all_weights: bool | None) -> Base:
        """Return the base, loaded again where its weights are trained or were, which only happens without tenants."""
        base = self._base
        if base is None or (all_weights is not None and (base.all_weights or all_weights)):
            self._base = base = None  # before the next is loaded: two need not fit
            self._base = base = Base(self._folder, self._settings, bool(all_weights), self._ranks)
        return base

    def _end(self, model: str, operation: EndModel, name: str, executed: bytes) -> ModelEnded:
        tenant = self._tenant(model)
        saved = None
        if operation.save_as:
            as_asked = SaveWeights(checkpoint=CheckpointKind.TRAINING, name=operation.save_as)
            saved = self._save(model, as_asked, name, executed)
        self.drop(model)
        if tenant.spec is None and operation.reset_weights:
            del tenant
            self._take(model, self._new(CreateModel(base=self._base_name)))
        return ModelEnded(saved=saved)

    # ---- gradients and steps --------------------------------------------------------------------------------------

    def _forward_backward(self, tenant: TrainedTenant, operation: ForwardBackward) -> Scores:
        loss = read_loss(operation.loss)
        limits = DataLimits(
            vocabulary=tenant.base.policy.vocab_size,
            context=tenant.base.context,
            tokens_max=self._options.tokens_max,
            targets_max=self._options.targets_max,
        )
        return tenant.forward_backward(read_batch(operation.data, loss, limits), loss, operation.forward_only)

    def _step(self, model: str, operation: OptimStep) -> StepTaken:
        tenant = self._tenant(model)
        self._shelf.bring(model)
        return tenant.take_step(operation.adam, operation.reduction)

    def _abort(self, tenant: TrainedTenant) -> EpochAborted:
        operations = tenant.epoch.operations
        tenant.clear()
        return EpochAborted(step=tenant.step, operations=operations)

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def _save(self, model: str, operation: SaveWeights, name: str, executed: bytes) -> CheckpointSaved:
        tenant, kind = self._tenant(model), operation.checkpoint
        if not 0.0 <= operation.ttl_s < inf:
            raise Refused(
                Code.MALFORMED, f"ttl_s is {operation.ttl_s}: it has to be a number of seconds, or 0 for ever"
            )
        if operation.merged and kind is not CheckpointKind.EXTERNAL:
            raise Refused(
                Code.MALFORMED, f"only a save for others ({CheckpointKind.EXTERNAL}) is merged, and not {kind}"
            )
        where = CheckpointName(model, kind, operation.name)
        optimizer = self._shelf.bring(model) if kind is CheckpointKind.TRAINING else None
        contents = self._contents(tenant, kind, optimizer, operation.merged)
        fill = partial(write_tenant, tenant=tenant, contents=contents)
        marks = TenantMarks(operation.ttl_s, name, executed)
        facts = partial(self._facts, where, tenant, marks, merged=operation.merged)
        overwrite = operation.overwrite
        return self._ranks.by_leader(lambda: self._checkpoints.save(where, overwrite, name, fill, facts))

    def _contents(
        self, tenant: TrainedTenant, kind: CheckpointKind, optimizer: AdamW | None, merged: bool = False
    ) -> Contents:
        files = load_tokenizer_files(self._folder) if tenant.spec is None or merged else {}
        base = hub_name(self._base_name) or str(self._folder.absolute())
        return Contents(kind, files, base, optimizer, merged=merged)

    def _facts(
        self,
        name: CheckpointName,
        tenant: TrainedTenant,
        marks: TenantMarks,
        seals: dict[str, Seal],
        merged: bool = False,
    ) -> TenantFacts:
        weights = weights_file(tenant, merged)
        return TenantFacts(
            base=self._base_name,
            model=name.model,
            kind=name.kind,
            name=name.name,
            step=tenant.step,
            weights=weights,
            address=seals[weights].sha256,
            files=seals,
            adapter=None if merged else tenant.spec,
            unstepped=tenant.epoch,
            marks=marks,
        )

    def _load(self, model: str, operation: LoadWeights) -> CheckpointLoaded:
        tenant = self._tenant(model)
        name = CheckpointName.read(operation.checkpoint)
        facts = self._checkpoints.facts(name)
        check_origin(name, facts, self._base_name, operation.with_optimizer)
        load_tenant(tenant, self._checkpoints, name, facts, operation.with_optimizer)
        self._shelf.renew(model)
        loaded = facts.content(operation.with_optimizer)
        return CheckpointLoaded(checkpoint=operation.checkpoint, step=tenant.step, loaded=loaded)


def _cover_name(model: str, name: str) -> CheckpointName:
    return CheckpointName(model, CheckpointKind.TRAINING, name)


def adds_to_gradient(operation: Operation) -> bool:
    """Return whether an operation adds to the gradient, or would have."""
    if isinstance(operation, Rejected):
        return operation.counts
    return isinstance(operation, ForwardBackward) and not operation.forward_only
