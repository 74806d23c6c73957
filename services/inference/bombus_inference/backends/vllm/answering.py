"""Answers requests with vLLM: sampled tokens and prompt scores, each with the version that computed it."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import httpx
import msgspec

from bombus.errors import Code, EngineFault, Refused
from bombus.hive.events import CanaryCheck
from bombus.hive.generation import Finished, Generate
from bombus.hive.records import FinishReason
from bombus.weights.canary import SERVED, Expected, canary_sequences, compare
from bombus_inference.backends.answers import ChoiceDelta, FrameAssembler
from bombus_inference.backends.http_calls import JSON, BackendFailed, FrameBatches, check_answer, server_sent
from bombus_inference.backends.limits import NO_ADAPTERS, Limits, samples_plainly
from bombus_inference.backends.vllm.adapters import VllmAdapters
from bombus_inference.backends.vllm.scoring import ScoredSequence, parse_scores, scoring_body
from bombus_inference.backends.vllm.server import VllmServer
from bombus_inference.backends.vllm.wire import parse_deltas, request_body

log = logging.getLogger(__name__)

GENERATE = "/inference/v1/generate"
CANARY_S = 10.0  # under load, vLLM scores the canary only after the requests that are already waiting

_NOT_COMPILED = "the engine failed on a structured-output request ({}); it may not support this schema"
_TokenDeltas = AsyncGenerator[list[ChoiceDelta], None]


class ServedVersion:
    """The version that a backend serves (-1 if none), and when it changes."""

    def __init__(self) -> None:
        self.number = -1
        self.swaps = 0  # incremented before anything changes
        self.steady = asyncio.Event()  # set while no weights are being changed
        self.steady.set()

    def check_unchanged(self, swaps: int) -> None:
        """Raise `BackendFailed` if the weights have changed since `swaps` was read."""
        if self.swaps != swaps:
            raise BackendFailed("the weights changed while tokens were scored")


@dataclass(frozen=True)
class Answering:
    """Answers requests using one child. `model` is vLLM's name for the child's policy."""

    server: VllmServer
    run: int
    model: str
    limits: Limits
    served: ServedVersion
    adapters: VllmAdapters | None

    async def answer(self, request: Generate, prompt: list[int]) -> FrameBatches:
        """Yield the frames of an answer. Raises `BackendFailed` or `Refused`."""
        try:
            with self._model_of(request) as model:
                async with contextlib.aclosing(self._frames(request, prompt, model)) as made:
                    async for frames in made:
                        yield frames
        except BackendFailed as error:
            # The engine compiles grammars. Some grammars that passed the checks fail to compile, and would on every
            # replica.
            if request.constraint is not None and await self.server.is_healthy():
                raise Refused(Code.UNSUPPORTED, _NOT_COMPILED.format(error)) from error
            raise

    def _model_of(self, request: Generate) -> contextlib.AbstractContextManager[str]:
        """Return a context that yields vLLM's name for a request's weights and keeps them loaded.

        Raises `Refused` if the request names an adapter that is not served.
        """
        if self.adapters is not None:
            return self.adapters.using(request.adapter)
        if request.adapter:
            raise Refused(Code.UNSUPPORTED, NO_ADAPTERS)
        return contextlib.nullcontext(self.model)

    async def _frames(self, request: Generate, prompt: list[int], model: str) -> FrameBatches:
        served = self.served
        await served.steady.wait()
        swaps = served.swaps
        if request.prompt_logprobs:
            scored = await self._score(prompt, request.top_prompt, model)
            served.check_unchanged(swaps)
            yield [*scored.frames(request.top_prompt, served.number)]
            if not request.sampling.max_tokens:
                yield [Finished(choice=choice, reason=FinishReason.LENGTH) for choice in range(request.n)]
                return
        tokens_max = self._tokens_max(request, prompt)
        assembler = FrameAssembler(request, served.number, lambda: served.swaps == swaps, tokens_max - len(prompt))
        async with contextlib.aclosing(self._deltas(request, prompt, tokens_max, model)) as arriving:
            async for deltas in arriving:
                await served.steady.wait()  # new weights are checked before any token sampled from them is sent
                for delta in deltas:
                    if request.prompt_logprobs:
                        delta.cached_prompt_tokens = 0  # the whole prompt was computed for its scores
                    if frames := assembler.take(delta):
                        yield frames

    async def _deltas(self, request: Generate, prompt: list[int], tokens_max: int, model: str) -> _TokenDeltas:
        top, rescored, swaps = request.sampling.top_logprobs, _is_rescored(request), self.served.swaps
        stream = request.stream and not rescored
        body = request_body(request, prompt, tokens_max, model, stream)
        async with self.server.client.stream("POST", GENERATE, content=body, headers=JSON) as response:
            await check_answer(response)
            if stream:
                async for event in server_sent(response):
                    yield parse_deltas(event, self.run, top)
                return
            deltas = parse_deltas(await response.aread(), self.run, top)
        if rescored:
            await asyncio.gather(*(self._rescore(prompt, delta, top, model) for delta in deltas))
            self.served.check_unchanged(swaps)
        yield deltas

    async def _rescore(self, prompt: list[int], delta: ChoiceDelta, width: int, model: str) -> None:
        """Replace an answer's logprobs with those of the model's own distribution, regardless of how its tokens were
        drawn."""
        scored = await self._score([*prompt, *delta.tokens], width, model)
        delta.logprobs = scored.logprobs[len(prompt) - 1 :]
        delta.tops = scored.tops[len(prompt) - 1 :]

    async def score_canary(self, expected: Expected, dtype: str) -> CanaryCheck | None:
        """Compare the logprobs that vLLM returns with the expected ones.

        Return None if vLLM refuses to return logprobs, or has not returned them after `CANARY_S` seconds. Raises
        `CanaryFailed` if they differ, or another `EngineFault` if vLLM fails to score the canary.
        """
        lines = canary_sequences(self.limits.vocabulary)
        try:
            async with asyncio.timeout(CANARY_S):
                scored = await asyncio.gather(*(self._score(line, 0, self.model) for line in lines))
        except (Refused, TimeoutError) as error:
            why = str(error) or f"vLLM is too busy to score the canary within {CANARY_S:.0f} s"
            log.warning("version %d is served unchecked: %s", expected.version, why)
            return None
        except (BackendFailed, httpx.HTTPError, msgspec.MsgspecError) as error:  # includes scores that are not finite
            why = str(error) or type(error).__name__
            raise EngineFault(f"vLLM did not score the canary of version {expected.version}: {why}") from error
        return compare(expected, [each for one in scored for each in one.logprobs], SERVED[dtype])

    async def _score(self, tokens: list[int], width: int, model: str) -> ScoredSequence:
        body = scoring_body(tokens, width, model)
        response = await self.server.client.post(GENERATE, content=body, headers=JSON)
        await check_answer(response)
        return parse_scores(response.content, tokens, width)

    def _tokens_max(self, request: Generate, prompt: list[int]) -> int:
        """Return the token limit for prompt and completion. Raises `Refused` if there is no room for a completion."""
        tokens_max = self.limits.tokens_max(request, prompt)
        if not _is_rescored(request):
            return tokens_max
        longest = self.limits.max_model_len - 1  # after scoring the prompt, vLLM must sample one more token
        if longest <= len(prompt):
            why = (
                f"the prompt has {len(prompt)} tokens; with logprobs at temperature 1 for tokens that are sampled "
                f"differently, this replica takes {longest} for prompt and completion"
            )
            raise Refused(Code.PROMPT_TOO_LONG, why)
        return min(tokens_max, longest)


def _is_rescored(request: Generate) -> bool:
    """Return whether the request wants logprobs from a distribution other than the one that its tokens are sampled
    from."""
    return request.plain_logprobs and not samples_plainly(request)
