"""`/generate` as an episode's call, in both forms. Turns requests into `CompletionRequest`, and answers into bytes.
Pure."""

from array import array
from collections.abc import Sequence
from functools import partial
from typing import NoReturn

import msgspec

from bombus.errors import Code, Refused
from bombus.hive.records import FinishReason
from bombus.machine.host_names import HeaderPair
from bombus_gateway.access import HeaderMap
from bombus_gateway.atropos.refusals import write_refusal
from bombus_gateway.atropos.vllm_generate import (
    ScoredPrompt,
    VllmRequest,
    is_vllm,
    read_vllm,
    shown_text,
    write_vllm,
)
from bombus_gateway.call.api import ParsedRequest
from bombus_gateway.call.calls import AnswerHead
from bombus_gateway.call.completion import Completion, CompletionDelta, Usage
from bombus_gateway.call.prefixes import NOTHING_READ, BodyPrefix
from bombus_gateway.call.request import CompletionRequest, RequestedSampling, Unsupported
from bombus_gateway.decoding.json_body import check_depth, decode_body, raw_fields
from bombus_gateway.operations_wire.generate import GenerateRequest, read_generate, write_generated
from bombus_gateway.operations_wire.samples import SampledTokens
from bombus_gateway.operations_wire.sampling import SampleRequest


class GenerateDialect:
    """The dialect of `/generate`. Bodies in vLLM's form have a `prompt`; those in SGLang's form have `input_ids` or
    `text`."""

    name = b"generate"

    def read(self, body: bytes, headers: HeaderMap, before: BodyPrefix = NOTHING_READ) -> ParsedRequest:
        check_depth(body)
        fields = decode_body(raw_fields, body)
        if is_vllm(fields):
            asked = read_vllm(body)
            if asked.prompt_logprobs:
                why = "prompt_logprobs is not offered with an episode's key: use a client key of the hive."
                raise Refused(Code.UNSUPPORTED, why)
            completion = _completion(asked.asked, asked.text, asked.logprobs)
            return ParsedRequest(completion, partial(VllmEncoder, asked))
        given = read_generate(body)
        completion = _completion(given.asked, given.text, logprobs=False, adapter=given.adapter)
        return ParsedRequest(completion, partial(SglangEncoder, given))

    def error(self, error: Refused) -> bytes:
        return write_refusal(error)[1]

    def error_event(self, error: Refused) -> bytes:
        return self.error(error)


def _completion(asked: SampleRequest, text: str, logprobs: bool, adapter: str = "") -> CompletionRequest:
    given = asked.sampling
    unsupported = []
    if not asked.ends_at_eos:
        unsupported.append(Unsupported("ignore_eos", "an answer ends at the tokens that the model's files name"))
    if adapter:
        unsupported.append(Unsupported("lora_path", "an episode is answered by the model that its engine trains"))
    return CompletionRequest(
        chat=False,
        prompt=text or array("i", asked.prompt).tolist(),
        n=asked.samples,
        stops=asked.stops,
        stop_token_ids=given.stop_token_ids,
        logprobs=logprobs and given.top_logprobs > 0,
        top_logprobs=given.top_logprobs,
        sampling=RequestedSampling(
            temperature=given.temperature,
            top_p=given.top_p,
            top_k=given.top_k,
            min_p=given.min_p,
            presence_penalty=given.presence_penalty,
            frequency_penalty=given.frequency_penalty,
            repetition_penalty=given.repetition_penalty,
            seed=given.seed,
            max_tokens=given.max_tokens or None,
        ),
        unsupported=tuple(unsupported),
    )


class GenerateEncoder:
    """The base class of both forms' encoders. An answer is sent in one piece, with the recorded tokens."""

    def __init__(self, head: AnswerHead) -> None:
        self._head = head

    @property
    def headers(self) -> Sequence[HeaderPair]:
        return ((b"x-request-id", self._head.id.encode()),)

    def opening(self) -> NoReturn:
        raise AssertionError("an answer of /generate is not streamed")

    def beat(self) -> NoReturn:
        self.opening()

    def progress(self, completion: Completion, delta: CompletionDelta) -> NoReturn:
        self.opening()

    def closing(self, completion: Completion) -> NoReturn:
        self.opening()

    def end(self, usage: Usage) -> NoReturn:
        self.opening()


class VllmEncoder(GenerateEncoder):
    def __init__(self, request: VllmRequest, head: AnswerHead) -> None:
        super().__init__(head)
        self._request = request

    def whole(self, completions: Sequence[Completion], usage: Usage) -> bytes:
        asked = msgspec.structs.replace(self._request.asked, prompt=self._head.prompt)
        request = msgspec.structs.replace(self._request, asked=asked)
        tokenizer = self._head.tokenizer
        text = request.text or tokenizer.decode(array("i", asked.prompt).tolist())
        samples = [_sampled(each) for each in completions]
        texts = [shown_text(request, sample, each.text(), tokenizer) for sample, each in zip(samples, completions)]
        return write_vllm(request, samples, texts, ScoredPrompt(text))


class SglangEncoder(GenerateEncoder):
    def __init__(self, request: GenerateRequest, head: AnswerHead) -> None:
        super().__init__(head)
        self._request = request

    def whole(self, completions: Sequence[Completion], usage: Usage) -> bytes:
        samples = [_sampled(each) for each in completions]
        texts = [each.text() for each in completions]
        answer = write_generated(samples, texts, usage.prompt, self._request.logprobs, reasons_are_objects=True)
        return msgspec.json.encode(answer)


def _sampled(completion: Completion) -> SampledTokens:
    """Return a completion's recorded tokens. The stop token has no text, so it gets an empty tuple of alternatives."""
    choice = completion.choice()
    top = [each.top for each in completion.logprobs]
    if top:
        top += [()] * (len(choice.tokens) // 4 - len(top))
    return SampledTokens(
        tokens=choice.tokens, logprobs=choice.logprobs, finish=FinishReason(choice.finish), top=tuple(top)
    )
