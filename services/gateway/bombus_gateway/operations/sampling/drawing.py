"""Draw samples on the replicas: tokens in, tokens out. A sample ends where its text contains a stop string."""

import asyncio
import logging
import os
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec

from bombus.errors import Code, Refused
from bombus.hive.events import NotedCall
from bombus.hive.generation import Fault, Finished, Frame, Generate, PromptScores, Tokens
from bombus.hive.inbox import CallRecorded
from bombus.hive.records import (
    CallRecord,
    CallRef,
    Choice,
    FinishReason,
    SamplingParams,
    Span,
    Timings,
    add_span,
    digest,
    encode_record,
    pack_tokens,
    unpack_tokens,
)
from bombus.hive.state import EngineState, Phase
from bombus_gateway.call.calls import MESSAGE_BYTES, Calls
from bombus_gateway.call.capacity import record_bytes
from bombus_gateway.call.replica_client import Generation, ReplicaBusy, ReplicaGone
from bombus_gateway.call.request import PromptTooLong, check_sampled
from bombus_gateway.call.upstream import LOADS_MAX, AdapterMissing, dropped_too_often
from bombus_gateway.call.workers import CLIENTS, NUMBER_BYTES
from bombus_gateway.limits import CHARACTERS_FOR_A_TOKEN
from bombus_gateway.operations.sampling.samplers import Sampler
from bombus_gateway.operations_wire.samples import NOTHING, Alternatives, SampledTokens, unscored
from bombus_gateway.operations_wire.sampling import SampleRequest
from bombus_gateway.text.rendering import TextModel
from bombus_gateway.text.stops import asked_stops, configured_stops, hidden_names
from bombus_gateway.text.text_stream import TextStream

log = logging.getLogger(__name__)

PAUSE_S, PAUSE_S_MAX = 0.05, 1.0  # delay between attempts
FAILURES_MAX = 6  # maximum number of replica failures for one request


