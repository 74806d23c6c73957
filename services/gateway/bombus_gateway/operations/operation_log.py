"""Puts operations of training clients on the log, and answers with their results."""

import asyncio
import uuid
from collections.abc import Callable

import msgspec

from bombus.bus.large.parts import Parts
from bombus.errors import Code, LogCorrupted, Refused
from bombus.hive import inbox
from bombus.hive.bounded import trim
from bombus.hive.events import kind_of
from bombus.hive.operations.owners import may_use, seen_model
from bombus.hive.operations.state import Queued, TrainingClients
from bombus.hive.records import digest
from bombus.hive.shares import trim_fairly
from bombus.hive.state import EngineState, Phase
from bombus.operations import (
    Category,
    CheckpointKind,
    CreateModel,
    EndModel,
    Failed,
    ForwardBackward,
    LoadWeights,
    Operation,
    OptimStep,
    Rejected,
    Result,
    SaveWeights,
    decode_operation,
    decode_result,
    encode_operation,
)
from bombus_gateway.call.workers import CLIENTS
from bombus_gateway.context import Gateway
from bombus_gateway.limits import in_short
from bombus_gateway.operations.catching_up import catch_up
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
ATTEMPTS_MAX = 4
REPEAT_S = 30.0  # within which an equal request of xorl's client counts as a repeat; nothing else marks one
END_STEM = "end."  # the prefix of the keys of requests that end a model of Tinker's clients
REMEMBERED = 10_000

# Temporary refusals. Clients retry these on their own, but do not retry after a failed future.
_PASSING = (Code.QUOTA, Code.OVERLOADED, Code.STORAGE_FULL, Code.BUS_DOWN)
# Refusals after which no failure can be put on the log: there is no such model, or another operation has its key.
_WITHOUT_PLACE = (Code.OTHER_BODY, Code.UNKNOWN_MODEL, Code.UNKNOWN_SESSION, Code.SESSION_OVER)


class Waits(msgspec.Struct, frozen=True):
    """Why an operation waits, as text for the client, and Tinker's name for the state of its queue."""

    reason: str
    state: QueueState


