"""Executes training operations on models, their optimizers and their checkpoints, without access to the bus."""

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
from bombus_trainer.operations.batches import DataLimits, read_batch
from bombus_trainer.operations.checkpoints import (
    CheckpointFolder,
    CheckpointName,
    ModelCheckpoint,
    ModelFacts,
    content_of,
)
from bombus_trainer.operations.client_losses import read_loss
from bombus_trainer.operations.client_model import GradientEpoch, TrainedClientModel
from bombus_trainer.operations.memory import check_room, free_bytes, need_of
from bombus_trainer.operations.optimizer_store import OptimizerStore
from bombus_trainer.operations.saving import Contents, check_origin, load_model, weights_file, write_model
from bombus_trainer.operations.serving.memory import give_back
from bombus_trainer.operations.settings import ExecutorSettings
from bombus_trainer.operations.specs import check_adapter
from bombus_trainer.ranks import Ranks
from bombus_trainer.settings import TrainerSettings

log = logging.getLogger(__name__)


class OperationExecutor:
    """Executes operations, one at a time, on the models that share one base.

    These are any number of adapters, or a single model that trains all weights. The state of a model is only in memory
    and in its checkpoints.
    """

    def __init__(
        self,
        folder: Path,
        settings: TrainerSettings,
        options: ExecutorSettings,
        free: Callable[[torch.device], int] = free_bytes,
        ranks: Ranks | None = None,
    ) -> None:
        """Load the base from `folder`. Callers refer to it by the job's `model.path`.

        `free` returns how many bytes of a device's memory are free. `ranks` compute together, and each has all models;
        None means this process alone. Raises `EngineFault` if the base cannot be loaded.
        """
        self._free = free
        self._ranks = ranks or Ranks.alone()
        self._folder, self._settings, self._options = folder, settings, options
        self._base: Base | None = Base(folder, settings, False, self._ranks)
        self._models: dict[str, TrainedClientModel] = {}
        self._checkpoints = CheckpointFolder(options.checkpoints, options.run, options.trainer_epoch)
        self._recovery = CheckpointFolder(options.recovery, options.run, options.trainer_epoch)
        self._optimizers = OptimizerStore(options.scratch, options.optimizer_bytes_max)

    @property
    def models(self) -> dict[str, int]:
        """The number of steps that each model has taken, by model id."""
        return {model: trained.step for model, trained in self._models.items()}

    @property
    def base(self) -> PolicyModel:
        """The base model under all adapters. Its weights change only if a model trains all weights."""
        return self._need_base(None).policy

    @property
    def offloaded(self) -> list[str]:
        """The models whose optimizers are in files."""
        return self._optimizers.offloaded

    def remove_checkpoint(self, checkpoint: str) -> None:
        """Remove the checkpoint `MODEL/KIND/NAME`, if it exists. Raises `Refused` if the name is malformed."""
        self._checkpoints.remove(CheckpointName.read(checkpoint))

    # ---- recovery checkpoints ----------------------------------------------------------------------------------------

    def save_for_recovery(self, model: str, name: str) -> ModelCheckpoint:
        """Save the whole state of a model, with the gradient since its last step, separately from its callers'
        checkpoints.

        `recover` restores exactly this state. An existing recovery checkpoint of the same name is replaced, since it
        must be from another log. Raises `Refused` if there is no such model, or `EngineFault` or `OSError` if the
        checkpoint cannot be written.
        """
        trained, where = self._model(model), _recovery_name(model, name)
        optimizer = self._optimizers.bring(model)
        contents = replace(self._contents(trained, CheckpointKind.TRAINING, optimizer), gradient=True)
        fill = partial(write_model, trained=trained, contents=contents)
        facts = self._facts(trained)
        return self._ranks.by_leader(lambda: self._recovery.save(where, facts, True, fill))

    def recover(self, model: str, name: str, digest: str) -> None:
        """Rebuild a model from the recovery checkpoint with this name and digest, replacing any model with this id.

        Raises `Refused` if there is no checkpoint of this name, or `EngineFault` if the checkpoint is damaged or has
        another digest.
        """
        where = _recovery_name(model, name)
        checkpoint = self._recovery.read(where, digest)
        self.drop(model)
        self._take(model, self._new_from(where, checkpoint, with_optimizer=True))

    def rescue(self, model: str, made_by: str, at_least: int) -> int | None:
        """Rebuild a model from one of its callers' checkpoints, replacing any model with this id.

        Uses the newest readable checkpoint that was saved without an unfinished gradient, by an operation whose name is
        `made_by` followed by a number that is at least `at_least`. Returns that number, or None if there is no such
        checkpoint.
        """
        found: list[tuple[int, CheckpointName, ModelCheckpoint]] = []
        for name in self._checkpoints.names(model, CheckpointKind.TRAINING):
            where = CheckpointName(model, CheckpointKind.TRAINING, name)
            try:
                checkpoint = self._checkpoints.read(where)
            except (Refused, EngineFault) as error:
                log.warning("the model cannot be rebuilt from the checkpoint %s: %s", where, error)
                continue
            operation = checkpoint.facts.operation
            text = operation.removeprefix(made_by)
            if operation != text and text.isdigit() and checkpoint.facts.unstepped == GradientEpoch():
                found.append((int(text), where, checkpoint))
        for number, where, checkpoint in sorted(found, key=lambda each: each[0], reverse=True):
            if number < at_least:
                break
            try:
                trained = self._new_from(where, checkpoint, with_optimizer=True)
            except (Refused, EngineFault) as error:
                log.warning("the model cannot be rebuilt from the checkpoint %s: %s", where, error)
                continue
            self.drop(model)
            self._take(model, trained)
            return number
        return None

    # ---- operations -----------------------------------------------------------------------------------------------

    def execute(self, model: str, operation: Operation, name: str = "") -> Result:
        """Execute an operation on a model.

        `name` is the caller's name for this operation. If an operation that has already written its checkpoint is
        re-executed, that checkpoint is returned and the operation is not refused. Raises `BackendLost` if ranks fail
        differently, or only some of them fail.
        """
        result = self._attempt(model, operation, name)
        errors = self._ranks.gather(result.error if isinstance(result, Failed) else "")
        if len(set(errors)) > 1:
            which, why = next((rank, error) for rank, error in enumerate(errors) if error)
            raise BackendLost(f"only rank {which} failed, so its models no longer match the others': {why}")
        return result

    def _attempt(self, model: str, operation: Operation, name: str) -> Result:
        try:
            return self._run(model, operation, name)
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
        self.fail_gradient(model, operation, failed.error)
        return failed

    def fail_gradient(self, model: str, operation: Operation, why: str) -> None:
        """If a failed operation adds to the gradient, record that the gradient is incomplete, so that the next step
        fails."""
        trained = self._models.get(model)
        if trained is not None and adds_to_gradient(operation):
            trained.fail_gradient(why)

    def clear(self, model: str) -> None:
        """Discard a model's gradient, and the record of a failed operation on it."""
        self._model(model).clear()

    def release(self) -> None:
        """Forget all models and the base, which is reloaded when needed."""
        for model in list(self._models):
            self.drop(model)
        self._base = None
        give_back()

    def drop(self, model: str) -> None:
        """Forget a model, if it exists."""
        self._models.pop(model, None)
        self._optimizers.remove(model)

    def _run(self, model: str, operation: Operation, name: str) -> Result:
        match operation:
            case CreateModel():
                return self._create(model, operation)
            case ForwardBackward():
                return self._forward_backward(self._model(model), operation)
            case OptimStep():
                return self._step(model, operation)
            case AbortEpoch():
                return self._abort(self._model(model))
            case SaveWeights():
                return self._save(model, operation, name)
            case LoadWeights():
                return self._load(model, operation)
            case EndModel():
                return self._end(model, operation, name)
            case Rejected():
                self.fail_gradient(model, operation, operation.failure.error)
                return operation.failure
            case _:
                assert_never(operation)

    def _model(self, model: str) -> TrainedClientModel:
        trained = self._models.get(model)
        if trained is None:
            raise Refused(Code.UNKNOWN_MODEL, f"there is no model {model[:140]!r} here: create it first")
        return trained

    # ---- models ---------------------------------------------------------------------------------------------------

    def _create(self, model: str, operation: CreateModel) -> ModelReady:
        CheckpointName(model, CheckpointKind.TRAINING, "_")  # raises unless the id can be a checkpoint folder's name
        if model in self._models:
            raise Refused(Code.BAD_CONFIG, f"there is a model {model} already: use another id, or end that one first")
        if operation.base != self._base_name:
            raise Refused(
                Code.UNKNOWN_MODEL,
                f"the base of the models here is {self._base_name}, but this one asks for {operation.base[:200]}",
            )
        if len(self._models) >= self._options.models_max:
            raise Refused(Code.OVERLOADED, f"there are {len(self._models)} models here, the maximum: end one first")
        if operation.checkpoint:
            name = CheckpointName.read(operation.checkpoint)
            checkpoint = self._checkpoints.read(name)
            self._check_room(checkpoint.facts.adapter)
            trained = self._new_from(name, checkpoint, operation.with_optimizer)
            loaded = content_of(checkpoint, operation.with_optimizer)
        else:
            self._check_room(operation.adapter)
            trained, loaded = self._new(operation), ""
        self._take(model, trained)
        return ModelReady(adapter=trained.spec, parameters=trained.size, loaded=loaded)

    def _check_room(self, spec: AdapterSpec | None) -> None:
        """Raise `Refused` if there is not enough memory for another model; otherwise the system might kill this
        process."""
        base, models = self._need_base(None), self._models.values()
        device = base.policy.device
        check_adapter(base, spec, self._options.rank_max)
        need = need_of(base.numbers(spec), models, self._options.optimizer_bytes_max)
        if need.own + need.others > self._free_everywhere(device):
            give_back()  # this process may still have the memory of ended models
        # A model that trains all weights replaces the base.
        freed = sum(each.nbytes for each in base.network.parameters()) if spec is None else 0
        check_room(need, self._free_everywhere(device) + freed, device, len(models))

    def _free_everywhere(self, device: torch.device) -> int:
        """Return how many bytes are free on every rank: the minimum over the ranks."""
        return min(self._ranks.gather(self._free(device)))

    def _take(self, model: str, trained: TrainedClientModel) -> None:
        self._models[model] = trained
        self._optimizers.add(model, trained.optimizer)

    def _new_from(self, name: CheckpointName, checkpoint: ModelCheckpoint, with_optimizer: bool) -> TrainedClientModel:
        check_origin(name, checkpoint, self._base_name, with_optimizer)
        trained = self._new(CreateModel(base=self._base_name, adapter=checkpoint.facts.adapter))
        load_model(trained, name, checkpoint, with_optimizer)
        return trained

    @property
    def _base_name(self) -> str:
        return self._settings.job.model.path

    def _new(self, operation: CreateModel) -> TrainedClientModel:
        all_weights = operation.adapter is None
        if self._models and all_weights:
            raise Refused(
                Code.WRONG_PHASE,
                f"a model that trains all weights cannot share its base, but {len(self._models)} models use it: "
                "end them first, or ask for an adapter",
            )
        if self._models and self._need_base(None).all_weights:
            raise Refused(
                Code.WRONG_PHASE,
                f"the model {next(iter(self._models))} trains all weights of the base, so there can be no other: end "
                "it first",
            )
        base = self._need_base(all_weights)
        check_adapter(base, operation.adapter, self._options.rank_max)
        return TrainedClientModel(base, operation.adapter)

    def _need_base(self, all_weights: bool | None) -> Base:
        """Return the base, reloaded for a new model if that model or an earlier one trains all weights.

        If `all_weights` is None, no model is being created. The base is reloaded only while there are no models.
        """
        base = self._base
        if base is None or (all_weights is not None and (base.all_weights or all_weights)):
            self._base = base = None  # free it before loading the next: two may not fit
            self._base = base = Base(self._folder, self._settings, bool(all_weights), self._ranks)
        return base

    def _end(self, model: str, operation: EndModel, name: str) -> ModelEnded:
        trained = self._model(model)
        saved = None
        if operation.save_as:
            as_asked = SaveWeights(checkpoint=CheckpointKind.TRAINING, name=operation.save_as)
            saved = self._save(model, as_asked, name)
        self.drop(model)
        if trained.spec is None and operation.reset_weights:
            del trained
            self._take(model, self._new(CreateModel(base=self._base_name)))
        return ModelEnded(saved=saved)

    # ---- gradients and steps --------------------------------------------------------------------------------------

    def _forward_backward(self, trained: TrainedClientModel, operation: ForwardBackward) -> Scores:
        loss = read_loss(operation.loss)
        limits = DataLimits(
            vocabulary=trained.base.policy.vocab_size,
            context=trained.base.context,
            tokens_max=self._options.tokens_max,
            targets_max=self._options.targets_max,
        )
        return trained.forward_backward(read_batch(operation.data, loss, limits), loss, operation.forward_only)

    def _step(self, model: str, operation: OptimStep) -> StepTaken:
        trained = self._model(model)
        self._optimizers.bring(model)
        return trained.take_step(operation.adam, operation.reduction)

    def _abort(self, trained: TrainedClientModel) -> EpochAborted:
        operations = trained.epoch.operations
        trained.clear()
        return EpochAborted(step=trained.step, operations=operations)

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def _save(self, model: str, operation: SaveWeights, name: str) -> CheckpointSaved:
        trained, kind = self._model(model), operation.checkpoint
        if not 0.0 <= operation.ttl_s < inf:
            raise Refused(
                Code.MALFORMED, f"ttl_s is {operation.ttl_s}: it must be a number of seconds, or 0 for no limit"
            )
        if operation.merged and kind is not CheckpointKind.EXTERNAL:
            raise Refused(
                Code.MALFORMED, f"only a save of kind {CheckpointKind.EXTERNAL} can be merged, not one of kind {kind}"
            )
        where = CheckpointName(model, kind, operation.name)
        optimizer = self._optimizers.bring(model) if kind is CheckpointKind.TRAINING else None
        contents = self._contents(trained, kind, optimizer, operation.merged)
        fill = partial(write_model, trained=trained, contents=contents)
        facts = self._facts(trained, name, operation.merged)
        saved = self._ranks.by_leader(lambda: self._checkpoints.save(where, facts, operation.overwrite, fill))
        return CheckpointSaved(
            checkpoint=kind,
            name=where.name,
            folder=str(saved.path),
            address=saved.files[saved.facts.weights].sha256,
            size_bytes=saved.size_bytes,
        )

    def _contents(
        self, trained: TrainedClientModel, kind: CheckpointKind, optimizer: AdamW | None, merged: bool = False
    ) -> Contents:
        files = load_tokenizer_files(self._folder) if trained.spec is None or merged else {}
        base = hub_name(self._base_name) or str(self._folder.absolute())
        return Contents(kind, files, base, optimizer, merged=merged)

    def _facts(self, trained: TrainedClientModel, operation: str = "", merged: bool = False) -> ModelFacts:
        return ModelFacts(
            base=self._base_name,
            step=trained.step,
            weights=weights_file(trained, merged),
            adapter=None if merged else trained.spec,
            unstepped=trained.epoch,
            operation=operation,
        )

    def _load(self, model: str, operation: LoadWeights) -> CheckpointLoaded:
        trained = self._model(model)
        name = CheckpointName.read(operation.checkpoint)
        checkpoint = self._checkpoints.read(name)
        check_origin(name, checkpoint, self._base_name, operation.with_optimizer)
        load_model(trained, name, checkpoint, operation.with_optimizer)
        self._optimizers.renew(model)
        loaded = content_of(checkpoint, operation.with_optimizer)
        return CheckpointLoaded(checkpoint=operation.checkpoint, step=trained.step, loaded=loaded)


def _recovery_name(model: str, name: str) -> CheckpointName:
    return CheckpointName(model, CheckpointKind.TRAINING, name)


def adds_to_gradient(operation: Operation) -> bool:
    """Return whether an operation adds to the gradient, or would have if it had not been rejected."""
    if isinstance(operation, Rejected):
        return operation.counts
    return isinstance(operation, ForwardBackward) and not operation.forward_only
