"""`/generate` in vLLM's form, which Atropos's environments use to sample tokens with logprobs."""

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

_Logprobs: TypeAlias = Mapping[int, float]  # by token id; the sampled or given token comes first


class VllmRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for samples. If the prompt is given as `text`, the prompt of `asked` is empty.

    With `logprobs`, the answer contains tokens and their logprobs, with `asked.sampling.top_logprobs` alternatives for
    each token; otherwise it contains only text. If `streamed`, the answer is a single line in which each text is the
    prompt followed by the sample. Texts are empty unless `decoded`. Decoded texts contain special tokens only if
    `with_specials`, and end with the stop text only if `with_stop`.
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
    """The text of a prompt and, if requested, the logprobs of its tokens and the likeliest tokens at each position.

    `logprobs` (float32) and `top` have an entry for each token. For tokens that were not scored, `logprobs` has NaN and
    `top` has padding. A prompt of one token has no scores.
    """

    text: str
    logprobs: bytes = b""
    top: Alternatives = ()


class _Prompt(msgspec.Struct, forbid_unknown_fields=True):
    prompt_token_ids: list[int] | None = None
    prompt: str | None = None


class _Generate(DrawingParams, forbid_unknown_fields=True, kw_only=True):
    """The supported fields. Any other field could change the samples, so it is refused by name."""

    prompt: str | _Prompt
    stream: bool = False
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    min_tokens: int = 0
    # These fields change how an answer is written, but not the samples.
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    spaces_between_special_tokens: bool = True  # no effect: supported decoders never add such spaces


_generates = msgspec.json.Decoder(_Generate)


def is_vllm(names: Iterable[str]) -> bool:
    """Return whether a body with these fields is in vLLM's form. SGLang's form has other fields for the prompt."""
    given = frozenset(names)
    return _PROMPT in given and not given & _SGLANG


def read_vllm(body: bytes) -> VllmRequest:
    """Read a request to `/generate` in vLLM's form. Raises `Refused` for a body that is not a valid request."""
    given = decode_at(_generates, body)
    if given.min_tokens > 0:
        raise Refused(Code.UNSUPPORTED, "min_tokens is not offered here: leave it out.")
    if given.stop and not given.detokenize:
        raise UnfitBody("detokenize", "stop texts need decoded text: leave out `detokenize`, or send stop_token_ids.")
    prompt, text = _prompt_of(given.prompt)
    scored: int | None = None
    top_prompt = 0
    if given.prompt_logprobs is not None:
        if text:
            why = "prompt_logprobs needs a prompt of token ids: send the prompt as prompt_token_ids."
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
    """Return the text of a sample in the form that the request asks for.

    `text` is the sample's text without special tokens and without the stop text.
    """
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
    """Return samples with their texts. `request.asked` must contain the prompt's tokens, even if the prompt was given
    as text.

    Raises `ValueError` in the same cases as `checked_finish`.
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
    """Return the logprobs at one position: first the logprob of the token itself, as clients expect, then those of the
    alternatives."""
    return {token: logprob} | {other: of_other for other, of_other in top if other != token}


def _prompt_of(given: str | _Prompt) -> tuple[bytes, str]:
    """Return the tokens of a prompt (int32) and "", or no tokens and the prompt's text."""
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