class DrawnSamples(msgspec.Struct, frozen=True, kw_only=True):
    """Samples for one prompt with their texts, and the prompt's scores if requested."""

    samples: tuple[SampledTokens, ...]
    texts: tuple[str, ...]
    prompt_logprobs: bytes = b""
    top_prompt: Alternatives = ()
    cached_prompt_tokens: int = 0

    @property
    def tokens(self) -> int:
        """How many tokens were sampled."""
        return sum(len(sample.tokens) // 4 for sample in self.samples)

    @property
    def numbers(self) -> int:
        """How many numbers an answer contains: tokens, logprobs and alternatives."""
        sampled = sum(len(sample.tokens) // 4 * (2 + 2 * len(next(iter(sample.top), ()))) for sample in self.samples)
        return sampled + len(self.prompt_logprobs) // 4 + 2 * sum(map(len, self.top_prompt))


class SampleDrawing:
    """Draws the samples of one engine."""

    def __init__(self, calls: Calls, engine: str) -> None:
        self._calls = calls
        self._engine = engine

    @property
    def engine(self) -> EngineState:
        return self._calls.follower.hive.engine(self._engine)

    async def text_model(self) -> TextModel:
        """Return the run's tokenizer. Raises `Refused` while there is none."""
        return await self._calls.models.text_model(self.engine)

    async def tokens_of(self, text: str) -> bytes:
        """Return a text as tokens (int32).

        Raises the same errors as `text_model`. A text with too many characters is not encoded: it raises `Refused`
        PROMPT_TOO_LONG.
        """
        model = await self.text_model()
        limit = CHARACTERS_FOR_A_TOKEN * self._context(model)
        if len(text) > limit:
            why = f"The text has {len(text)} characters, but at most {limit} are accepted for the model's length of"
            raise Refused(Code.PROMPT_TOO_LONG, f"{why} {self._context(model)} tokens.")
        encode = partial(model.tokenizer.encode, text)
        return pack_tokens(await self._calls.workers.run(CLIENTS, len(text), encode))

    async def written(self, drawn: DrawnSamples, write: Callable[[], bytes]) -> bytes:
        """Return the result of `write`, run in a thread if the samples are large, so that no other request waits."""
        return await self._calls.workers.run(CLIENTS, NUMBER_BYTES * drawn.numbers, write)

    def _context(self, model: TextModel) -> int:
        return min(self._calls.models.job(self.engine).rollout.max_model_len, model.context_tokens)

    def _room(self, model: TextModel, length: int) -> int:
        """Return the maximum number of tokens in an answer to a prompt of `length` tokens."""
        return max(self._context(model) - length, 1)

    async def draw(self, sampler: Sampler, asked: SampleRequest, holder: str) -> DrawnSamples:
        """Draw samples, and record them if the gateway records samples. They count toward the share of `holder`.

        While the run continues, wait for a replica and for room in the log, up to the time limit of a call. Raises
        `Refused` (TIMEOUT after that limit), and `BusUnavailable` if the samples could not be recorded.
        """
        limit_s = self._calls.settings.call_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                drawn = await self._attempted(sampler, asked, holder)
        except TimeoutError:
            raise Refused(Code.TIMEOUT, f"The sample took longer than the limit of {limit_s:g} s.") from None
        self._calls.capacity.keys.charge(holder, lambda: len(asked.prompt) // 4 + drawn.tokens, len(asked.prompt))
        return drawn

    async def _attempted(self, sampler: Sampler, asked: SampleRequest, holder: str) -> DrawnSamples:
        """Draw samples. Retry if the log has no room, if there is no replica, or if the replica is busy, fails or lacks
        the adapter."""
        attempt = loads = failures = 0
        lacking = ""  # the replica that lacks the adapter
        while True:
            try:
                if lacking:
                    replica, lacking = lacking, ""
                    await self._calls.upstream.load_adapter(self._engine, replica, sampler.address, sampler.folder)
                return await self._drawn(sampler, asked, holder)
            except Refused as refusal:
                if refusal.code not in (Code.NO_REPLICA, Code.BUS_DOWN, Code.OVERLOADED):
                    raise
                log.debug("a sample waits: %s", refusal.why)
            except AdapterMissing as missing:
                loads += 1
                if loads > LOADS_MAX:
                    raise dropped_too_often(str(sampler.checkpoint)) from None
                lacking = missing.replica
                continue
            except ReplicaBusy as busy:
                log.debug("a sample waits: %s", busy)
            except ReplicaGone as gone:
                failures += 1
                if failures >= FAILURES_MAX:
                    raise Refused(Code.NO_REPLICA, f"{gone}; {failures} attempts to sample have failed.") from gone
            await asyncio.sleep(min(PAUSE_S * 2 ** min(attempt, 16), PAUSE_S_MAX))
            attempt += 1

    def _check_serving(self, sampler: Sampler) -> None:
        """Raise `Refused` unless the run serves the sampler. A run with rollout groups serves only its own policy."""
        engine = self.engine
        if engine.phase == Phase.OFFLINE:
            why = f"Engine {engine.name} is not running, so nothing can be sampled"
            raise Refused(
                Code.WRONG_PHASE, f"{why}: start a run by creating a model, or a sampling client of the base."
            )
        if engine.queues_groups:
            if engine.has_policy and not sampler.address:
                return
            has = "samples only from its own policy" if engine.has_policy else "has no model of its own"
            why = (
                f"Run {engine.run} of engine {engine.name} takes rollout groups and {has}: use another engine for this."
            )
            raise Refused(Code.WRONG_PHASE, why)
        if not engine.serves_operations:
            why = f"Engine {engine.name} plays episodes in run {engine.run}, and only their agents may call its model."
            raise Refused(Code.WRONG_PHASE, f"{why} Stop the run first, or use another engine.")

    async def _drawn(self, sampler: Sampler, asked: SampleRequest, holder: str) -> DrawnSamples:
        self._check_serving(sampler)
        model = await self.text_model()
        pieces = model.tokenizer.pieces
        names = hidden_names(model.tokenizer, asked.stops)
        ends = asked_stops(names, asked.stops, asked.sampling.stop_token_ids, len(pieces))
        if asked.ends_at_eos:
            ends |= configured_stops(model.tokenizer)
        collected = _Collected(asked, pieces, ends, names)
        generate = self._request(sampler, asked, self._sampling(asked, model, ends))
        if not self._calls.settings.record_samples:
            await self._generated(generate, len(pieces), collected)
            return collected.drawn()
        length, received_ns = len(asked.prompt) // 4, time.time_ns()
        sampled = asked.samples * min(generate.sampling.max_tokens, self._room(model, length))
        with self._calls.capacity.room(record_bytes(0, length, sampled), holder):
            replica = await self._generated(generate, len(pieces), collected)
            await self._record(generate, collected, replica, received_ns, holder)
        return collected.drawn()

    async def _generated(self, generate: Generate, vocabulary: int, collected: "_Collected") -> str:
        """Collect the samples of one attempt, and return the name of the replica that sampled them."""
        generation, replica = await self._calls.upstream.start(generate, vocabulary)
        try:
            await self._collect(generation, collected)
        except ReplicaGone as error:
            self._calls.upstream.failed(self._engine, replica, error)
            raise
        except Refused as refusal:
            if refusal.code == Code.UNKNOWN_MODEL and generate.adapter:
                raise AdapterMissing(replica) from None
            raise
        finally:
            generation.abort("the samples are complete, or are not wanted any more")
            self._calls.upstream.finished(generation)
        return replica

    async def _record(
        self, generate: Generate, collected: "_Collected", replica: str, received_ns: int, holder: str
    ) -> None:
        """Record samples as a call without an episode, before their client gets them (R9)."""
        bus, limit_s = self._calls.bus, self._calls.settings.bus_timeout_s
        record = CallRecord(
            id=generate.id,
            engine=generate.engine,
            run=generate.run,
            episode="",
            prompt_tail=generate.prompt,
            prompt_tokens=len(generate.prompt) // 4,
            choices=collected.choices(),
            sampling=generate.sampling,
            replica=replica,
            timings=Timings(received_ns, collected.first_ns, time.time_ns()),
            sampler=generate.adapter,
        )
        body = encode_record(record)
        subject = bus.subjects.call(record.engine, holder)
        ack = await bus.publisher.publish(subject, body, msg_id=record.id, timeout_s=limit_s)
        versions = [span.version for choice in record.choices for span in choice.spans] or [self.engine.version]
        noted = NotedCall(
            "",
            CallRef(ack.seq, record.id, digest(body)),
            record.prompt_tokens,
            record.completion_tokens(),
            min(versions),
            max(versions),
            bytes=len(body) + MESSAGE_BYTES,
            sampler=record.sampler,
            holder=holder,
        )
        message = CallRecorded(id=record.id, engine=record.engine, run=record.run, call=noted)
        await bus.inbox.send(message, timeout_s=limit_s)

    def _request(self, sampler: Sampler, asked: SampleRequest, sampling: SamplingParams) -> Generate:
        return Generate(
            id=os.urandom(16).hex(),
            engine=self._engine,
            run=self.engine.run,
            prompt=asked.prompt,
            sampling=sampling,
            n=asked.samples,
            stream=bool(asked.stops),
            episode=sampler.address,  # keeps samples of one adapter on the same replica
            adapter=sampler.address,
            prompt_logprobs=bool(asked.scored),
            top_prompt=asked.top_prompt if asked.scored else 0,
            plain_logprobs=not self.engine.has_policy,  # a policy's trainer computes logprobs at this temperature too
        )

    def _sampling(self, asked: SampleRequest, model: TextModel, ends: set[int]) -> SamplingParams:
        """Return the sampling parameters. Without `max_tokens`, a sample may fill the rest of the model's context.

        Raises `Refused` if the prompt is too long, or if there are too many numbers to sample or score.
        """
        given = asked.sampling
        context, length = self._context(model), len(asked.prompt) // 4
        if length > context:
            why = f"The prompt has {length} tokens, but the model's limit for prompt and answer is {context}."
            raise PromptTooLong("prompt", why, length, context)
        room = self._room(model, length)
        tokens = given.max_tokens or room
        check_sampled(asked.samples, min(tokens, room), given.top_logprobs)
        check_sampled(1, length, asked.top_prompt)
        return msgspec.structs.replace(given, max_tokens=tokens, stop_token_ids=tuple(sorted(ends)))

    async def _collect(self, generation: Generation, collected: "_Collected") -> None:
        while not collected.is_complete:
            frames = await generation.frames()
            if not frames:
                raise ReplicaGone("the replica's answer ended too early")
            for frame in frames:
                collected.take(frame)


class _Collected:
    """The frames received so far in answer to one request."""

    def __init__(self, asked: SampleRequest, pieces: Sequence[bytes], ends: set[int], names: Mapping[int, str]) -> None:
        self._asked = asked
        shown = ends.difference(names)
        self._choices = [_Choice(TextStream(pieces, asked.stops, names), shown) for _ in range(asked.samples)]
        self._scores = array("f")
        self._top: list[tuple[tuple[int, float], ...]] = []
        self._cached = 0
        self.first_ns = 0  # when the first token arrived

    @property
    def is_complete(self) -> bool:
        return all(choice.finish is not None for choice in self._choices)

    def take(self, frame: Frame) -> None:
        match frame:
            case Tokens():
                self.first_ns = self.first_ns or time.time_ns()
                self._choices[frame.choice].take(frame)
            case Finished():
                self._cached = max(self._cached, frame.cached_prompt_tokens)
                self._choices[frame.choice].end(frame.reason)
            case PromptScores():
                self._scores.frombytes(frame.logprobs)
                self._top += _rows(frame)
            case Fault():
                raise ReplicaGone(frame.why)  # normally already raised by the replica client

    def drawn(self) -> DrawnSamples:
        logprobs, top = self._of_prompt(len(self._asked.prompt) // 4, self._asked.scored)
        return DrawnSamples(
            samples=tuple(choice.sample() for choice in self._choices),
            texts=tuple("".join(choice.text) for choice in self._choices),
            prompt_logprobs=logprobs,
            top_prompt=top,
            cached_prompt_tokens=self._cached,
        )

    def choices(self) -> tuple[Choice, ...]:
        """Return the samples in the form in which they are recorded."""
        return tuple(choice.recorded() for choice in self._choices)

    def _of_prompt(self, length: int, scored: int | None) -> tuple[bytes, Alternatives]:
        """Return the logprobs of a prompt of `length` tokens, and the alternatives to those tokens. Both are empty
        unless requested."""
        if scored is None:
            return b"", ()
        last = self._scores[len(self._scores) - scored :]
        rows = self._top[len(self._top) - scored :]
        nothing = (NOTHING,) * self._asked.top_prompt
        return unscored(length, last), [*[nothing] * (length - scored), *rows] if nothing else ()


class _Choice:
    """One sample while it is being drawn."""

    def __init__(self, stream: TextStream, ends: set[int]) -> None:
        self.text: list[str] = []
        self.finish: FinishReason | None = None
        self._stream = stream
        self._ends = ends
        self._tokens: list[bytes] = []
        self._logprobs: list[bytes] = []
        self._spans: list[Span] = []
        self._top: list[tuple[tuple[int, float], ...]] = []

    def take(self, frame: Tokens) -> None:
        if self.finish is not None:
            return
        tokens = unpack_tokens(frame.tokens)
        # The text of a stop token is not part of the sample's text.
        said = tokens[:-1] if tokens and tokens[-1] in self._ends else tokens
        text, used = self._stream.feed(said)
        self.text.append(text)
        if self._stream.stopped:
            self.finish = FinishReason.STOP
        else:
            used = len(tokens)
        add_span(self._spans, frame.version, used)
        self._tokens.append(frame.tokens[: 4 * used])
        self._logprobs.append(frame.logprobs[: 4 * used])
        self._top += frame.top[:used]

    def end(self, reason: str) -> None:
        if self.finish is None:
            self.text.append(self._stream.finish())
            self.finish = FinishReason.LENGTH if reason == FinishReason.LENGTH else FinishReason.STOP

    def sample(self) -> SampledTokens:
        assert self.finish is not None
        return SampledTokens(
            tokens=b"".join(self._tokens), logprobs=b"".join(self._logprobs), finish=self.finish, top=tuple(self._top)
        )

    def recorded(self) -> Choice:
        sample = self.sample()
        return Choice(sample.tokens, sample.logprobs, tuple(self._spans), sample.finish)


def _rows(frame: PromptScores) -> list[tuple[tuple[int, float], ...]]:
    tokens, logprobs, width = array("i", frame.top_tokens), array("f", frame.top_logprobs), frame.width
    if not width:
        return []
    pairs = list(zip(tokens, logprobs, strict=True))
    return [tuple(pairs[start : start + width]) for start in range(0, len(pairs), width)]
