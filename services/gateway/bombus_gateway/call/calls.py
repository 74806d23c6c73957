"""A model call from beginning to record: what it extends, where it is generated, how it gets into the log (R9, R10)."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from bombus.bus import Bus
from bombus.bus.follow import Follower
from bombus.config.job import RunConfig
from bombus.errors import BombusError, BusUnavailable, Code, Refused
from bombus.hive.bounded import trim
from bombus.hive.events import EpisodeType, NotedCall
from bombus.hive.generation import Fault, Finished, Frame, Generate, Tokens
from bombus.hive.inbox import CallRecorded
from bombus.hive.records import (
    CallRecord,
    CallRef,
    CallStatus,
    SamplingParams,
    Timings,
    digest,
    encode_record,
    pack_tokens,
)
from bombus.hive.state import EngineState
from bombus_gateway.call.admission import check_episode, check_sampling, check_storage, heard_of, sampling_of
from bombus_gateway.call.capacity import Room, record_bytes
from bombus_gateway.call.completion import Completion, Piece
from bombus_gateway.call.conversation import Conversation, prefix_digests, root_digest
from bombus_gateway.call.histories import Histories, Match
from bombus_gateway.call.models import Models
from bombus_gateway.call.replica_client import Generation, ReplicaClient, ReplicaGone
from bombus_gateway.call.upstream import ATTEMPTS_MAX, Upstream
from bombus_gateway.context import Gateway, Touches
from bombus_gateway.keys import KeyClaims
from bombus_gateway.openai.request import Ask
from bombus_gateway.settings import GatewaySettings
from bombus_gateway.text.rendering import TextModel

log = logging.getLogger(__name__)

UNTOLD_MAX = 900  # calls that wait for a retry of their request
UNHEARD_S = 2.0  # for our fold to hear of an episode whose key is already in use


class HungUp(BombusError):
    """The client is gone."""


@dataclass(frozen=True)
class Request:
    """A request as the door read it. `retried`: the harness says that it has sent this before."""

    claims: KeyClaims
    ask: Ask
    digest: bytes
    body_bytes: int
    received_ns: int
    retried: bool = False
    role: str = ""
    traceparent: str = ""

    @property
    def key(self) -> tuple[str, bytes]:
        """What makes two requests the same one."""
        return self.claims.episode, self.digest


@dataclass(frozen=True)
class Plan:
    """What will be generated and what it continues. `prompt` is int32; its last `tail` bytes are new."""

    job: RunConfig
    model: TextModel
    match: Match
    digests: Sequence[bytes]
    prompt: bytes
    tail: int
    sampling: SamplingParams

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) // 4


class Calls:
    """Opens calls. One for each gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self.settings: GatewaySettings = gateway.settings
        self.bus: Bus = gateway.bus
        self.follower: Follower = gateway.follower
        self.touches: Touches = gateway.touches
        self.models = Models(gateway.bus)
        self.histories = Histories(gateway.bus, gateway.settings)
        self.room = Room(gateway.bus, gateway.settings)
        self.client = ReplicaClient(gateway.settings.connect_s_max)
        self.upstream = Upstream(gateway.follower, self.client, gateway.settings.replica_wait_s)
        self.running: dict[tuple[str, bytes], asyncio.Future[CallRef | None]] = {}
        self.untold: dict[tuple[str, bytes], Call] = {}  # stored, while the coordinator may not know of them
        self.opened: set[Call] = set()

    def check(self, claims: KeyClaims) -> None:
        check_episode(self.follower.hive.engine(claims.engine), claims)

    async def open(self, request: Request) -> "Call":
        """Everything before the first token. Raises `Refused`."""
        claims, ask = request.claims, request.ask
        check_storage(self.follower.hive)
        engine, kind = await self._episode(claims)
        job = self.models.job(engine)
        check_sampling(ask, job, kind)
        model = await self.models.text_model(engine)
        plan = await self._plan(request, job, model)
        return Call(self, request, plan, engine)

    def hang_up(self) -> None:
        """The gateway is stopping: give up what is still open, so that it is recorded as cut off."""
        for call in self.opened:
            call.hang_up()

    async def recorded(self, request: Request) -> tuple[CallRecord, bytes] | None:
        """The record of this very request, and its whole prompt (int32), when the harness asks again (R9)."""
        if not request.retried:
            return None
        first = self.running.get(request.key)
        ref = await asyncio.shield(first) if first is not None else None
        untold = self.untold.get(request.key)
        if ref is None and untold is not None:
            await untold.tell()
        conversation = self.histories.of(request.claims)
        ref = ref or conversation.answers.get(request.digest)
        if ref is None:
            await self.histories.read_log(request.claims, request.traceparent)
            ref = conversation.answers.get(request.digest)
        if ref is None:
            return None
        (record,) = await self.histories.records([ref])
        return record, conversation.prompt_of(ref)

    async def _episode(self, claims: KeyClaims) -> tuple[EngineState, EpisodeType]:
        """The episode's engine and type. Its key may be faster than the event that it was claimed."""
        state = self.follower.hive.engine(claims.engine)
        check_episode(state, claims)
        if claims.episode not in state.open:
            try:
                await self.follower.wait_for(lambda hive: heard_of(hive.engine(claims.engine), claims), UNHEARD_S)
            except TimeoutError:
                raise Refused(
                    Code.BUS_DOWN, f"This gateway has not heard of episode {claims.episode} yet; try again in a moment."
                ) from None
            state = self.follower.hive.engine(claims.engine)
            check_episode(state, claims)
        return state, state.open[claims.episode].type

    async def _plan(self, request: Request, job: RunConfig, model: TextModel) -> Plan:
        ask = request.ask
        if ask.chat:
            match, digests, prompt, tail = await self._chat_prompt(request, model)
        else:
            match, prompt, tail = self._plain_prompt(request, model)
            digests = ()
        is_first = match.node is None and not any(message["role"] == "assistant" for message in ask.messages)
        sampling = sampling_of(ask, job, model, len(prompt) // 4, is_first)
        return Plan(job, model, match, digests, prompt, tail, sampling)

    async def _chat_prompt(self, request: Request, model: TextModel) -> tuple[Match, Sequence[bytes], bytes, int]:
        ask = request.ask
        digests = prefix_digests(root_digest(ask.tools), ask.messages)
        roles = [message["role"] for message in ask.messages]
        match = await self.histories.match(request.claims, roles, digests, request.traceparent)
        if match.node is not None:
            new = ask.messages[match.count :]
            tail = model.renderer.extend(match.node.tokens, match.node.completion_at, new, ask.tools)
            if tail is not None:
                packed = pack_tokens(tail)
                return match, digests, match.node.tokens + packed, len(packed)
            # The model's template drops something of what was sampled (reasoning): a branch of its own.
            match = Match()
        prompt = pack_tokens(model.renderer.render(ask.messages, ask.tools))
        return match, digests, prompt, len(prompt)

    def _plain_prompt(self, request: Request, model: TextModel) -> tuple[Match, bytes, int]:
        given = request.ask.prompt
        tokens = model.tokenizer.encode_marked_up(given) if isinstance(given, str) else given
        if isinstance(given, list) and max(given) >= len(model.tokenizer.pieces):
            raise Refused(Code.MALFORMED, f"prompt holds token {max(given)}, which is outside the vocabulary.")
        prompt = pack_tokens(tokens)
        node = self.histories.of(request.claims).longest_tokens(prompt)
        return Match(0, node), prompt, len(prompt) - (len(node.tokens) if node is not None else 0)


@dataclass(eq=False)
class Call:
    """One call that is open. Iterate over `pieces`, then `record` it, or `cut_off`; always `close` it."""

    calls: Calls
    request: Request
    plan: Plan
    engine: EngineState
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    completions: list[Completion] = field(default_factory=list)
    cached_tokens: int = 0
    replica: str = ""
    first_token_ns: int = 0
    _generation: Generation | None = None
    _unfinished: int = 0  # choices that the engine has not ended
    _hung_up: bool = False
    _held: ExitStack = field(default_factory=ExitStack)
    _joined: asyncio.Future[CallRef | None] | None = None
    _stored: tuple[CallRef, CallRecord] | None = None

    def __post_init__(self) -> None:
        """Reserve room before anything is generated (R9). Raises `Refused` OVERLOADED."""
        ask, plan, calls = self.request.ask, self.plan, self.calls
        self._start_over()
        size = record_bytes(self.request.body_bytes, plan.tail // 4, plan.sampling.max_tokens * ask.n)
        if size > calls.bus.publisher.message_bytes_max:
            self._check_size()
        self._held.enter_context(calls.room.taken(size))
        self._held.enter_context(calls.touches.held(self.engine.name, self.request.claims.episode))
        if self.request.key not in calls.running:
            self._joined = calls.running[self.request.key] = asyncio.get_running_loop().create_future()
        calls.opened.add(self)

    async def pieces(self) -> AsyncIterator[list[tuple[Completion, Piece]]]:
        """What may go out, as it arrives. Raises `Refused` NO_REPLICA, `ReplicaGone` after something was given,
        `HungUp` after `hang_up`."""
        for attempt in range(1, ATTEMPTS_MAX + 1):
            given = False
            try:
                async for pieces in self._generated():
                    given = given or (self.request.ask.stream and bool(pieces))
                    yield pieces
                return
            except ReplicaGone as error:
                if self._hung_up:
                    raise HungUp(self.id) from None
                self.calls.upstream.failed(self.replica, str(error))
                if given or attempt == ATTEMPTS_MAX:
                    if given:
                        raise
                    raise Refused(Code.NO_REPLICA, f"{error}; try again in a moment.") from error
                self._let_go()
                self._start_over()

    def hang_up(self) -> None:
        """The client is gone: stop generating."""
        self._hung_up = True
        if self._generation is not None:
            self._generation.abort("the client hung up")

    async def record(self, status: CallStatus = CallStatus.COMPLETE) -> None:
        """Store the call and tell the coordinator, both acknowledged: only then may the last byte go (R9)."""
        calls, request = self.calls, self.request
        record = self._record(status)
        body = encode_record(record)
        limit_s = calls.settings.record_s_max
        subject = calls.bus.subjects.call(record.engine, record.episode)
        headers = {"traceparent": request.traceparent} if request.traceparent else None
        ack = await calls.bus.publisher.publish(subject, body, msg_id=record.id, headers=headers, timeout_s=limit_s)
        self._stored = CallRef(ack.seq, record.id, digest(body)), record
        await self.tell()
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

    async def tell(self) -> None:
        """Tell the coordinator of the stored record. Where that fails, a retry of the request tells it once more: the
        message has one id, so the log takes it once."""
        assert self._stored is not None
        ref, record = self._stored
        calls, request = self.calls, self.request
        noted = CallRecorded(id=record.id, engine=record.engine, run=record.run, call=self._noted(ref, record))
        try:
            await calls.bus.inbox.send(noted, traceparent=request.traceparent, timeout_s=calls.settings.record_s_max)
        except BusUnavailable:
            if record.status == CallStatus.COMPLETE:
                calls.untold[request.key] = self
                trim(calls.untold, UNTOLD_MAX)
            raise
        calls.untold.pop(request.key, None)
        self._remember(ref, record)

    async def cut_off(self) -> None:
        """Record what was sampled until the client or the replica was lost: kept for replay, never trained."""
        try:
            await self.record(CallStatus.CUT_OFF)
        except BombusError as error:  # nobody waits for this answer any more
            log.warning("a call that was cut off is not recorded", extra={"call": self.id, "why": str(error)})

    def close(self) -> None:
        self._let_go()
        if self._joined is not None:
            if not self._joined.done():
                self._joined.set_result(None)
            self.calls.running.pop(self.request.key, None)
        self.calls.opened.discard(self)
        self._held.close()

    async def _generated(self) -> AsyncIterator[list[tuple[Completion, Piece]]]:
        request = self.request
        generate = Generate(
            id=self.id,
            engine=self.engine.name,
            run=request.claims.run,
            prompt=self.plan.prompt,
            sampling=self.plan.sampling,
            n=request.ask.n,
            stream=request.ask.stream or bool(request.ask.stops),
            episode=request.claims.episode,
            traceparent=request.traceparent,
        )
        self._generation, self.replica = await self.calls.upstream.start(generate)
        while not all(completion.done for completion in self.completions):
            if self._hung_up:
                self._generation.abort("the client hung up")
            frames = await self._generation.frames()
            if not frames:
                raise ReplicaGone("the replica's answer ended too early")
            if not self.first_token_ns:
                self.first_token_ns = time.time_ns()
            yield [taken for frame in frames if (taken := self._take(frame)) is not None]

    def _take(self, frame: Frame) -> tuple[Completion, Piece] | None:
        """A choice may be done before the engine is: stop strings are found here, not there."""
        assert not isinstance(frame, Fault)  # the client raises those
        completion = self.completions[frame.choice]
        if isinstance(frame, Finished):
            self._unfinished -= 1
            self.cached_tokens = max(self.cached_tokens, frame.cached_prompt_tokens)
        if completion.done:
            return None
        return completion, completion.feed(frame) if isinstance(frame, Tokens) else completion.end(frame.reason)

    def _start_over(self) -> None:
        plan, ask = self.plan, self.request.ask
        self.completions = [Completion(plan.model, ask, plan.prompt, self.id, index) for index in range(ask.n)]
        self._unfinished = ask.n

    def _let_go(self) -> None:
        """Of the replica. A generation that is wanted no more is aborted; one that is complete keeps its connection."""
        if self._generation is not None:
            if self._unfinished:
                self._generation.abort("not needed any more")
            self.calls.upstream.finished(self._generation)
            self._generation = None

    def _check_size(self) -> None:
        """Raise `Refused` TOO_LARGE for a call whose record might not fit into the log, before it is sampled."""
        limit = self.calls.bus.publisher.message_bytes_max
        sampled = record_bytes(0, 0, self.plan.sampling.max_tokens * self.request.ask.n)
        size = len(encode_record(self._record(CallStatus.COMPLETE))) + sampled
        if size > limit:
            raise Refused(
                Code.TOO_LARGE,
                f"The record of this call could take {size} bytes, and the log takes {limit}: send less text, or "
                "ask for fewer tokens.",
            )

    def _record(self, status: CallStatus) -> CallRecord:
        request, plan = self.request, self.plan
        node = plan.match.node
        return CallRecord(
            id=self.id,
            engine=self.engine.name,
            run=request.claims.run,
            episode=request.claims.episode,
            parent=node.ref if node is not None else None,
            parent_choice=node.choice if node is not None else 0,
            prompt_tail=plan.prompt[len(plan.prompt) - plan.tail :],
            prompt_tokens=plan.prompt_tokens,
            choices=tuple([completion.choice() for completion in self.completions]),
            sampling=plan.sampling,
            status=status,
            messages=request.ask.messages[plan.match.count :],
            tools=() if node is not None else request.ask.tools,
            request_digest=request.digest,
            role=request.role,
            replica=self.replica,
            timings=Timings(request.received_ns, self.first_token_ns, time.time_ns()),
            trace=request.traceparent,
        )

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
        )

    def _remember(self, ref: CallRef, record: CallRecord) -> None:
        histories = self.calls.histories
        conversation: Conversation = histories.of(self.request.claims)
        before = conversation.bytes
        last = self.plan.digests[-1] if self.plan.digests else b""
        conversation.add(ref, record, self.plan.prompt, last)
        histories.grown(before, conversation)
        if self._joined is not None and not self._joined.done():
            self._joined.set_result(ref if record.status == CallStatus.COMPLETE else None)