class OperationLog:
    """The operations of one engine, as its training clients see them.

    The id of a request is the id of its operation on the log, `MODEL:KEY`, so every gateway can answer for it. An
    operation that could not be put on the log is remembered as a failure, in this gateway only.
    """

    def __init__(self, gateway: Gateway, engine: str, repeat_s: float = REPEAT_S) -> None:
        self._gateway = gateway
        self.engine = engine
        self._repeat_s = repeat_s
        self._parts = Parts(gateway.bus)
        self._failures: dict[str, tuple[str, Failed]] = {}  # by operation id, each with the owner of the client's key
        # A forgotten session frees its names for reuse, so an id alone does not identify an operation.
        self._submitted: dict[tuple[str, bytes], Submission] = {}  # by id and digest of the body, without their data
        self._delivered: dict[int, None] = {}  # the arrival numbers of operations whose results were sent

    @property
    def state(self) -> EngineState:
        return self._gateway.follower.hive.engines.get(self.engine) or EngineState(name=self.engine)

    @property
    def clients(self) -> TrainingClients:
        return self.state.clients

    # ---- operations -----------------------------------------------------------------------------------------------

    async def submit(self, session: str, submission: Submission, base: str = "", owner: str = "") -> str:
        """Put an operation on the log, and return the id of its future. On return the operation is durable.

        `session` is "" if the client, whose key has the name `owner`, has no such model. An operation that cannot be
        executed becomes a failed future. Raises `Refused` if the client has to retry later, and `BusUnavailable`.
        """
        model, failure = submission.model, submission.operation
        operation = _on_the_log(submission)
        body = encode_operation(operation)
        known = self.clients.models.get(model)
        whose = f"{owner}/{0 if known is None else known.opened_ns}/".encode()
        own = (await self._gateway.workers.run(CLIENTS, len(body), lambda: digest(whose + body))).hex()[:8]
        own_name = f"{model}:{submission.seq}:{own}"  # differs from the id of any operation that is accepted later
        if isinstance(failure, Failed) and not (session and self._is_open(model)):
            return self._remember_failure(own_name, failure, owner)
        if not session:
            why = f"There is no model {model}: create it first."
            return self._remember_failure(own_name, Failed(error=why, category=Category.USER), owner)
        try:
            name, stored = await self._accepted(session, submission, operation, body, base)
        except Refused as refusal:
            if refusal.code in _PASSING and not isinstance(operation, CreateModel):
                raise
            refused = Failed(error=in_short(refusal.why), category=Category.USER)
            if isinstance(operation, CreateModel | Rejected) or refusal.code in _WITHOUT_PLACE:
                return self._remember_failure(own_name, refused, owner)
            return await self.submit(session, msgspec.structs.replace(submission, operation=refused), owner=owner)
        self._remember(name, stored, msgspec.structs.replace(submission, operation=_without_data(operation)))
        return name

    async def _accepted(
        self, session: str, submission: Submission, operation: Operation, body: bytes, base: str
    ) -> tuple[str, bytes]:
        """Store the body, and have the operation accepted under a key of its own.

        Returns the id of the operation and the digest of its body.
        """
        model, may_repeat = submission.model, True
        for attempt in range(1, ATTEMPTS_MAX + 1):
            ref = await self._parts.store(self._gateway.bus.subjects.operation(self.engine, model), body)
            if not _is_numbered(submission):
                await catch_up(self._gateway.follower)  # its key depends on what came before
            message = inbox.Operate(
                id=uuid.uuid4().hex,
                engine=self.engine,
                session=session,
                model=model,
                key=self._key(submission, ref.digest, may_repeat),
                op=kind_of(operation),
                body=ref,
                passive=_is_passive(operation),
                base=base,
                metadata=submission.metadata,
                again_s=0.0 if _is_numbered(submission) else self._repeat_s,
                reads=operation.checkpoint if isinstance(operation, CreateModel | LoadWeights) else "",
                models_max=self._gateway.settings.models_max if isinstance(operation, CreateModel) else 0,
            )
            try:
                answer = await self._gateway.carry_out(message)
            except Refused as refusal:
                # The key is in use by an operation with another body, or this repeat came too late.
                is_another = refusal.code == Code.OTHER_BODY and not _is_numbered(submission)
                if attempt == ATTEMPTS_MAX or not (is_another or refusal.code == Code.BODY_GONE):
                    raise
                may_repeat = may_repeat and not is_another
                continue
            assert isinstance(answer, inbox.Accepted)
            return answer.operation, ref.digest
        raise AssertionError("the last attempt has returned or raised")

    def _key(self, submission: Submission, body_digest: bytes, may_repeat: bool) -> str:
        """Return the key of an operation. Requests with equal keys are the same operation.

        Tinker's clients number the requests to a model, except the one that ends it. In xorl's client each object
        numbers its own requests, and several objects may use one model, at once or in turn. An object sends no request
        before the previous one is answered. So an equal number is a repeat only if the body is equal too, no other
        operation came in between, and it arrives within seconds. The coordinator checks the time, by the clock of the
        log. A batch or a step is never a repeat if it has no number or its result was already read: a client may send
        equal ones on purpose. A save or an end that failed changed nothing, so an equal request executes it anew.
        """
        if _is_numbered(submission):
            return str(submission.seq)
        model = self.clients.models.get(submission.model)
        stem = END_STEM if is_tinkers(submission.model) else f"{submission.seq}."
        before = [] if model is None else [each for each in model.operations.values() if each.key.startswith(stem)]
        if model is None or not before:
            return f"{stem}1"
        newest = before[-1]
        of_this_model = newest.number >= model.begun  # and not of an earlier model of the same name
        is_new_model = model.closed is not None and isinstance(submission.operation, CreateModel)
        is_next = of_this_model and newest.number == model.numbers and not is_new_model
        if isinstance(submission.operation, ForwardBackward | OptimStep):
            may_repeat &= submission.seq > 0 and newest.arrival not in self._delivered
        if isinstance(submission.operation, SaveWeights | EndModel):
            may_repeat &= not newest.failed
        if may_repeat and is_next and newest.body is not None and newest.body.digest == body_digest:
            return newest.key
        return f"{stem}{int(newest.key.removeprefix(stem)) + 1}"

    def _is_open(self, name: str) -> bool:
        model = self.clients.models.get(name)
        return model is not None and model.closed is None

    def _remember(self, name: str, body_digest: bytes, submission: Submission) -> None:
        self._submitted[name, body_digest] = submission
        trim(self._submitted, REMEMBERED)

    def _remember_failure(self, name: str, failure: Failed, owner: str) -> str:
        self._failures[name] = (owner, failure)
        trim_fairly(self._failures, REMEMBERED, lambda remembered: remembered[0])
        return name

    # ---- results --------------------------------------------------------------------------------------------------

    async def result(self, asked: FutureRequest, holder: str, hold_s: float = HOLD_S) -> FutureAnswer:
        """Return the result or state of an operation. While it waits, hold the answer for up to `hold_s`."""
        outcome = await self.outcome(asked.id, hold_s, holder)
        if outcome is None:
            return unknown(asked.id)
        if isinstance(outcome, Waits):
            return try_again(asked, outcome.reason, outcome.state)
        if isinstance(outcome, Failed):
            return failed(outcome)
        model, queued = asked.id.rpartition(":")[0], self.clients.operation(asked.id)
        dialect = TrainingDialect.TINKER if is_tinkers(model) else TrainingDialect.XORL
        submission = await self._submission(model, queued)
        return ready(await asyncio.to_thread(write_result, dialect, submission, outcome), asked)

    async def outcome(self, name: str, hold_s: float, holder: str = "") -> Result | Waits | None:
        """Return an operation's result, or why it still waits after `hold_s`; None if the holder may not see one."""
        queued = await self._found(name, holder)
        if queued is None:
            owner, failure = self._failures.get(name, ("", None))
            return failure if may_use(owner, holder) else None
        if queued.waits and not await self._is_over(name, hold_s):
            return self._why_it_waits(name)
        queued = self.clients.operation(name)
        if queued is None or (queued.result is None and not queued.error):
            return None
        arrival = queued.arrival
        result: Result = Failed(error=queued.error, category=Category.SERVER)
        if queued.result is not None:
            result = decode_result(await self._parts.fetch(queued.result))
        self._delivered[arrival] = None
        trim(self._delivered, REMEMBERED)
        return result

    async def _found(self, name: str, holder: str) -> Queued | None:
        """Return an operation of the holder of a key, including one that another gateway has just put on the log."""
        if self._seen(name, holder) is None and name not in self._failures:
            await catch_up(self._gateway.follower)
        return self._seen(name, holder)

    def _seen(self, name: str, holder: str) -> Queued | None:
        model = seen_model(self.clients, name.rpartition(":")[0], holder)
        return None if model is None else self.clients.operation(name)

    async def _is_over(self, name: str, hold_s: float) -> bool:
        def over() -> bool:
            queued = self.clients.operation(name)
            return queued is None or not queued.waits

        return await self.until(over, hold_s)

    async def until(self, holds: Callable[[], bool], limit_s: float) -> bool:
        """Wait until `holds` is true of the folded state. Return False if the limit expires first."""
        try:
            await self._gateway.follower.wait_for(lambda _: holds(), limit_s)
        except TimeoutError:
            return False
        return True

    def _why_it_waits(self, name: str) -> Waits:
        engine = self.state
        if engine.suspended:
            return Waits(f"The run is suspended: {engine.suspended}", "paused_capacity")
        if engine.rest_wanted:
            return Waits("The trainer sleeps until a client calls /wake_up.", "paused_capacity")
        if engine.phase == Phase.BOOTING:
            base = "" if engine.started is None else engine.started.base
            return Waits(f"The trainer is loading {base}.", "paused_capacity")
        queued, model = self.clients.operation(name), self.clients.models.get(name.rpartition(":")[0])
        if queued is None or model is None:
            return Waits("", "active")
        if model.suspended:
            return Waits(f"The model cannot continue now: {model.suspended}", "paused_capacity")
        before = sum(each.waits and each.number < queued.number for each in model.operations.values())
        others = self.clients.waiting - model.waiting
        return Waits(f"{before} operations of this model come first, and {others} of other models wait too.", "active")

    async def _submission(self, model: str, queued: Queued | None) -> Submission:
        """Return the submission of an operation, without its data, as far as the result's writer needs it."""
        unknown_one = Submission(model=model, seq=0, operation=EndModel())
        if queued is None or queued.body is None:
            return unknown_one
        name = f"{model}:{queued.key}"
        known = self._submitted.get((name, queued.body.digest))
        if known is not None:
            return known
        try:
            operation = decode_operation(await self._parts.fetch(queued.body))
        except LogCorrupted:  # results outlive the bodies of their operations
            return unknown_one
        known = Submission(
            model=model, seq=0, operation=_without_data(operation), sampling_session=_sampling_session(model, operation)
        )
        self._remember(name, queued.body.digest, known)
        return known


