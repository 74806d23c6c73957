"""The routes of training clients, below `/api/v1`, in the dialects of Tinker and xorl.

A request for an operation is answered with the id of its future as soon as the operation is durable. If the request is
invalid, the future reports the failure: the request's number is used up, and the client continues with the next number.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
from fastapi import Request, Response

from bombus.errors import Code, Refused
from bombus.hive import inbox
from bombus.hive.operations.owners import is_anothers_name, seen_by, seen_session
from bombus.hive.operations.state import ClientModel, KeptWeights, TrainingClients
from bombus.hive.state import Phase
from bombus.operations import Category, CheckpointKind, CreateModel, Failed, LoadWeights, ModelEnded
from bombus_gateway.bodies import SIGN, TRAINING
from bombus_gateway.call.calls import Calls
from bombus_gateway.context import Gateway
from bombus_gateway.decoding.json_body import decode_body
from bombus_gateway.operations.bases import Bases, base_names, job_of
from bombus_gateway.operations.bodies import answered, names_in
from bombus_gateway.operations.catching_up import found
from bombus_gateway.operations.endpoints.routes import EndpointRoutes
from bombus_gateway.operations.full_weights import RegisteredModel, adapter_defaults, rate_defaults
from bombus_gateway.operations.listings import (
    checkpoints_of,
    found_checkpoint,
    found_model,
    has_adapter,
    lora_fields,
    own_checkpoint,
    page,
    run_entry,
    weights_entry,
)
from bombus_gateway.operations.operation_log import OperationLog
from bombus_gateway.operations.rest.routes import RestRoutes
from bombus_gateway.operations.rest.searching import session_entry
from bombus_gateway.operations.results import HOLD_S, OperationResults, Waits
from bombus_gateway.operations.sampling.futures import SampleFutures
from bombus_gateway.operations.sampling.routes import SamplingRoutes
from bombus_gateway.operations.sessions import XORL_IDLE_S, Sessions, beating_name
from bombus_gateway.operations_wire.checkpoints import read_load, read_save, read_weights_info
from bombus_gateway.operations_wire.data.forward_backward import read_forward_backward
from bombus_gateway.operations_wire.data.json_data import read_json_data
from bombus_gateway.operations_wire.dialects import TrainingDialect, dialect_of, session_of
from bombus_gateway.operations_wire.futures import accepted, read_retrieve
from bombus_gateway.operations_wire.models import read_create_by_load, read_create_model, read_end_model
from bombus_gateway.operations_wire.paths import CheckpointPath, path_of_operation, read_path
from bombus_gateway.operations_wire.results import kill_session_answer
from bombus_gateway.operations_wire.steps import read_abort_epoch, read_optim_step
from bombus_gateway.operations_wire.submission import DEFAULT_MODEL, Submission
from bombus_gateway.plain_routes import JsonResponse, PlainRoute, below, checked

# Chunks of one request are sent in order, so that repeating a run gives bitwise identical results.
CLIENT_CONFIG = {"parallel_fwdbwd_chunks": False, "proto_compress_fwdbwd": True}
LAST_S = 600.0  # time for pending operations, and for creating or saving the model
DYNAMIC_CONFIG = {"refresh_interval_sec": 300, "sample_cancel_enabled": False, "sample_cancel_max_batch_size": 64}

_T = TypeVar("_T")


class _Asked(msgspec.Struct):
    model_id: str | None = None
    checkpoint_id: str | None = None


_asked = msgspec.json.Decoder(_Asked)


def training_routes(gateway: Gateway, calls: Calls, engine: str) -> list[PlainRoute]:
    """Return the routes of one engine's training clients, to be mounted below the engine's prefix."""
    bases = Bases(gateway.settings.bases)
    operations = OperationLog(gateway, engine)
    sessions = Sessions(gateway, operations, bases)
    sampling = SamplingRoutes(gateway, calls, engine, bases, sessions)
    routes = TrainingRoutes(gateway, operations, sessions, sampling.futures, bases)
    table = [
        PlainRoute("POST", "/client/config", routes.client_config),
        PlainRoute("POST", "/client/dynamic_config", routes.dynamic_config),
        PlainRoute("POST", "/telemetry", routes.telemetry),
        PlainRoute("GET", "/healthz", routes.healthz),
        PlainRoute("GET", "/get_server_capabilities", routes.capabilities),
        PlainRoute("POST", "/create_session", routes.create_session),
        PlainRoute("POST", "/session_heartbeat", routes.session_heartbeat),
        PlainRoute("POST", "/sessions/{session}/finish", routes.finish_session),
        PlainRoute("GET", "/sessions", routes.list_sessions),
        PlainRoute("GET", "/sessions/{session}", routes.show_session),
        PlainRoute("POST", "/create_model", routes.create_model),
        PlainRoute("POST", "/forward_backward", routes.forward_backward),
        PlainRoute("POST", "/forward", routes.forward),
        PlainRoute("POST", "/optim_step", routes.optim_step),
        PlainRoute("POST", "/abort_gradient_epoch", routes.abort_epoch),
        PlainRoute("POST", "/save_weights", routes.save_weights),
        PlainRoute("POST", "/save_weights_for_sampler", routes.save_for_sampler),
        PlainRoute("POST", "/save_weights_external", routes.save_external),
        PlainRoute("POST", "/load_weights", routes.load_weights),
        PlainRoute("POST", "/unload_model", routes.unload_model),
        PlainRoute("POST", "/kill_session", routes.kill_session),
        PlainRoute("GET", "/session_info", routes.session_info),
        PlainRoute("POST", "/retrieve_future", routes.retrieve_future),
        PlainRoute("POST", "/get_info", routes.get_info),
        PlainRoute("POST", "/weights_info", routes.weights_info),
        PlainRoute("GET", "/training_runs", routes.training_runs),
        PlainRoute("GET", "/training_runs/{model}", routes.training_run),
        PlainRoute("GET", "/training_runs/{model}/checkpoints", routes.run_checkpoints),
        PlainRoute("DELETE", "/training_runs/{model}/checkpoints/{kind}/{name}", routes.delete_named),
        PlainRoute("GET", "/checkpoints", routes.all_checkpoints),
        PlainRoute("POST", "/list_checkpoints", routes.list_checkpoints),
        PlainRoute("POST", "/delete_checkpoint", routes.delete_checkpoint),
        *sampling.routes(),
        *routes.rest.routes(),
    ]
    clients = [PlainRoute("POST", "/generate", sampling.generate), *routes.endpoints.routes(), *below("/api/v1", table)]
    return [
        *checked(clients, gateway.clients, gateway.check_ready),
        *checked(routes.endpoints.controlling(), gateway.control, gateway.check_ready),
        *checked(routes.rest.links(), gateway.check_ready),
    ]


class TrainingRoutes:
    def __init__(
        self, gateway: Gateway, operations: OperationLog, sessions: Sessions, samples: SampleFutures, bases: Bases
    ) -> None:
        self._gateway = gateway
        self._bases = bases
        self._operations = operations
        self._results = OperationResults(gateway, operations)
        self._sessions = sessions
        self._samples = samples
        self._registered = RegisteredModel(operations, sessions)
        self.endpoints = EndpointRoutes(gateway, operations, self._registered)
        self.rest = RestRoutes(gateway, self._operations)

    # ---- the client and its session -------------------------------------------------------------------------------

    async def client_config(self, request: Request) -> Response:
        return JsonResponse(CLIENT_CONFIG)

    async def dynamic_config(self, request: Request) -> Response:
        return JsonResponse(DYNAMIC_CONFIG)

    async def telemetry(self, request: Request) -> Response:
        """Accept a client's telemetry and discard it."""
        await self._gateway.bodies.read(request, TRAINING, len)
        return JsonResponse({"status": "accepted"})

    async def healthz(self, request: Request) -> Response:
        engine = self._operations.state
        counts = {"active_requests": engine.clients.waiting, "total_requests": engine.clients.accepted}
        return JsonResponse({"status": "ok", "engine_running": engine.phase != Phase.OFFLINE, **counts})

    async def capabilities(self, request: Request) -> Response:
        may_configure = self._sessions.may_configure(request.scope["headers"])
        names = self._bases.names_of(self._operations.state, may_configure)
        known = {
            "max_context_length": self._context(),
            "trainable": True,
            "sampleable": bool(self._operations.state.usable),
        }
        return JsonResponse({"supported_models": [{"model_name": name, **known} for name in names]})

    def _context(self) -> int | None:
        """Return the length of the longest sequence that the job and the replicas allow, or None if there is neither a
        job nor a replica."""
        engine = self._operations.state
        job = job_of(engine)
        lengths = [replica.sequence_tokens for replica in engine.usable.values() if replica.sequence_tokens]
        configured = [] if job is None else [job.rollout.max_model_len]
        return min([*lengths, *configured], default=None)

    async def create_session(self, request: Request) -> Response:
        body = await self._gateway.bodies.small(request)
        if dialect_of("create_session", "", names_in(body)) == TrainingDialect.XORL:
            return await self._create_for_session(request, body)
        key = request.headers.get("x-idempotency-key", "")
        session = await self._sessions.open(body, self._gateway.key_of(request), key)
        return JsonResponse({"type": "create_session", "session_id": session})

    async def _create_for_session(self, request: Request, body: bytes) -> Response:
        """Create what xorl's clients call a session, which is a model here, and answer once it exists."""
        submission = read_create_model(TrainingDialect.XORL, body, adapter_defaults(self._operations.state))
        known = await self._sessions.model(submission.model, self._gateway.holder_of(request))
        about = {"type": "create_session", "session_id": submission.model, "model_id": submission.model}
        if known is not None and known.closed is None:
            return JsonResponse({**about, "success": True, "message": f"The session of {submission.model} is open."})
        name = await self._accepted(request, submission, TrainingDialect.XORL)
        outcome = await self._results.outcome(name, LAST_S)
        if isinstance(outcome, Failed):
            is_users = outcome.category == Category.USER
            raise Refused(Code.BAD_CONFIG if is_users else Code.INTERNAL, outcome.error)
        message = outcome.reason if isinstance(outcome, Waits) else f"The session of {submission.model} is open."
        return JsonResponse(
            {**about, "success": not isinstance(outcome, Waits), "message": message, "request_id": name}
        )

    async def session_heartbeat(self, request: Request) -> Response:
        body, holder = await self._gateway.bodies.read(request, SIGN, bytes), self._gateway.holder_of(request)
        if not self._registered.unborn(beating_name(body), holder):
            await self._sessions.beat(body, holder)
        return JsonResponse({"type": "session_heartbeat"})

    async def finish_session(self, request: Request) -> Response:
        session, body = request.path_params["session"], await self._gateway.bodies.small(request)
        await self._sessions.finish(session, body, self._gateway.holder_of(request))
        return JsonResponse({})

    async def list_sessions(self, request: Request) -> Response:
        sessions, _ = page(self._seen(request).sessions, request.query_params)
        return JsonResponse({"sessions": sessions})

    async def show_session(self, request: Request) -> Response:
        known = await self._sessions.found(request.path_params["session"], self._gateway.holder_of(request))
        return JsonResponse(session_entry(self._operations.clients, known))

    # ---- operations -----------------------------------------------------------------------------------------------

    async def create_model(self, request: Request) -> Response:
        body = await self._gateway.bodies.small(request)
        dialect = dialect_of("create_model", "", names_in(body))
        submission = read_create_model(dialect, body, adapter_defaults(self._operations.state))
        holder = self._gateway.holder_of(request)
        there = self._registered.existing(submission.model, holder)
        if there is None and dialect == TrainingDialect.XORL:
            there = await self._equal(submission, holder)
        if there is None:
            return await self._create(request, submission, dialect)
        made = next((each for each in there.operations.values() if each.number == there.begun), None)
        if made is not None and (made.waits or made.result is not None):
            return answered(accepted(f"{there.name}:{made.key}", there.name))
        return JsonResponse({"model_id": there.name, "status": "created", "type": "create_model"})

    async def _equal(self, submission: Submission, holder: str) -> ClientModel | None:
        """Return the model that xorl's client wants to create if an identical one already exists, or None otherwise."""
        known, wanted = await self._sessions.model(submission.model, holder), submission.operation
        if known is None or known.closed is not None or not isinstance(wanted, CreateModel):
            return None
        if known.executed == 0:  # the adapter is known only once the model is created
            await self._operations.until(lambda: known.executed > 0 or known.closed is not None, HOLD_S)
        names = (known.base, *base_names(self._operations.state))
        is_of_base = self._bases.path_of(wanted.base) in names and known.base in names
        return known if is_of_base and known.closed is None and has_adapter(known, wanted.adapter) else None

    async def forward_backward(self, request: Request) -> Response:
        return await self._forward(request, forward_only=False)

    async def forward(self, request: Request) -> Response:
        return await self._forward(request, forward_only=True)

    async def _forward(self, request: Request, forward_only: bool) -> Response:
        is_tinkers = dialect_of("forward_backward", request.headers.get("content-type", ""), ()) == "tinker"
        read = read_forward_backward if is_tinkers else partial(read_json_data, forward_only=forward_only)
        return await self._submitted(request, await self._gateway.bodies.read(request, TRAINING, read))

    async def optim_step(self, request: Request) -> Response:
        body = await self._gateway.bodies.small(request)
        step = read_optim_step(_dialect("optim_step", body), body, rate_defaults(self._operations.state))
        return await self._submitted(request, step)

    async def abort_epoch(self, request: Request) -> Response:
        return await self._submitted(request, read_abort_epoch(await self._gateway.bodies.small(request)))

    async def save_weights(self, request: Request) -> Response:
        return await self._save(request, CheckpointKind.TRAINING)

    async def save_for_sampler(self, request: Request) -> Response:
        return await self._save(request, CheckpointKind.SAMPLER)

    async def save_external(self, request: Request) -> Response:
        return await self._save(request, CheckpointKind.EXTERNAL)

    async def _save(self, request: Request, kind: CheckpointKind) -> Response:
        body = await self._gateway.bodies.small(request)
        return await self._submitted(request, read_save(_dialect("save_weights", body), kind, body))

    async def load_weights(self, request: Request) -> Response:
        body = await self._gateway.bodies.small(request)
        if "model_seq_id" in names_in(body):
            return await self._create(request, read_create_by_load(body), TrainingDialect.TINKER)
        return await self._submitted(request, read_load(_dialect("load_weights", body), body))

    async def unload_model(self, request: Request) -> Response:
        return await self._submitted(request, read_end_model(await self._gateway.bodies.small(request)))

    async def kill_session(self, request: Request) -> Response:
        """End a model of xorl's client, and answer once it has ended."""
        body = await self._gateway.bodies.small(request)
        asked, holder = read_end_model(body).model, self._gateway.holder_of(request)
        model = await self._sessions.model(asked, holder)
        if model is None and self._registered.unborn(asked, holder):
            return JsonResponse(
                {"success": True, "message": f"{asked} still has the weights of its base: no client has used it yet."}
            )
        submission = read_end_model(body, "" if model is None else _ended_name(model))
        name = await self._operations.submit("" if model is None else model.session, submission, owner=holder)
        outcome = await self._results.outcome(name, LAST_S)
        if isinstance(outcome, ModelEnded | Failed):
            return JsonResponse(kill_session_answer(TrainingDialect.XORL, submission.model, outcome))
        why = outcome.reason if isinstance(outcome, Waits) else "Its outcome is no longer known."
        return JsonResponse({"success": False, "message": f"{submission.model} has not ended yet. {why}"})

    async def session_info(self, request: Request) -> Response:
        clients = self._seen(request)
        models = [model.name for model in clients.open_models]
        activity = {model.name: model.last_ns / 1e9 for model in clients.open_models}
        adapters = [model.name for model in clients.open_models if model.adapter is not None]
        answer = {
            "registered_models": self._registered.names(self._gateway.holder_of(request)),
            "active_sessions": models,
            "session_activity": activity,
            "idle_timeout_seconds": XORL_IDLE_S,
            "loaded_adapters": adapters,
        }
        return JsonResponse(answer)

    async def retrieve_future(self, request: Request) -> Response:
        asked, holder = read_retrieve(await self._gateway.bodies.small(request)), self._gateway.holder_of(request)
        self._sessions.waits_for(asked.id, holder)
        if self._samples.knows(asked.id, holder):
            return answered(await self._samples.result(asked, HOLD_S))
        return answered(await self._results.result(asked, holder))

    async def _create(self, request: Request, submission: Submission, dialect: TrainingDialect) -> Response:
        return answered(accepted(await self._accepted(request, submission, dialect), submission.model))

    async def _accepted(self, request: Request, submission: Submission, dialect: TrainingDialect) -> str:
        """Put the creation of a model on the log, and return the id of its future."""
        operation, base, owner = submission.operation, "", self._gateway.holder_of(request)
        if isinstance(operation, CreateModel):
            try:
                await self._sessions.check_new(submission.model, owner)
                wanted = self._bases.path_of(operation.base)
                if operation.checkpoint:
                    kept = await self._checkpoint(path_of_operation(operation.checkpoint), owner)
                    wanted = wanted or kept.noted.base
                base = await self._sessions.base(wanted, request.scope["headers"])
                operation = msgspec.structs.replace(operation, base=base)
            except Refused as refusal:
                operation = Failed(error=refusal.why, category=Category.USER)
            submission = msgspec.structs.replace(submission, operation=operation)
        known = seen_session(self._operations.clients, session_of(submission.model), owner)
        session = "" if known is None else known.session
        if dialect == TrainingDialect.XORL:
            model = await self._sessions.model(submission.model, owner)
            session = "" if model is None or model.closed is not None else model.session
            if not session and not isinstance(operation, Failed):
                session = await self._sessions.open_for_model(self._gateway.key_of(request))
        return await self._operations.submit(session, submission, base, owner)

    async def _found(self, find: Callable[[], _T]) -> _T:
        return await found(self._gateway.follower, find)

    async def _model(self, name: str, holder: str) -> ClientModel:
        return await self._found(lambda: found_model(self._operations.clients, name, holder))

    async def _described(self, name: str, holder: str) -> ClientModel:
        """Return a model. This may be the registered default model, even if no client has used it yet."""
        known = await self._sessions.model(name, holder)
        return known or self._registered.unborn(name, holder) or await self._model(name, holder)

    async def _checkpoint(self, path: CheckpointPath, holder: str) -> KeptWeights:
        return await self._found(lambda: found_checkpoint(self._operations.clients, path, holder))

    async def _submitted(self, request: Request, submission: Submission) -> Response:
        owner = self._gateway.holder_of(request)
        await self._registered.create_for(submission, owner)
        session = await self._sessions.of_model(submission.model, owner)
        if isinstance(submission.operation, LoadWeights) and owner:
            submission = await self._readable(submission, submission.operation, owner)
        return answered(accepted(await self._operations.submit(session, submission, owner=owner), submission.model))

    async def _readable(self, submission: Submission, load: LoadWeights, holder: str) -> Submission:
        """Return the submission of the load, or a failed one if the client may not read the checkpoint.

        If the client owns the checkpoint's model, the load does not fail here: a pending operation may still save the
        checkpoint.
        """
        path = path_of_operation(load.checkpoint)
        try:
            await self._checkpoint(path, holder)
        except Refused as refusal:
            if (
                is_anothers_name(self._operations.clients, path.model, holder)
                or path.model not in self._operations.clients.models
            ):
                failure = Failed(error=refusal.why, category=Category.USER)
                return msgspec.structs.replace(submission, operation=failure)
        return submission

    # ---- models and checkpoints -----------------------------------------------------------------------------------

    async def get_info(self, request: Request) -> Response:
        given = decode_body(_asked, await self._gateway.bodies.small(request))
        model = await self._described(given.model_id or DEFAULT_MODEL, self._gateway.holder_of(request))
        name = self._bases.name_of(model.base)
        answer = {
            "type": "get_info",
            "model_id": model.name,
            "model_name": name,
            "optimizer_config": {"type": "adamw"},
            "model_data": {"model_name": name, "tokenizer_id": self._tokenizer(model.base)},
        }
        return JsonResponse(answer | lora_fields(model.adapter))

    def _tokenizer(self, base: str) -> str:
        """Return where a client finds the tokenizer: a folder if it is on this machine, otherwise the base."""
        ready = self._operations.state.weights
        if ready is None or ready.weights.objects or not Path(ready.weights.where, "tokenizer.json").is_file():
            return base
        return ready.weights.where

    async def weights_info(self, request: Request) -> Response:
        body = await self._gateway.bodies.small(request)
        given = decode_body(_asked, body)
        if given.model_id and not names_in(body) & {"tinker_path", "xorl_path"}:
            model = await self._described(given.model_id, self._gateway.holder_of(request))
            return JsonResponse(self._bases.with_names(weights_entry(model)))
        kept = await self._checkpoint(read_weights_info(body), self._gateway.holder_of(request))
        return JsonResponse(self._bases.with_names(weights_entry(kept.noted)))

    async def training_runs(self, request: Request) -> Response:
        clients = self._seen(request)
        runs, cursor = page(clients.models.values(), request.query_params)
        entries = [self._bases.with_names(run_entry(clients, model)) for model in runs]
        return JsonResponse({"training_runs": entries, "cursor": cursor})

    async def training_run(self, request: Request) -> Response:
        model = await self._model(request.path_params["model"], self._gateway.holder_of(request))
        return JsonResponse(self._bases.with_names(run_entry(self._operations.clients, model)))

    async def run_checkpoints(self, request: Request) -> Response:
        return JsonResponse({"checkpoints": checkpoints_of(self._seen(request), request.path_params["model"])})

    async def all_checkpoints(self, request: Request) -> Response:
        every, cursor = page(checkpoints_of(self._seen(request)), request.query_params)
        return JsonResponse({"checkpoints": every, "cursor": cursor})

    async def list_checkpoints(self, request: Request) -> Response:
        given = decode_body(_asked, await self._gateway.bodies.small(request))
        return JsonResponse({"checkpoints": checkpoints_of(self._seen(request), given.model_id or DEFAULT_MODEL)})

    async def delete_named(self, request: Request) -> Response:
        params = request.path_params
        await self._remove(f"{params['kind']}/{params['name']}", params["model"], self._gateway.holder_of(request))
        return Response(status_code=204)

    async def delete_checkpoint(self, request: Request) -> Response:
        given = decode_body(_asked, await self._gateway.bodies.small(request))
        try:
            model = given.model_id or DEFAULT_MODEL
            uri = await self._remove(given.checkpoint_id or "", model, self._gateway.holder_of(request))
        except Refused as refusal:
            return JsonResponse({"success": False, "error": refusal.why})
        return JsonResponse({"success": True, "deleted_path": uri})

    async def _remove(self, name: str, model: str, holder: str) -> str:
        path = read_path(name, model)
        await self._found(lambda: own_checkpoint(self._operations.clients, path, holder))
        remove = inbox.RemoveWeights(
            id=f"remove-{path}-{time.time_ns()}",
            engine=self._operations.engine,
            model=path.model,
            use=path.kind.value,
            name=path.name,
        )
        await self._gateway.carry_out(remove)
        return path.uri(TrainingDialect.XORL)

    def _seen(self, request: Request) -> TrainingClients:
        return seen_by(self._operations.clients, self._gateway.holder_of(request))


def _ended_name(model: ClientModel) -> str:
    """Return the name under which a model is saved when it is killed. Repeated requests get the same name."""
    opened = time.strftime("%Y%m%d-%H%M%S", time.gmtime(model.opened_ns / 1e9))
    return f"ended-{opened}-{model.opened_ns // 1000 % 10**6:06}"


def _dialect(route: str, body: bytes) -> TrainingDialect:
    given = decode_body(_asked, body)
    return dialect_of(route, "", names_in(body), given.model_id or "")
