"""A model call from request to record: where the answer is generated, and how the call reaches the log (R9, R10)."""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec

from bombus.bus import Bus
from bombus.bus.follow import Follower
from bombus.errors import BombusError, BusUnavailable, Code, Refused
from bombus.hive.bounded import trim
from bombus.hive.events import NotedCall, SamplerWeights
from bombus.hive.generation import Fault, Finished, Frame, Generate, PromptScores, Tokens
from bombus.hive.inbox import CallRecorded
from bombus.hive.records import (
    CallRecord,
    CallRef,
    CallStatus,
    Choice,
    FinishReason,
    Timings,
    digest,
    encode_record,
)
from bombus.hive.state import EngineState
from bombus.text.tokenizer import Tokenizer
from bombus_gateway.bodies import BodyGate
from bombus_gateway.call.admission import Admission
from bombus_gateway.call.attempts import RequestAttempt, RequestAttempts
from bombus_gateway.call.capacity import CallCapacity, record_bytes
from bombus_gateway.call.completion import Completion, CompletionDelta, Usage
from bombus_gateway.call.key_limits import KeyLimits
from bombus_gateway.call.models import EngineModels
from bombus_gateway.call.planning import CallPlan, plan_call, plan_prompt
from bombus_gateway.call.replica_client import Generation, ReplicaClient, ReplicaGone
from bombus_gateway.call.request import CallRequest
from bombus_gateway.call.upstream import (
    ATTEMPTS_MAX,
    LOADS_MAX,
    AdapterMissing,
    Upstream,
    dropped_too_often,
)
from bombus_gateway.call.workers import Workers
from bombus_gateway.context import Gateway
from bombus_gateway.heartbeats import Heartbeats
from bombus_gateway.history.continuing import EarlierCalls
from bombus_gateway.history.conversation import Conversation
from bombus_gateway.history.histories import Histories
from bombus_gateway.metrics import CallMetrics
from bombus_gateway.settings import GatewaySettings
from bombus_gateway.text.rendering import TextModel

log = logging.getLogger(__name__)

MESSAGE_BYTES = 200  # approximate bytes that a record takes in its stream besides its body: subject, headers, position
UNACKNOWLEDGED_MAX = 900  # maximum number of calls that wait for a retry of their request


class HungUp(BombusError):
    """Raised when the client has closed its connection."""