def _on_the_log(submission: Submission) -> Operation:
    """Return the operation to put on the log: a refused one becomes `Rejected`, which keeps its place in the order."""
    operation = submission.operation
    return Rejected(failure=operation, counts=submission.counts) if isinstance(operation, Failed) else operation


def _is_numbered(submission: Submission) -> bool:
    """Return whether a request has a number that is unique among the requests to its model."""
    return is_tinkers(submission.model) and not isinstance(submission.operation, EndModel)


def _is_passive(operation: Operation) -> bool:
    """Return whether an operation leaves its model unchanged."""
    return isinstance(operation, SaveWeights) or (isinstance(operation, ForwardBackward) and operation.forward_only)


def _without_data(operation: Operation) -> Operation:
    return msgspec.structs.replace(operation, data=()) if isinstance(operation, ForwardBackward) else operation


def _sampling_session(model: str, operation: Operation) -> str:
    """Return the sampling session that was begun with an unnamed save, from the name of its checkpoint, or ""."""
    if not isinstance(operation, SaveWeights) or not is_tinkers(model):
        return ""
    number = operation.name.removeprefix(UNNAMED_SAMPLE).removeprefix(INFLIGHT_SAMPLE)
    is_unnamed = operation.checkpoint == CheckpointKind.SAMPLER and number != operation.name and number.isdigit()
    return sampling_session(session_of(model), int(number)) if is_unnamed else ""
