"""Sends training clients the results of their operations, or the reasons why the operations are waiting."""

import asyncio

import msgspec

from bombus.bus.large.parts import Parts
from bombus.errors import LogCorrupted
from bombus.hive.operations.owners import may_use, seen_model
from bombus.hive.operations.state import Queued
from bombus.hive.state import Phase
from bombus.operations import (
    Category,
    CheckpointKind,
    EndModel,
    Failed,
    Operation,
    Result,
    SaveWeights,
    decode_operation,
    decode_result,
)
from bombus_gateway.context import Gateway
from bombus_gateway.operations.catching_up import catch_up
from bombus_gateway.operations.operation_log import OperationLog, without_data
from bombus_gateway.operations_wire.checkpoints import INFLIGHT_SAMPLE, UNNAMED_SAMPLE
from bombus_gateway.operations_wire.dialects import TrainingDialect, is_tinkers, sampling_session, session_of
from bombus_gateway.operations_wire.futures import (
    FutureAnswer,
    FutureRequest,
    QueueState,
    failed,
    ready,
    try_again,
    unknown,
)
from bombus_gateway.operations_wire.results import write_result
from bombus_gateway.operations_wire.submission import Submission

HOLD_S = 30.0  # how long a request for a result that is not ready is held open


class Waits(msgspec.Struct, frozen=True):
    """Why an operation is waiting, as text for the client, and Tinker's name for the state of the queue."""

    reason: str
    state: QueueState


class OperationResults:
    """The results of the operations in an `OperationLog`."""

    def __init__(self, gateway: Gateway, operations: OperationLog) -> None:
        self._gateway = gateway
        self._operations = operations
        self._parts = Parts(gateway.bus)

    async def result(self, asked: FutureRequest, holder: str, hold_s: float = HOLD_S) -> FutureAnswer:
        """Return the result or state of an operation. While the operation is waiting, hold the answer back for up to
        `hold_s`."""
        outcome = await self.outcome(asked.id, hold_s, holder)
        if outcome is None:
            return unknown(asked.id)
        if isinstance(outcome, Waits):
            return try_again(asked, outcome.reason, outcome.state)
        if isinstance(outcome, Failed):
            return failed(outcome)
        model, queued = asked.id.rpartition(":")[0], self._operations.clients.operation(asked.id)
        dialect = TrainingDialect.TINKER if is_tinkers(model) else TrainingDialect.XORL
        submission = await self._submission(model, queued)
        return ready(await asyncio.to_thread(write_result, dialect, submission, outcome), asked)

    async def outcome(self, name: str, hold_s: float, holder: str = "") -> Result | Waits | None:
        """Return an operation's result, or why the operation is still waiting after `hold_s`.

        Return None if there is no such operation, or none that the holder may see.
        """
        queued = await self._found(name, holder)
        if queued is None:
            owner, failure = self._operations.failure_of(name) or ("", None)
            return failure if may_use(owner, holder) else None
        if queued.waits and not await self._is_over(name, hold_s):
            return self._why_it_waits(name)
        queued = self._operations.clients.operation(name)
        if queued is None or (queued.result is None and not queued.error):
            return None
        result: Result = Failed(error=queued.error, category=Category.SERVER)
        if queued.result is not None:
            result = decode_result(await self._parts.fetch(queued.result))
        self._operations.note_delivered(queued)
        return result

    async def _found(self, name: str, holder: str) -> Queued | None:
        """Return an operation that belongs to the holder of a key, even if another gateway has only just put it on the
        log."""
        if self._seen(name, holder) is None and self._operations.failure_of(name) is None:
            await catch_up(self._gateway.follower)
        return self._seen(name, holder)

    def _seen(self, name: str, holder: str) -> Queued | None:
        model = seen_model(self._operations.clients, name.rpartition(":")[0], holder)
        return None if model is None else self._operations.clients.operation(name)

    async def _is_over(self, name: str, hold_s: float) -> bool:
        def over() -> bool:
            queued = self._operations.clients.operation(name)
            return queued is None or not queued.waits

        return await self._operations.until(over, hold_s)

    def _why_it_waits(self, name: str) -> Waits:
        engine = self._operations.state
        if engine.suspended:
            return Waits(f"The run is suspended: {engine.suspended}", "paused_capacity")
        if engine.rest_wanted:
            return Waits("The trainer is asleep until a client calls /wake_up.", "paused_capacity")
        if engine.phase == Phase.BOOTING:
            base = "" if engine.started is None else engine.started.base
            return Waits(f"The trainer is loading {base}.", "paused_capacity")
        clients = engine.clients
        queued, model = clients.operation(name), clients.models.get(name.rpartition(":")[0])
        if queued is None or model is None:
            return Waits("", "active")
        if model.suspended:
            return Waits(f"The model cannot continue now: {model.suspended}", "paused_capacity")
        before = sum(each.waits and each.number < queued.number for each in model.operations.values())
        others = clients.waiting - model.waiting
        return Waits(f"{before} operations of this model come first; {others} of other models also wait.", "active")

    async def _submission(self, model: str, queued: Queued | None) -> Submission:
        """Return an operation's submission, without its data, so that its result can be written."""
        unknown_one = Submission(model=model, seq=0, operation=EndModel())
        if queued is None or queued.body is None:
            return unknown_one
        name = f"{model}:{queued.key}"
        known = self._operations.submission_of(name, queued.body.digest)
        if known is not None:
            return known
        try:
            operation = decode_operation(await self._parts.fetch(queued.body))
        except LogCorrupted:  # results outlive their operations' bodies
            return unknown_one
        known = Submission(
            model=model, seq=0, operation=without_data(operation), sampling_session=_sampling_session(model, operation)
        )
        self._operations.remember(name, queued.body.digest, known)
        return known


def _sampling_session(model: str, operation: Operation) -> str:
    """Return the sampling session that an unnamed save began, derived from the name of the save's checkpoint. Return ""
    for any other operation."""
    if not isinstance(operation, SaveWeights) or not is_tinkers(model):
        return ""
    number = operation.name.removeprefix(UNNAMED_SAMPLE).removeprefix(INFLIGHT_SAMPLE)
    is_unnamed = operation.checkpoint == CheckpointKind.SAMPLER and number != operation.name and number.isdigit()
    return sampling_session(session_of(model), int(number)) if is_unnamed else ""
