"""Sessions of training clients. Tinker's clients open one session and send heartbeats; xorl's have one for each
model."""

import uuid
from typing import Any

import msgspec

from bombus.errors import Code, Refused
from bombus.hive import inbox
from bombus.hive.operations.owners import is_anothers_name, seen_model, seen_session
from bombus.hive.operations.state import ClientModel, TrainingSession
from bombus.hive.records import digest
from bombus.hive.state import EngineState, Phase
from bombus.machine.host_names import RawHeaders
from bombus_gateway.access import KeyHolder
from bombus_gateway.context import Gateway
from bombus_gateway.decoding.json_body import decode_body
from bombus_gateway.operations.bases import Bases, base_names, is_replaceable, plain_job
from bombus_gateway.operations.catching_up import catch_up, found
from bombus_gateway.operations.listings import found_session
from bombus_gateway.operations.operation_log import OperationLog
from bombus_gateway.operations_wire.dialects import TrainingDialect, is_tinkers, session_of
from bombus_gateway.operations_wire.submission import DEFAULT_MODEL, ModelAddress

XORL_IDLE_S = 7200.0  # long, since xorl's clients send no heartbeats between requests
DETAIL_CHARACTERS = 500


class _NewSession(msgspec.Struct):
    tags: list[str] = []
    user_metadata: dict[str, Any] = {}
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class _Reason(msgspec.Struct, frozen=True):
    type: str = ""


class _Finish(msgspec.Struct):
    reason: _Reason = _Reason()
    detail: str | None = None


_new_sessions = msgspec.json.Decoder(_NewSession)
_finishes = msgspec.json.Decoder(_Finish)
_named = msgspec.json.Decoder(ModelAddress)


