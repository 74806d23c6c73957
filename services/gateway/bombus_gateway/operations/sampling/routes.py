"""The sampling routes: Tinker's `asample` and its sessions, and `/generate` in xorl's (SGLang's) form and in vLLM's."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec
from fastapi import Request, Response

from bombus.errors import Code, Refused
from bombus.hive.operations.owners import seen_session
from bombus.hive.operations.state import TrainingClients
from bombus.hive.records import digest, unpack_tokens
from bombus.text.tokenizer import Tokenizer
from bombus_gateway.access import KeyHolder
from bombus_gateway.atropos.vllm_generate import (
    ScoredPrompt,
    VllmRequest,
    is_vllm,
    read_vllm,
    shown_text,
    write_vllm,
)
from bombus_gateway.call.calls import Calls
from bombus_gateway.call.workers import CLIENTS
from bombus_gateway.context import Gateway
from bombus_gateway.operations.bases import Bases
from bombus_gateway.operations.bodies import names_in
from bombus_gateway.operations.catching_up import found
from bombus_gateway.operations.sampling.drawing import DrawnSamples, SampleDrawing
from bombus_gateway.operations.sampling.futures import SampleFutures
from bombus_gateway.operations.sampling.samplers import begun_sampler, found_sampler, named_sampler, sampled_base
from bombus_gateway.operations.sessions import Sessions
from bombus_gateway.operations_wire.dialects import OF_SAMPLE, TrainingDialect, dialect_of
from bombus_gateway.operations_wire.generate import GenerateRequest, read_generate, write_generated
from bombus_gateway.operations_wire.sampling import (
    SampleSubmission,
    read_sample,
    read_sample_session,
    read_sampling_session,
    sample_accepted,
)
from bombus_gateway.plain_routes import JsonResponse, PlainRoute
from bombus_gateway.refusals import RETRY_AFTER

_T = TypeVar("_T")
_AskedT = TypeVar("_AskedT", GenerateRequest, VllmRequest)


class SamplingRoutes:
    """The sampling routes of one engine."""

    def __init__(self, gateway: Gateway, calls: Calls, engine: str, bases: Bases, sessions: Sessions) -> None:
        self._calls = calls
        self._bases = bases
        self._sessions = sessions
        self._gateway = gateway
        self._drawing = SampleDrawing(calls, engine)
        self.futures = SampleFutures(self._drawing, calls.capacity)

    def routes(self) -> list[PlainRoute]:
        """Return the routes below `/api/v1`."""
        return [
            PlainRoute("POST", "/create_sampling_session", self.create_sampling_session),
            PlainRoute("GET", "/samplers/{sampler}", self.sampler),
            PlainRoute("POST", "/asample", self.asample),
        ]

    async def create_sampling_session(self, request: Request) -> Response:
        body = await self._calls.bodies.small(request)
        dialect = dialect_of("create_sampling_session", "", names_in(body))
        asked, holder = read_sampling_session(dialect, body), self._gateway.holder_of(request)
        wanted = msgspec.structs.replace(asked, base=self._bases.path_of(asked.base))
        if dialect == TrainingDialect.TINKER:
            session = await self._found(lambda: _open_session(self._drawing.engine.clients, asked.id, holder))
            base = await self._found(lambda: sampled_base(self._drawing.engine, wanted, holder))
            await self._sessions.begin_sampling(session, base, request.scope["headers"])
        name, sampler = await self._found(lambda: begun_sampler(self._drawing.engine, wanted, holder))
        if dialect == TrainingDialect.TINKER:
            return JsonResponse({"type": "create_sampling_session", "sampling_session_id": name})
        lora = "" if sampler.checkpoint is None else sampler.checkpoint.name
        return JsonResponse({"success": True, "model_path": asked.id, "lora_name": lora})

    async def sampler(self, request: Request) -> Response:
        name, holder = request.path_params["sampler"], self._gateway.holder_of(request)
        sampler = await self._found(lambda: found_sampler(self._drawing.engine, name, holder))
        path = None if sampler.checkpoint is None else sampler.checkpoint.uri(TrainingDialect.TINKER)
        return JsonResponse({"sampler_id": name, "base_model": self._bases.name_of(sampler.base), "model_path": path})

    async def asample(self, request: Request) -> Response:
        bodies, workers, holder = self._calls.bodies, self._calls.workers, self._gateway.key_of(request)
        session, body = await bodies.read(request, bodies.samples, lambda body: (read_sample_session(body), body))
        await self._found(lambda: self.futures.check(session, holder.name))
        submission, body_digest = await workers.run(CLIENTS, len(body), partial(_read_sample, body))
        try:
            name = self.futures.submit(submission, body_digest, len(body), holder)
        except Refused as refusal:
            if refusal.code != Code.OVERLOADED:
                raise
            answer = JsonResponse({"detail": refusal.why, "code": refusal.code}, 429)  # on 429 the client retries
            answer.headers.update(RETRY_AFTER)
            return answer
        return JsonResponse(sample_accepted(submission) | {"request_id": name})

    async def generate(self, request: Request) -> Response:
        """Answer a request from xorl's sampling client, or one in vLLM's form (which names no adapter), directly."""
        bodies, holder = self._calls.bodies, self._gateway.key_of(request)
        given = await bodies.read(request, bodies.samples, _read_either)
        if isinstance(given, VllmRequest):
            return await self._generate_as_vllm(given, holder)
        adapter = given.adapter
        sampler = await self._found(lambda: named_sampler(self._drawing.engine, adapter, holder.name))
        with self._calls.capacity.open_sample(holder.share):
            given = await self._with_prompt(given)
            drawn = await self._drawing.draw(sampler, given.asked, holder.share)
        count = len(given.asked.prompt) // 4
        write = partial(write_generated, drawn.samples, drawn.texts, count, given.logprobs)
        answer = await self._drawing.written(drawn, lambda: msgspec.json.encode(write()))
        return Response(answer, media_type="application/json")

    async def _found(self, find: Callable[[], _T]) -> _T:
        return await found(self._calls.follower, find)

    async def _generate_as_vllm(self, given: VllmRequest, holder: KeyHolder) -> Response:
        sampler = named_sampler(self._drawing.engine, "", holder.name)
        with self._calls.capacity.open_sample(holder.share):
            given = await self._with_prompt(given)
            drawn = await self._drawing.draw(sampler, given.asked, holder.share)
        model = await self._drawing.text_model()
        answer = await self._drawing.written(drawn, partial(_written_as_vllm, given, drawn, model.tokenizer))
        return Response(answer, media_type="application/json")

    async def _with_prompt(self, given: _AskedT) -> _AskedT:
        """Return the request with its prompt as tokens."""
        if not given.text:
            return given
        asked = msgspec.structs.replace(given.asked, prompt=await self._drawing.tokens_of(given.text))
        return msgspec.structs.replace(given, asked=asked)


def _read_either(body: bytes) -> GenerateRequest | VllmRequest:
    return read_vllm(body) if is_vllm(names_in(body)) else read_generate(body)


def _read_sample(body: bytes) -> tuple[SampleSubmission, bytes]:
    return read_sample(body), digest(body)


def _written_as_vllm(given: VllmRequest, drawn: DrawnSamples, tokenizer: Tokenizer) -> bytes:
    text = given.text or tokenizer.decode(unpack_tokens(given.asked.prompt))
    prompt = ScoredPrompt(text, drawn.prompt_logprobs, drawn.top_prompt)
    texts = [shown_text(given, *each, tokenizer) for each in zip(drawn.samples, drawn.texts, strict=True)]
    return write_vllm(given, drawn.samples, texts, prompt)


def _open_session(clients: TrainingClients, sampling_session: str, holder: str) -> str:
    """Return the client's session that is named in a sampling session's id. Raises `Refused` unless that session is
    open."""
    session = sampling_session.rpartition(OF_SAMPLE)[0]
    known = seen_session(clients, session, holder)
    if known is None or known.ended is not None:
        raise Refused(Code.SESSION_OVER, f"Session {session[:100]} has ended here, or never began; open another one.")
    return session
