"""Puts training clients' operations on the log. The module `results` sends the results to the clients."""

import uuid
from collections.abc import Callable

import msgspec

from bombus.bus.large.parts import Parts
from bombus.errors import Code, Refused
from bombus.hive import inbox
from bombus.hive.bounded import trim
from bombus.hive.events import kind_of
from bombus.hive.operations.state import Queued, TrainingClients
from bombus.hive.records import digest
from bombus.hive.shares import trim_fairly
from bombus.hive.state import EngineState
from bombus.operations import (
    Category,
    CreateModel,
    EndModel,
    Failed,
    ForwardBackward,
    LoadWeights,
    Operation,
    OptimStep,
    Rejected,
    SaveWeights,
    encode_operation,
)
from bombus_gateway.call.workers import CLIENTS
from bombus_gateway.context import Gateway
from bombus_gateway.limits import in_short
from bombus_gateway.operations.catching_up import catch_up
from bombus_gateway.operations_wire.dialects import is_tinkers
from bombus_gateway.operations_wire.submission import Submission

ATTEMPTS_MAX = 4
REPEAT_S = 30.0  # time within which an equal request of xorl's client is a repeat; nothing else marks one
END_STEM = "end."  # the prefix of the keys of requests that end a model of Tinker's clients
REMEMBERED = 10_000

# Temporary refusals. Clients retry these themselves, but they do not retry after a failed future.
_PASSING = (Code.QUOTA, Code.OVERLOADED, Code.STORAGE_FULL, Code.BUS_DOWN)
# Refusals after which no failure can be put on the log: there is no such model, or another operation has the key.
_WITHOUT_PLACE = (Code.OTHER_BODY, Code.UNKNOWN_MODEL, Code.UNKNOWN_SESSION, Code.SESSION_OVER)


class OperationLog:
    """The operations of one engine, as its training clients see them.

    The id of a request is the id of its operation on the log, `MODEL:KEY`, so every gateway can answer for it. An
    operation that could not be put on the log is remembered as a failure, but only by this gateway.
    """

    def __init__(self, gateway: Gateway, engine: str, repeat_s: float = REPEAT_S) -> None:
        self._gateway = gateway
        self.engine = engine
        self._repeat_s = repeat_s
        self._parts = Parts(gateway.bus)
        self._failures: dict[str, tuple[str, Failed]] = {}  # by operation id, each with the owner of the client's key
        # A forgotten session frees its names for reuse, so an id alone does not identify an operation.
        self._submitted: dict[tuple[str, bytes], Submission] = {}  # by id and body digest, without the operations' data
        self._delivered: dict[int, None] = {}  # arrival numbers of operations whose results were sent

    @property
    def state(self) -> EngineState:
        return self._gateway.follower.hive.engines.get(self.engine) or EngineState(name=self.engine)

    @property
    def clients(self) -> TrainingClients:
        return self.state.clients

    async def until(self, holds: Callable[[], bool], limit_s: float) -> bool:
        """Wait until `holds` returns true for the folded state. Return False if the limit expires first."""
        try:
            await self._gateway.follower.wait_for(lambda _: holds(), limit_s)
        except TimeoutError:
            return False
        return True

    async def submit(self, session: str, submission: Submission, base: str = "", owner: str = "") -> str:
        """Put an operation on the log, and return the id of its future. When this returns, the operation is durable.

        `owner` is the name of the client's key, and `session` is "" if the client has no such model. An operation that
        cannot be executed becomes a failed future. Raises `Refused` if the client has to retry later, and
        `BusUnavailable` if the bus cannot be reached.
        """
        model, failure = submission.model, submission.operation
        operation = _on_the_log(submission)
        body = encode_operation(operation)
        known = self.clients.models.get(model)
        whose = f"{owner}/{0 if known is None else known.opened_ns}/".encode()
        own = (await self._gateway.workers.run(CLIENTS, len(body), lambda: digest(whose + body))).hex()[:8]
        own_name = f"{model}:{submission.seq}:{own}"  # differs from the id of any operation accepted later
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
        self.remember(name, stored, msgspec.structs.replace(submission, operation=without_data(operation)))
        return name

    async def _accepted(
        self, session: str, submission: Submission, operation: Operation, body: bytes, base: str
    ) -> tuple[str, bytes]:
        """Store the body, and have the operation accepted under its own key.

        Returns the id of the operation and the digest of its body.
        """
        model, may_repeat = submission.model, True
        for attempt in range(1, ATTEMPTS_MAX + 1):
            ref = await self._parts.store(self._gateway.bus.subjects.operation(self.engine, model), body)
            if not _is_numbered(submission):
                await catch_up(self._gateway.follower)  # the operation's key depends on earlier operations
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
                # An operation with another body has this key, or the repeat came too late.
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

        Tinker's clients number the requests to a model, except the request that ends it. In xorl's client, each object
        numbers its own requests, and several objects may use one model, concurrently or in turn. An object sends no
        request before its previous one is answered. So an equal number means a repeat only if the body is equal too, no
        other operation came in between, and the request arrives within seconds. The coordinator checks the time, by the
        clock of the log. A batch or a step is never a repeat if it has no number or if its result was already read,
        since a client may intentionally send equal requests. A save or an end that failed changed nothing, so an equal
        request executes it again.
        """
        if _is_numbered(submission):
            return str(submission.seq)
        model = self.clients.models.get(submission.model)
        stem = END_STEM if is_tinkers(submission.model) else f"{submission.seq}."
        before = [] if model is None else [each for each in model.operations.values() if each.key.startswith(stem)]
        if model is None or not before:
            return f"{stem}1"
        newest = before[-1]
        of_this_model = newest.number >= model.begun  # not of an earlier model with this name
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

    def remember(self, name: str, body_digest: bytes, submission: Submission) -> None:
        """Remember an operation's submission, without its data, so that its result can be written later."""
        self._submitted[name, body_digest] = submission
        trim(self._submitted, REMEMBERED)

    def submission_of(self, name: str, body_digest: bytes) -> Submission | None:
        """Return the remembered submission of an operation, without its data."""
        return self._submitted.get((name, body_digest))

    def note_delivered(self, queued: Queued) -> None:
        """Note that the client has received the result: an equal request that follows is a new operation."""
        self._delivered[queued.arrival] = None
        trim(self._delivered, REMEMBERED)

    def _remember_failure(self, name: str, failure: Failed, owner: str) -> str:
        self._failures[name] = (owner, failure)
        trim_fairly(self._failures, REMEMBERED, lambda remembered: remembered[0])
        return name

    def failure_of(self, name: str) -> tuple[str, Failed] | None:
        """Return the owner of the key that sent an operation, and why the operation could not be put on the log."""
        return self._failures.get(name)


def _on_the_log(submission: Submission) -> Operation:
    """Return the operation to put on the log. A refused operation becomes `Rejected`, so that it keeps its place in the
    order."""
    operation = submission.operation
    return Rejected(failure=operation, counts=submission.counts) if isinstance(operation, Failed) else operation


def _is_numbered(submission: Submission) -> bool:
    """Return whether a request has a number that is unique among the requests to its model."""
    return is_tinkers(submission.model) and not isinstance(submission.operation, EndModel)


def _is_passive(operation: Operation) -> bool:
    """Return whether an operation leaves its model unchanged."""
    return isinstance(operation, SaveWeights) or (isinstance(operation, ForwardBackward) and operation.forward_only)


def without_data(operation: Operation) -> Operation:
    """Return an operation without the data that it trains on."""
    return msgspec.structs.replace(operation, data=()) if isinstance(operation, ForwardBackward) else operation
