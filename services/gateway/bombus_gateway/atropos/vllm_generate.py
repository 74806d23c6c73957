"""`/generate` in vLLM's form, by which Atropos's environments sample tokens with logprobs."""

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import msgspec

from bombus.errors import Code, Refused
from bombus.hive.records import FinishReason, SamplingParams, unpack_tokens
from bombus.text.tokenizer import Tokenizer
from bombus_gateway import limits
from bombus_gateway.atropos.json_body import decode_at
from bombus_gateway.atropos.refusals import UnfitBody
from bombus_gateway.operations_wire.data.tensors import INT32_MAX
from bombus_gateway.operations_wire.samples import Alternatives, SampledTokens, checked_finish
from bombus_gateway.operations_wire.sampling import TOKENS_MAX, DrawingParams, SampleRequest, counted, stops_of

_PROMPT = "prompt"
_SGLANG = frozenset(("text", "input_ids", "sampling_params"))

_Logprobs: TypeAlias = Mapping[int, float]  # by token; the token that is there comes first


class VllmRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be sampled. The prompt of `asked` is empty where it is given as a `text`.

    With `logprobs` the answer has tokens and their logprobs, and `asked.sampling.top_logprobs` alternatives to each;
    without it the answer is text alone. One that is `streamed` is the same answer as a line. Where it is `decoded`,
    its text has no names of special tokens unless `with_specials`, and ends with what stopped it if `with_stop`.
    """

    asked: SampleRequest
    text: str = ""
    logprobs: bool = False
    prompt_logprobs: bool = False
    streamed: bool = False
    decoded: bool = True
    with_specials: bool = False
    with_stop: bool = False


class ScoredPrompt(msgspec.Struct, frozen=True):
    """The text of a prompt; and where they were asked for, the logprobs of its tokens, and the likeliest in each place.

    `logprobs` (float32) and `top` are one for each token; those of tokens that were not scored are NaN and nothing. A
    prompt of one token has neither.
    """

    text: str
    logprobs: bytes = b""
    top: Alternatives = ()


class _Prompt(msgspec.Struct, forbid_unknown_fields=True):
    prompt_token_ids: list[int] | None = None
    prompt: str | None = None


class _Generate(DrawingParams, forbid_unknown_fields=True, kw_only=True):
    """What is not here would change what is sampled, and is refused by its name."""

    prompt: str | _Prompt
    stream: bool = False
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    min_tokens: int = 0
    # These change how an answer is written, and not what is sampled.
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    spaces_between_special_tokens: bool = True  # the decoders that are taken here write none either way


_generates = msgspec.json.Decoder(_Generate)


def is_vllm(names: Iterable[str]) -> bool:
    """Return whether a body with these fields is in vLLM's form. SGLang's has its prompt under other names."""
    given = frozenset(names)
    return _PROMPT in given and not given & _SGLANG


def read_vllm(body: bytes) -> VllmRequest:
    """Raises `Refused`."""
    given = decode_at(_generates, body)
    if given.min_tokens > 0:
        raise Refused(Code.UNSUPPORTED, "min_tokens is not offered here: leave it out.")
    if given.stop and not given.detokenize:
        raise UnfitBody(
            "detokenize", "stop texts are looked for in text: leave out detokenize, or send stop_token_ids."
        )
    prompt, text = _prompt_of(given.prompt)
    scored: int | None = None
    top_prompt = 0
    if given.prompt_logprobs is not None:
        if text:
            why = "prompt_logprobs are those of tokens: send the prompt as prompt_token_ids."
            raise UnfitBody("prompt_logprobs", why)
        top_prompt = counted("prompt_logprobs", given.prompt_logprobs, 0, limits.TOP_LOGPROBS)
        scored = len(prompt) // 4 - 1
    return VllmRequest(
        asked=SampleRequest(
            prompt=prompt,
            sampling=_sampling(given),
            samples=counted("n", given.n, 1, limits.SAMPLES),
            stops=stops_of(given.stop)[0],
            ends_at_eos=not given.ignore_eos,
            scored=scored,
            top_prompt=top_prompt,
        ),
        text=text,
        logprobs=given.logprobs is not None,
        prompt_logprobs=given.prompt_logprobs is not None,
        streamed=given.stream,
        decoded=given.detokenize,
        with_specials=not given.skip_special_tokens,
        with_stop=given.include_stop_str_in_output,
    )


def shown_text(request: VllmRequest, sample: SampledTokens, text: str, tokenizer: Tokenizer) -> str:
    """Return the text of a sample as the request wants it; `text` has no special tokens, and not what stopped it."""
    if not request.decoded:
        return ""
    if not request.with_specials and not request.with_stop:
        return text
    tokens, names = unpack_tokens(sample.tokens), tokenizer.specials if request.with_specials else {}
    pieces = [tokenizer.pieces[token] or names.get(token, "").encode() for token in tokens]
    whole = b"".join(pieces).decode("utf-8", "replace")
    stops = [(at, stop) for stop in request.asked.stops if (at := whole.find(stop)) >= 0]
    if stops:
        at, stop = min(stops)
        return whole[: at + len(stop) if request.with_stop else at]
    if request.with_stop or sample.finish != FinishReason.STOP:
        return whole
    return b"".join(pieces[:-1]).decode("utf-8", "replace")


def write_vllm(
    request: VllmRequest, samples: Sequence[SampledTokens], texts: Sequence[str], prompt: ScoredPrompt
) -> bytes:
    """Return samples with their texts. `request.asked` has the prompt's tokens, also where it came as a text.

    Raises `ValueError` for what is not a sample.
    """
    finishes = [checked_finish(sample.finish).value for sample in samples]
    if request.streamed:
        return msgspec.json.encode({"text": [prompt.text + text for text in texts]}) + b"\n"
    answer: dict[str, object] = {"text": texts, "prompt": prompt.text, "finish_reasons": finishes}
    tokens = array("i", request.asked.prompt).tolist()
    if request.logprobs:
        answer["logprobs"] = [[[each] for each in _sampled(sample)] for sample in samples]
        answer["prompt_token_ids"] = tokens
        answer["token_ids"] = [array("i", sample.tokens).tolist() for sample in samples]
    if request.prompt_logprobs:
        scores = array("f", prompt.logprobs) if prompt.logprobs else [math.nan] * len(tokens)
        answer["prompt_logprobs"] = [
            None if math.isnan(logprob) else _in_place(token, logprob, others)
            for token, logprob, others in zip(tokens, scores, prompt.top or [()] * len(tokens), strict=True)
        ]
    return msgspec.json.encode(answer)


def _sampled(sample: SampledTokens) -> list[_Logprobs]:
    tokens = array("i", sample.tokens)
    top = sample.top or [()] * len(tokens)
    return [_in_place(*place) for place in zip(tokens, array("f", sample.logprobs), top, strict=True)]


def _in_place(token: int, logprob: float, top: Sequence[tuple[int, float]]) -> _Logprobs:
    """Return the logprobs of one place: first of the token itself, as clients expect, then of others."""
    return {token: logprob} | {other: of_other for other, of_other in top if other != token}


def _prompt_of(given: str | _Prompt) -> tuple[bytes, str]:
    """Return the tokens of a prompt, or its text."""
    if isinstance(given, str):
        given = _Prompt(prompt=given)
    ids = given.prompt_token_ids
    if bool(ids) == bool(given.prompt):
        why = "The prompt is missing or given twice: send prompt_token_ids, or a text that is not empty."
        raise UnfitBody(_PROMPT, why)
    if not ids:
        return b"", given.prompt or ""
    if len(ids) > TOKENS_MAX or not 0 <= min(ids) <= max(ids) <= INT32_MAX:
        why = f"prompt_token_ids must be at most {TOKENS_MAX} token ids from 0 to {INT32_MAX}."
        raise UnfitBody("prompt.prompt_token_ids", why)
    return array("i", ids).tobytes(), ""


def _sampling(given: _Generate) -> SamplingParams:
    found = given.checked(0 if given.max_tokens is None else counted("max_tokens", given.max_tokens, 1, TOKENS_MAX))
    return msgspec.structs.replace(found, top_logprobs=counted("logprobs", given.logprobs or 0, 0, limits.TOP_LOGPROBS))
