"""xorl's full-weight model, which exists by default on an engine whose job has `trainer.enable_lora: false`."""

import asyncio

from bombus.hive.operations.owners import is_anothers_name, seen_by, seen_model
from bombus.hive.operations.state import ClientModel
from bombus.hive.state import EngineState
from bombus.operations import CreateModel, EndModel, Failed, RateSchedule
from bombus_gateway.access import KeyHolder
from bombus_gateway.operations.bases import base_names, job_of
from bombus_gateway.operations.operation_log import OperationLog
from bombus_gateway.operations.sessions import Sessions
from bombus_gateway.operations_wire.models import AdapterDefaults
from bombus_gateway.operations_wire.steps import NO_SCHEDULE, RateDefaults
from bombus_gateway.operations_wire.submission import DEFAULT_MODEL, Submission


def adapter_defaults(engine: EngineState) -> AdapterDefaults:
    """Return the values for fields that a client leaves out when it creates a model on an engine."""
    job = job_of(engine)
    if job is None:
        return AdapterDefaults()
    return AdapterDefaults(full_weights=job.trainer.enable_lora is False, base=base_names(engine)[0])


def rate_defaults(engine: EngineState) -> RateDefaults:
    """Return the learning rate, and its schedule if any, for steps for which the client gives no rate."""
    job = job_of(engine)
    trainer = None if job is None else job.trainer
    if trainer is None or (trainer.lr_schedule == "constant" and not trainer.warmup_steps):
        return NO_SCHEDULE
    schedule = RateSchedule(
        kind=trainer.lr_schedule,
        warmup_steps=trainer.warmup_steps,
        total_steps=trainer.total_steps,
        min_ratio=trainer.min_lr_ratio,
    )
    return RateDefaults(trainer.lr, schedule)


class RegisteredModel:
    """The model `default` on an engine that trains all weights. The model is created when a client first uses it.

    Until then it is unborn: it is listed, described and ended as if it existed with the weights of its base.
    """

    def __init__(self, operations: OperationLog, sessions: Sessions) -> None:
        self._operations = operations
        self._sessions = sessions
        self._creating = asyncio.Lock()

    def existing(self, model: str, holder: str) -> ClientModel | None:
        """Return the registered model if a client that creates `model` gets it and it already exists. Return None
        otherwise."""
        found = self._open(holder)
        return found if model == DEFAULT_MODEL and self._is_registered() else None

    def names(self, holder: str) -> list[str]:
        """Return the names of all models that accept operations from the holder of a key."""
        names = [model.name for model in seen_by(self._operations.clients, holder).open_models]
        is_there = DEFAULT_MODEL in names or not self._is_free(holder)
        return names if is_there or not self._is_registered() else [DEFAULT_MODEL, *names]

    async def create_for(self, submission: Submission, owner: str) -> None:
        """Create the model if this is the first operation that a client sends to it.

        A client that has already sent operations had a model that has since ended. It gets no new model in its place.
        """
        begins = submission.model == DEFAULT_MODEL and submission.seq <= 1
        if not begins or isinstance(submission.operation, EndModel | Failed):
            return
        await self.create(owner)

    def unborn(self, model: str, holder: str) -> ClientModel | None:
        """Return the registered model as it would be created, if `model` names it and no client has used it yet.

        Return None otherwise.
        """
        is_new = model == DEFAULT_MODEL and model not in self._operations.clients.models
        if not is_new or not self._is_free(holder) or not self._is_registered():
            return None
        engine = self._operations.state
        return ClientModel(name=model, session="", base=base_names(engine)[0], run=engine.run, opened_ns=0)

    async def create(self, owner: str) -> None:
        """Create the model for the owner of a key, unless the model already exists or belongs to another client."""
        async with self._creating:
            if self._open(owner) is None and self._is_free(owner) and self._is_registered():
                base = base_names(self._operations.state)[0]
                create = Submission(model=DEFAULT_MODEL, seq=0, operation=CreateModel(base=base))
                await self._operations.submit(
                    await self._sessions.open_for_model(KeyHolder(owner)), create, base, owner
                )

    def _open(self, holder: str) -> ClientModel | None:
        model = seen_model(self._operations.clients, DEFAULT_MODEL, holder)
        return None if model is None or model.closed is not None else model

    def _is_free(self, holder: str) -> bool:
        """Return whether no other client owns the model or one of its checkpoints."""
        return not is_anothers_name(self._operations.clients, DEFAULT_MODEL, holder)

    def _is_registered(self) -> bool:
        return adapter_defaults(self._operations.state).full_weights
