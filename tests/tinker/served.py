"""A server of what we read and write alone: each operation has a result at its second poll, made from what it asks.

Nothing is trained, and nothing is stored: this is how the clients take what we send, before there are routes.
"""

import json
import socket
import threading
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from bombus.hive.records import FinishReason
from bombus.operations import (
    AbortEpoch,
    Array,
    CheckpointKind,
    CheckpointLoaded,
    CheckpointSaved,
    CreateModel,
    Datum,
    DType,
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
from bombus_gateway.operations_wire.checkpoints import read_load, read_save
from bombus_gateway.operations_wire.compression import decompressed
from bombus_gateway.operations_wire.data.forward_backward import read_forward_backward
from bombus_gateway.operations_wire.data.json_data import read_json_data
from bombus_gateway.operations_wire.dialects import PROTOBUF, TrainingDialect, dialect_of
from bombus_gateway.operations_wire.futures import (
    FutureAnswer,
    accepted,
    failed,
    json_answer,
    read_retrieve,
    ready,
    try_again,
    unknown,
)
from bombus_gateway.operations_wire.models import AdapterDefaults, read_create_by_load, read_create_model
from bombus_gateway.operations_wire.results import write_result
from bombus_gateway.operations_wire.samples import SampledTokens, unscored, write_samples
from bombus_gateway.operations_wire.sampling import (
    SampleSubmission,
    read_sample,
    read_sampling_session,
    sample_accepted,
)
from bombus_gateway.operations_wire.steps import read_abort_epoch, read_optim_step
from bombus_gateway.operations_wire.submission import Submission

SAVES = {
    "save_weights": CheckpointKind.TRAINING,
    "save_weights_for_sampler": CheckpointKind.SAMPLER,
    "save_weights_external": CheckpointKind.EXTERNAL,
}
FIXED: dict[str, dict[str, object]] = {
    "client/config": {"proto_compress_fwdbwd": True},
    "create_session": {"type": "create_session", "session_id": "S"},
    "session_heartbeat": {"type": "session_heartbeat"},
    "telemetry": {"status": "accepted"},
    "get_info": {"type": "get_info", "model_id": "S:train:0", "model_data": {"model_name": "b"}},
}


def scored(datum: Datum) -> dict[str, Array]:
    """Return logprobs that are minus the datum's first token, so that each can be told from the others."""
    targets = datum.inputs["target_tokens"]
    first = array("i", datum.tokens)[0]
    values = [-float(first)] * len(targets)
    terms = Array.of(DType.FLOAT32, [float(first)] * len(targets), targets.shape)
    return {"logprobs": Array.of(DType.FLOAT32, values, targets.shape), "elementwise_loss": terms}


def result_of(operation: Operation | Failed) -> Result:
    match operation:
        case Failed():
            return operation
        case CreateModel():
            return ModelReady()
        case ForwardBackward():
            outputs = tuple(map(scored, operation.data))
            tokens = sum(len(output["logprobs"]) for output in outputs)
            return Scores(outputs=outputs, loss=float(tokens), tokens=tokens)
        case OptimStep():
            return StepTaken(step=1, divisor=1.0, grad_norm=0.5)
        case AbortEpoch():
            return EpochAborted(step=1, operations=1)
        case SaveWeights():
            kind = operation.checkpoint
            return CheckpointSaved(checkpoint=kind, name=operation.name, folder="", address="00", size_bytes=1)
        case LoadWeights():
            return CheckpointLoaded(checkpoint=operation.checkpoint, step=1)
        case EndModel():
            return ModelEnded()
        case Rejected():
            return operation.failure


@dataclass
class Served:
    """What came in, in order, and how often which status was the answer to a poll."""

    submissions: list[Submission] = field(default_factory=list)
    answers: dict[str, Callable[[TrainingDialect], FutureAnswer]] = field(default_factory=dict)
    polls: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    sizes_told: int = 0

    async def handle(self, request: Request) -> Response:
        route = request.path_params["route"]
        if route in FIXED:
            return JSONResponse(FIXED[route])
        kind = request.headers.get("content-type", "")
        body = decompressed(request.headers.get("content-encoding", ""), await request.body())
        fields = {} if kind == PROTOBUF else json.loads(body)
        dialect = dialect_of(request.url.path, kind, fields, fields.get("model_id", ""))
        answer = self.answer(route, kind, dialect, body)
        return Response(answer.body, answer.status, media_type=answer.content_type)

    def answer(self, route: str, kind: str, dialect: TrainingDialect, body: bytes) -> FutureAnswer:
        if route == "retrieve_future":
            return self.retrieved(body)
        if route == "asample":
            sample = read_sample(body)
            self.answers[sample.request_id] = lambda _: sampled(sample)
            return json_answer(sample_accepted(sample))
        if route == "create_sampling_session":
            session = read_sampling_session(dialect, body)
            return json_answer({"type": route, "sampling_session_id": session.id})
        submission = self.submitted(route, kind, dialect, body)
        if submission is None:
            return json_answer({"detail": f"there is no {route}"}, 404)
        self.submissions.append(submission)
        request_id = f"{submission.model}:{submission.seq}:{len(self.submissions)}"
        result = result_of(submission.operation)
        self.answers[request_id] = partial(write_result, submission=submission, result=result)
        return accepted(request_id, submission.model)

    def submitted(self, route: str, kind: str, dialect: TrainingDialect, body: bytes) -> Submission | None:
        if route in SAVES:
            return read_save(dialect, SAVES[route], body)
        match route:
            case "forward_backward" | "forward" if kind == PROTOBUF:
                return read_forward_backward(body)
            case "forward_backward" | "forward":
                return read_json_data(body, forward_only=route == "forward")
            case "create_model":
                return read_create_model(dialect, body, AdapterDefaults())
            case "optim_step":
                return read_optim_step(dialect, body)
            case "abort_gradient_epoch":
                return read_abort_epoch(body)
            case "load_weights":
                makes_model = b'"model_seq_id"' in body
                return read_create_by_load(body) if makes_model else read_load(dialect, body)
        return None

    def retrieved(self, body: bytes) -> FutureAnswer:
        request = read_retrieve(body)
        self.polls[request.id] += 1
        if request.id not in self.answers:
            answer = unknown(request.id)
        elif self.polls[request.id] == 1:
            answer = try_again(request, "waiting for a trainer", "paused_capacity")
        else:
            whole = self.answers[request.id](request.dialect)
            answer = ready(whole, request)
            self.sizes_told += answer is not whole
        self.statuses[answer.status] += 1
        return answer


def sampled(submission: SampleSubmission) -> FutureAnswer:
    asked = submission.asked
    if isinstance(asked, Failed):
        return failed(asked)
    tokens, logprobs = array("i", [5, 2]).tobytes(), array("f", [-1.0, -2.0]).tobytes()
    one = SampledTokens(tokens=tokens, logprobs=logprobs, finish=FinishReason.STOP)
    prompt = unscored(len(asked.prompt) // 4, [-0.5] * asked.scored) if asked.scored else b""
    return FutureAnswer(200, PROTOBUF, write_samples([one] * asked.samples, prompt))


class Server:
    """A thread with the server, on a port of its own."""

    def __init__(self) -> None:
        self.served = Served()
        app = Starlette(routes=[Route("/api/v1/{route:path}", self.served.handle, methods=["GET", "POST"])])
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()