class Sessions:
    """The sessions of one engine."""

    def __init__(self, gateway: Gateway, operations: OperationLog, bases: Bases) -> None:
        self._gateway = gateway
        self._operations = operations
        self._bases = bases

    async def open(self, body: bytes, holder: KeyHolder, request_key: str) -> str:
        """Open a session for Tinker's client. A repeated request, which has the same key, gets the same session."""
        given = decode_body(_new_sessions, body)
        metadata = {name: value for name, value in msgspec.structs.asdict(given).items() if value}
        named = digest(f"{holder.name}/{request_key}".encode()).hex()[:16] if request_key else uuid.uuid4().hex[:16]
        return await self._open(f"s-{named}", TrainingDialect.TINKER, holder, metadata)

    async def open_for_model(self, holder: KeyHolder) -> str:
        """Open a session for one model of xorl's client. The session ends when the model does."""
        return await self._open(f"x-{uuid.uuid4().hex[:16]}", TrainingDialect.XORL, holder, {})

    async def _open(self, session: str, dialect: TrainingDialect, holder: KeyHolder, metadata: dict[str, Any]) -> str:
        is_xorls = dialect == TrainingDialect.XORL
        command = inbox.OpenSession(
            id=uuid.uuid4().hex,
            engine=self._operations.engine,
            session=session,
            idle_s=XORL_IDLE_S if is_xorls else 0.0,
            owner=holder.name,
            dialect=dialect.value,
            metadata=metadata,
            for_model=is_xorls,
            admin=holder.admin,
        )
        await self._gateway.carry_out(command)
        return session

    async def beat(self, body: bytes, holder: str) -> None:
        """Record a heartbeat.

        Raises `Refused` SESSION_OVER if the session has ended or is unknown; the client then stops sending heartbeats.
        """
        session = beating_name(body)
        known = await found(self._gateway.follower, lambda: self._beating(session, holder))
        self._gateway.heartbeats.touch_session(self._operations.engine, known.session)

    def _beating(self, name: str, holder: str) -> TrainingSession:
        model = seen_model(self._operations.clients, name, holder)  # xorl's clients call their model a session
        known = seen_session(self._operations.clients, name if model is None else model.session, holder)
        if known is None or known.ended is not None:
            raise Refused(Code.SESSION_OVER, f"Session {name[:100]} has ended; open a new one.")
        return known

    def waits_for(self, operation: str, holder: str) -> None:
        """Count a client's request for the result of an operation as a heartbeat of its session."""
        model = seen_model(self._operations.clients, operation.rpartition(":")[0], holder)
        session = None if model is None else self._operations.clients.sessions.get(model.session)
        if session is not None and session.ended is None:
            self._gateway.heartbeats.touch_session(self._operations.engine, session.session)

    async def finish(self, session: str, body: bytes, holder: str) -> None:
        """End a session. Its models are saved and end after their pending operations."""
        given = decode_body(_finishes, body or b"{}")
        await self.found(session, holder)
        detail = " ".join(part for part in (given.reason.type, given.detail or "") if part)[:DETAIL_CHARACTERS]
        close = inbox.CloseSession(id=uuid.uuid4().hex, engine=self._operations.engine, session=session, detail=detail)
        await self._gateway.carry_out(close)

    async def found(self, session: str, holder: str) -> TrainingSession:
        """Return a session. Raises `Refused` UNKNOWN_SESSION if the holder of a key has no such session."""
        return await found(self._gateway.follower, lambda: found_session(self._operations.clients, session, holder))

    async def model(self, name: str, holder: str) -> ClientModel | None:
        """Return a model that belongs to the holder of a key, or None if there is no such model."""
        known = seen_model(self._operations.clients, name, holder)
        if known is None or known.closed is not None:  # it may have been created through another gateway
            await catch_up(self._gateway.follower)
            known = seen_model(self._operations.clients, name, holder)
        return known

    async def of_model(self, model: str, holder: str) -> str:
        """Return the session of a model, or "" if there is no such model."""
        known = await self.model(model, holder)
        return "" if known is None else known.session

    async def check_new(self, model: str, holder: str) -> None:
        """Raise `Refused` unless the holder of a key may create a model with this name.

        xorl's clients choose the names of their models. A name belongs to its client for as long as a model or a
        checkpoint with that name exists.
        """
        if is_tinkers(model):
            await self.found(session_of(model), holder)
            return
        await catch_up(self._gateway.follower)
        if is_anothers_name(self._operations.clients, model, holder):
            raise Refused(
                Code.MODEL_EXISTS, f"The name {model[:100]} is in use by another client: give another model_id."
            )

    async def begin_sampling(self, session: str, base: str, headers: RawHeaders) -> None:
        """Prepare a session to sample from a base, or from checkpoints based on it. Start a run if the engine is
        offline.

        Do nothing if a run of another kind is active. Raises the same errors as `base`, and `Refused` if the engine
        serves another base.
        """
        engine, known = self._operations.state, self._operations.clients.sessions.get(session)
        if engine.phase != Phase.OFFLINE and not engine.serves_operations:
            return
        name = await self.base(base, headers)
        is_noted = known is not None and engine.phase != Phase.OFFLINE and known.samples_in == engine.run
        if is_noted and name in base_names(engine):
            return
        begin = inbox.BeginSampling(id=uuid.uuid4().hex, engine=engine.name, session=session, base=name)
        await self._gateway.carry_out(begin)

    def may_configure(self, headers: RawHeaders) -> bool:
        """Return whether a client that sent these headers may give an engine a job."""
        return self._gateway.control.refusal(headers) is None

    async def base(self, wanted: str, headers: RawHeaders) -> str:
        """Return the engine's name for the base that a client names. `headers` are those of the client's request.

        If the engine has no job, or is offline with a job that a gateway made for another base, this configures the
        engine with a job for the wanted base. Raises `Refused` if the job to be replaced was not made by a gateway, or
        if the client may not configure the engine. A client may do so if it has the admin key, if the hive has no admin
        key, or if the operator named the base.
        """
        engine = self._operations.state
        names = base_names(engine)
        if not names or (engine.phase == Phase.OFFLINE and wanted not in names):
            may_configure = self._bases.leads_to(wanted) or self.may_configure(headers)
            if not may_configure or not is_replaceable(engine.configured):
                raise Refused(Code.UNKNOWN_MODEL, _other_base(engine, wanted, may_configure))
            by = self._gateway.sender_of(headers)
            await self._gateway.carry_out(plain_job(wanted).to_command(uuid.uuid4().hex, engine.name, by))
            return wanted
        return names[0] if wanted in names else wanted


def beating_name(body: bytes) -> str:
    """Return the session that a heartbeat names. xorl's clients may name their model instead of a session."""
    given = decode_body(_named, body)
    return given.session_id or given.model_id or DEFAULT_MODEL


def _other_base(engine: EngineState, wanted: str, may_configure: bool) -> str:
    job = engine.configured
    here = "has no job yet" if job is None else f"has a job for models on {job.model}"
    why = f"Engine {engine.name} {here}, and {wanted[:200]} is another base."
    if not may_configure:
        return f"{why} Someone with the hive's admin key can configure it with a job whose model.path names that base."
    return f"{why} Use the base of that job, or configure the engine with a job whose model.path names yours."