class AnswerHead(msgspec.Struct, frozen=True):
    """What is known about an answer before its first token.

    `id` is the call's id, `prompt` is the prompt's tokens (int32), `choices` is the number of choices, and `overridden`
    names what was requested but not applied.
    """

    id: str
    received_ns: int
    prompt: bytes
    choices: int
    tokenizer: Tokenizer
    overridden: tuple[str, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens in the prompt."""
        return len(self.prompt) // 4


class RecordedAnswer(msgspec.Struct, frozen=True):
    """The answer to an earlier attempt at a request. `deltas` contains the deltas of each completion, in order."""

    attempt: RequestAttempt
    head: AnswerHead
    completions: list[Completion]
    deltas: list[list[CompletionDelta]]
    usage: Usage


class Calls:
    """Opens calls for all of a gateway's APIs."""

    def __init__(self, gateway: Gateway) -> None:
        self.settings: GatewaySettings = gateway.settings
        self.bus: Bus = gateway.bus
        self.follower: Follower = gateway.follower
        self.heartbeats: Heartbeats = gateway.heartbeats
        self.models = EngineModels(gateway.bus)
        self.admission = Admission(gateway.follower, self.models)
        self.workers: Workers = gateway.workers
        self.bodies: BodyGate = gateway.bodies
        self.histories = Histories(gateway.bus, gateway.settings, self.workers, self.admission.is_over)
        self.earlier = EarlierCalls(self.histories)
        keys = KeyLimits(gateway.key_ring)
        self.capacity = CallCapacity(gateway.bus, gateway.settings, lambda: gateway.follower.hive, keys)
        self.client = ReplicaClient(gateway.keys.for_replicas)
        self.upstream = Upstream(gateway.follower, self.client, gateway.bus.inbox)
        self.attempts = RequestAttempts()
        # By id: stored calls whose message to the coordinator was not acknowledged.
        self.unacknowledged: dict[str, Call] = {}
        self.opened: set[Call] = set()
        self.metrics = CallMetrics(gateway.settings.engines)
        self.traces = gateway.traces
        self._gateway = gateway

    def check_ready(self) -> None:
        """Raise `Refused` BUS_DOWN until the gateway has folded the log (R18)."""
        if not self._gateway.ready:
            raise Refused(Code.BUS_DOWN, "This gateway is starting; try again in a moment.")

    @asynccontextmanager
    async def open(self, request: CallRequest) -> AsyncIterator["Call"]:
        """Admit and plan a call, and keep it open for the block, which reads its `deltas` and then calls `record`.

        A call is recorded as cut off if it fails in the block because its client hung up (`HungUp`), because its
        replica is gone (`ReplicaGone`), or because it took longer than the limit. Raises `Refused` if the call may not
        be made.
        """
        attempt = self.attempts.begin(request)
        try:
            request, admitted = await self.admission.admit(request)
            # Keep a reference until the call is closed, so that the episode's next request finds what this call has
            # added.
            conversation = self.histories.conversation(request.claims)
            self._check_episode_bytes(conversation, request.claims.episode)
            request = await self.earlier.continued(request)
            plan = await plan_call(request, admitted, conversation, self.histories, self.workers)
            # There must be no await after planning: creating the call marks the answer that the call continues as
            # continued.
            call = Call(self, request, plan, admitted.engine, attempt, admitted.sampler)
            try:
                async with asyncio.timeout(self.settings.call_timeout_s):
                    yield call
            except (HungUp, ReplicaGone):
                await call.cut_off()
                if not self._gateway.ready:
                    raise Refused(Code.BUS_DOWN, "This gateway is stopping; try another one.") from None
                raise
            except TimeoutError:
                call.hang_up()
                await call.cut_off()
                limit_s = self.settings.call_timeout_s
                raise Refused(Code.TIMEOUT, f"The call took longer than the limit of {limit_s:g} s.") from None
            finally:
                call.close()
        finally:
            attempt.ended.set_result(None)

    async def prompt_tokens(self, request: CallRequest) -> int:
        """Return how many tokens a call's prompt would have. Nothing is sampled or recorded. Raises `Refused` if the
        call may not be made."""
        request, admitted = await self.admission.admit(request)
        prompt = await plan_prompt(request, admitted, self.histories, self.workers)
        return prompt.count

    def _check_episode_bytes(self, conversation: Conversation, episode: str) -> None:
        """Raise `Refused` TOO_LARGE if an episode's calls have used up the room in the log that an episode may take."""
        stored, limit = conversation.stored_bytes, self.settings.episode_mb_max << 20
        if stored >= limit:
            raise Refused(
                Code.TOO_LARGE,
                f"The calls of episode {episode} take {stored} bytes in the log, but the limit is "
                f"{limit}: end the episode.",
            )

    def hang_up(self) -> None:
        """Abort all open calls, because the gateway is stopping. The calls are recorded as cut off."""
        for call in self.opened:
            call.hang_up()

    async def recorded(self, request: CallRequest) -> RecordedAnswer | None:
        """Return the answer recorded for an earlier attempt at a retried request, or None if there is none (R9)."""
        attempt = await self._answered(request) if request.retry else None
        if attempt is None or attempt.ref is None:
            return None
        conversation = self.histories.conversation(request.claims)
        if not conversation.knows(attempt.ref):
            await self.histories.read_log(request.claims, request.traceparent)
        prompt = conversation.prompt_of(attempt.ref)
        (record,) = await self.histories.records(request.claims, [attempt.ref])
        model = await self.models.text_model(self.follower.hive.engine(request.claims.engine))
        log.info("a retried call gets its recorded answer", extra={"call": record.id, "episode": record.episode})
        return _replayed(request, attempt, record, prompt, model)

    async def _answered(self, request: CallRequest) -> RequestAttempt | None:
        """Return the attempt that a retry repeats, with its answer, or None if there is no answer and the call has to
        be resampled.

        This waits for an attempt in progress, and notifies the coordinator of a stored call whose notification was not
        acknowledged. Attempts at other gateways are known only from the log: any answer that no call continues may
        belong to such an attempt.
        """
        conversation = self.histories.conversation(request.claims)
        attempt = self.attempts.repeated(request, conversation.is_call_continued)
        if attempt is None:
            return await self._answered_elsewhere(request)
        await asyncio.shield(attempt.ended)  # other retries wait for it too
        unacknowledged = self.unacknowledged.get(attempt.call)
        if unacknowledged is not None:
            await unacknowledged.notify()
        if attempt.ref is None or conversation.is_call_continued(attempt.ref):
            self.attempts.forget(request, attempt)
            return None
        return attempt

    async def _answered_elsewhere(self, request: CallRequest) -> RequestAttempt | None:
        await self.histories.read_log(request.claims, request.traceparent)
        conversation = self.histories.conversation(request.claims)
        answers = conversation.answers.get(request.digest, ())
        return self.attempts.repeated_stored(
            request, [ref for ref in answers if not conversation.is_call_continued(ref)]
        )


def _replayed(
    request: CallRequest, attempt: RequestAttempt, record: CallRecord, prompt: bytes, model: TextModel
) -> RecordedAnswer:
    completions = [
        Completion(model, request.completion, prompt, record.id, index) for index in range(len(record.choices))
    ]
    count = len(completions)
    head = AnswerHead(record.id, request.received_ns, prompt, count, model.tokenizer, record.overridden)
    return RecordedAnswer(
        attempt,
        head,
        completions,
        [completion.replay(choice) for completion, choice in zip(completions, record.choices)],
        Usage(record.prompt_tokens, record.completion_tokens(), reasoning=record.reasoning_tokens()),
    )


@dataclass(eq=False)
class Call:
    """One open call: see `Calls.open`."""

    calls: Calls
    request: CallRequest
    plan: CallPlan
    engine: EngineState
    attempt: RequestAttempt
    sampler: SamplerWeights | None = None
    id: str = field(default_factory=lambda: os.urandom(16).hex())
    completions: list[Completion] = field(default_factory=list)
    cached_tokens: int = 0
    replica: str = ""
    first_token_ns: int = 0
    _generation: Generation | None = None
    _unfinished: int = 0  # number of choices that the replica has not ended yet
    _hung_up: bool = False
    _holder: str = ""
    _reserved: int = 0  # reserved bytes
    _conversation: Conversation = field(init=False)
    _made: CallRecord | None = None
    _stored: tuple[CallRef, CallRecord] | None = None
    _stored_bytes: int = 0

    def __post_init__(self) -> None:
        """Reserve capacity before anything is generated (R9). Raises `Refused`: OVERLOADED if there is no room, and
        TOO_LARGE if the call's record might not fit into the log."""
        plan, calls = self.plan, self.calls
        self._start_over()
        sampled = plan.sampling.max_tokens * self.request.completion.n
        size = record_bytes(self.request.body_bytes, plan.prompt.tail // 4, sampled)
        if size > calls.bus.publisher.message_bytes_max:
            self._check_size()
        episode = self.engine.open.get(self.request.claims.episode)
        self._holder = "" if episode is None else episode.holder
        calls.capacity.reserve(size, self._holder)
        self._reserved = size
        calls.heartbeats.opened(self.engine.name, self.request.claims.episode)
        self._conversation = calls.histories.conversation(self.request.claims)
        if plan.prompt.node is not None:
            self._conversation.begin_continuing(plan.prompt.node)
        self.attempt.call = self.id
        calls.opened.add(self)

    @property
    def recorded(self) -> CallRecord | None:
        """The call's record, once it has been made."""
        return self._made

    @property
    def head(self) -> AnswerHead:
        plan, count = self.plan, len(self.completions)
        received_ns = self.request.received_ns
        return AnswerHead(self.id, received_ns, plan.prompt.tokens, count, plan.model.tokenizer, plan.overridden)

    @property
    def usage(self) -> Usage:
        sampled = sum(completion.sampled for completion in self.completions)
        reasoned = sum(completion.reasoned for completion in self.completions)
        return Usage(self.plan.prompt.count, sampled, self.cached_tokens, reasoned)

    async def deltas(self) -> AsyncIterator[list[tuple[Completion, CompletionDelta]]]:
        """Generate the answer, and yield the deltas as soon as they may be sent.

        If a replica fails, another one takes over, unless something has already been yielded to a client that streams.
        A replica that lacks the call's adapter is made to load it. Raises `Refused` NO_REPLICA if no replica is
        available, `ReplicaGone` if a replica fails too late for another to take over, and `HungUp` after `hang_up`.
        """
        failures = loads = 0
        while True:
            streamed = False
            try:
                generation = await self._begin()
                while not all(completion.done for completion in self.completions):
                    deltas = await self._next_deltas(generation)
                    streamed = streamed or (self.request.completion.stream and bool(deltas))
                    yield deltas
                return
            except AdapterMissing as missing:
                loads += 1
                failures += not await self._loaded(missing.replica, loads)
            except ReplicaGone as error:
                if self._hung_up:
                    raise HungUp(self.id) from None
                self.calls.upstream.failed(self.engine.name, self.replica, error)
                if streamed:
                    raise
                failures += 1
                if failures >= ATTEMPTS_MAX:
                    raise Refused(Code.NO_REPLICA, f"{error}; try again in a moment.") from error
            self._release_replica()
            self._start_over()

    def hang_up(self) -> None:
        """Stop generating, because the client is gone."""
        self._hung_up = True
        if self._generation is not None:
            self._generation.abort("the client hung up")

    def sent(self) -> None:
        """Note that the whole answer was sent, as far as we can know."""
        self.attempt.sent = not self._hung_up

    async def record(self, status: CallStatus = CallStatus.COMPLETE) -> None:
        """Store the call and notify the coordinator. The last byte of the answer may be sent only after this (R9).

        A call has only one record. If storing is retried, the same record is resent, even if the call's status has
        changed by then, because the log drops a second record with the same id.
        """
        if self._made is None:
            self._made = self._record(status)
        record = self._made
        if self._stored is None:
            await self._store(record)
        await self.notify()
        if log.isEnabledFor(logging.DEBUG):
            log.debug(
                "recorded a call",
                extra={
                    "call": record.id,
                    "episode": record.episode,
                    "replica": record.replica,
                    "status": str(status),
                    "merged": record.parent is not None,
                    "prompt_tokens": record.prompt_tokens,
                    "completion_tokens": record.completion_tokens(),
                },
            )

    async def _store(self, record: CallRecord) -> None:
        calls, request, body = self.calls, self.request, encode_record(record)
        subject = calls.bus.subjects.call(record.engine, self._holder)
        headers = {"traceparent": request.traceparent} if request.traceparent else None
        limit_s = calls.settings.bus_timeout_s
        ack = await calls.bus.publisher.publish(subject, body, msg_id=record.id, headers=headers, timeout_s=limit_s)
        self._stored = CallRef(ack.seq, record.id, digest(body)), record
        self._stored_bytes = len(body) + MESSAGE_BYTES
        self._conversation.stored_bytes += len(body)
        calls.metrics.recorded(record)

    async def notify(self) -> None:
        """Notify the coordinator of the stored record. Raises `BusUnavailable` if the bus does not acknowledge the
        notification.

        The notification is then resent when the client retries the request. It always has the same id, so it is
        accepted only once.
        """
        assert self._stored is not None
        ref, record = self._stored
        calls, request = self.calls, self.request
        noted = CallRecorded(id=record.id, engine=record.engine, run=record.run, call=self._noted(ref, record))
        try:
            await calls.bus.inbox.send(noted, traceparent=request.traceparent, timeout_s=calls.settings.bus_timeout_s)
        except BusUnavailable:
            if record.status == CallStatus.COMPLETE:
                calls.unacknowledged[self.id] = self
                trim(calls.unacknowledged, UNACKNOWLEDGED_MAX)
            raise
        calls.unacknowledged.pop(self.id, None)
        self._remember(ref, record)

    async def cut_off(self) -> None:
        """Record the tokens sampled before the client or the replica was lost. These tokens are kept for replay and
        never trained on.

        A call that was recorded as complete stays complete, even if its record is not acknowledged yet.
        """
        try:
            await self.record(CallStatus.CUT_OFF)
        except BombusError as error:  # no client is waiting for this answer any more
            log.warning("a call that was cut off could not be recorded", extra={"call": self.id, "why": str(error)})

    def close(self) -> None:
        calls, node = self.calls, self.plan.prompt.node
        self._release_replica()
        calls.opened.discard(self)
        if node is not None:
            self._conversation.end_continuing(node)
        calls.heartbeats.closed(self.engine.name, self.request.claims.episode)
        calls.capacity.release(self._reserved, self._holder)
        calls.capacity.keys.charge(
            self._holder, lambda: self.usage.prompt + self.usage.completion, self.request.body_bytes
        )

    async def _begin(self) -> Generation:
        """Start the generation on a replica."""
        request, completion = self.request, self.request.completion
        generate = Generate(
            id=self.id,
            engine=self.engine.name,
            run=request.claims.run,
            prompt=self.plan.prompt.tokens,
            sampling=self.plan.sampling,
            n=completion.n,
            stream=completion.stream or bool(completion.stops) or bool(completion.one_call),
            episode=request.claims.episode,
            traceparent=request.traceparent,
            constraint=self.plan.constraint,
            adapter="" if self.sampler is None else self.sampler.address,
            plain_logprobs=self.sampler is not None,
        )
        vocabulary = len(self.plan.model.tokenizer.pieces)
        self._generation, self.replica = await self.calls.upstream.start(generate, vocabulary)
        return self._generation

    async def _next_deltas(self, generation: Generation) -> list[tuple[Completion, CompletionDelta]]:
        if self._hung_up:
            generation.abort("the client hung up")
        frames = await self._frames(generation)
        if not frames:
            raise ReplicaGone("the replica's answer ended too early")
        if not self.first_token_ns:
            self.first_token_ns = time.time_ns()
        deltas = []
        for frame in frames:
            delta = self._feed(frame)
            if delta is not None:
                deltas.append(delta)
            if isinstance(frame, Tokens) and frame.top:
                await asyncio.sleep(0)  # each frame may have thousands of alternatives
        return deltas

    async def _frames(self, generation: Generation) -> list[Frame]:
        try:
            return await generation.frames()
        except Refused as refusal:
            if refusal.code == Code.UNKNOWN_MODEL and self.sampler is not None and self.sampler.address:
                raise AdapterMissing(self.replica) from None
            raise

    async def _loaded(self, replica: str, loads: int) -> bool:
        """Load the call's adapter on a replica, for the `loads`th time. Return whether the replica could be reached.

        Raises `Refused` if the adapter cannot be loaded, or was dropped too often.
        """
        assert self.sampler is not None
        if loads > LOADS_MAX:
            raise dropped_too_often(self.sampler.checkpoint)
        try:
            await self.calls.upstream.load_adapter(self.engine.name, replica, self.sampler.address, self.sampler.folder)
        except ReplicaGone as error:
            self.calls.upstream.failed(self.engine.name, replica, error)
            return False
        return True

    def _feed(self, frame: Frame) -> tuple[Completion, CompletionDelta] | None:
        """Feed a frame to its completion. Return None if the completion had already ended, for example at a stop
        string."""
        assert not isinstance(frame, Fault | PromptScores)  # `Generation` raises faults, and no call requests scores
        completion = self.completions[frame.choice]
        if isinstance(frame, Finished):
            self._unfinished -= 1
            self.cached_tokens = max(self.cached_tokens, frame.cached_prompt_tokens)
        if completion.done:
            return None
        return completion, completion.feed(frame) if isinstance(frame, Tokens) else completion.end(frame.reason)

    def _start_over(self) -> None:
        plan, request = self.plan, self.request.completion
        self.completions = [
            Completion(plan.model, request, plan.prompt.tokens, self.id, index) for index in range(request.n)
        ]
        self._unfinished = request.n

    def _release_replica(self) -> None:
        """Release the generation. An incomplete generation is aborted; a complete one leaves its connection for
        reuse."""
        if self._generation is not None:
            if self._unfinished:
                self._generation.abort("not needed any more")
            self.calls.upstream.finished(self._generation)
            self._generation = None

    def _check_size(self) -> None:
        """Raise `Refused` TOO_LARGE if the call's record might not fit into the log. Call this before sampling."""
        limit = self.calls.bus.publisher.message_bytes_max
        sampled = record_bytes(0, 0, self.plan.sampling.max_tokens * self.request.completion.n)
        size = len(encode_record(self._record(CallStatus.COMPLETE))) + sampled
        if size > limit:
            raise Refused(
                Code.TOO_LARGE,
                f"The record of this call could take {size} bytes, but the log accepts {limit}: send less text, or "
                "ask for fewer tokens.",
            )

    def _record(self, status: CallStatus) -> CallRecord:
        request, prompt = self.request, self.plan.prompt
        node = prompt.node
        return CallRecord(
            id=self.id,
            engine=self.engine.name,
            run=request.claims.run,
            episode=request.claims.episode,
            parent=node.ref if node is not None else None,
            parent_choice=node.choice if node is not None else 0,
            prompt_tail=prompt.tokens[len(prompt.tokens) - prompt.tail :],
            prompt_tokens=prompt.count,
            choices=tuple([self._choice(completion) for completion in self.completions]),
            sampling=self.plan.sampling,
            status=status,
            messages=prompt.messages,
            tools=() if node is not None else request.completion.tools,
            request_digest=request.digest,
            role=request.role,
            auxiliary_call=request.auxiliary_call,
            overridden=self.plan.overridden,
            constrained=self.plan.constrained,
            replica=self.replica,
            timings=Timings(request.received_ns, self.first_token_ns, time.time_ns()),
            trace=request.traceparent,
            chat_template_kwargs={} if node is not None else request.completion.chat_template_kwargs,
            sampler="" if self.sampler is None else self.sampler.address,
        )

    def _choice(self, completion: Completion) -> Choice:
        choice = completion.choice()
        if choice.finish != FinishReason.LENGTH:
            return choice
        return msgspec.structs.replace(choice, limit=self.plan.answer_limit.reason_at(completion.sampled))

    def _noted(self, ref: CallRef, record: CallRecord) -> NotedCall:
        versions = [span.version for choice in record.choices for span in choice.spans] or [self.engine.version]
        return NotedCall(
            record.episode,
            ref,
            record.prompt_tokens,
            record.completion_tokens(),
            min(versions),
            max(versions),
            record.status,
            merged=record.parent is not None,
            masked=self.plan.masked,
            incomplete=any(each.is_content for each in self.request.completion.unsupported),
            bytes=self._stored_bytes,
            sampler=record.sampler,
        )

    def _remember(self, ref: CallRef, record: CallRecord) -> None:
        """Make this call available to later requests that continue it, and its answer available to retries."""
        histories, prompt = self.calls.histories, self.plan.prompt
        conversation = histories.conversation(self.request.claims)  # cached again if the conversation was dropped
        conversation.add(ref, record, prompt.node, prompt.digest)
        histories.account_for(self.request.claims)
        if record.status == CallStatus.COMPLETE:
            self.attempt.ref = ref
