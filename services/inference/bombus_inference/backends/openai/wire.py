"""The wire formats of external servers: vLLM's `/v1/completions` with token ids, and SGLang's `/generate`.

This module only translates. SGLang's format follows SGLang's documentation on its native API, sampling parameters and
use for RL (docs.sglang.io).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from msgspec import Struct

from bombus.errors import Code, Refused
from bombus.hive.generation import Generate
from bombus_inference.backends.answers import ChoiceDelta, most_likely
from bombus_inference.backends.http_calls import BackendFailed
from bombus_inference.backends.wire import ScoredToken, ServerAnswer, penalty_fields

TOKEN_PREFIX = "token_id:"

_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class ServerChoice:
    """One choice in a server's answer. Unreported fields are None or empty; `label` is the server's label for its
    weights."""

    choice: int
    text: str = ""
    tokens: Sequence[int] | None = None
    logprobs: Sequence[float] | None = None
    tops: Sequence[Sequence[tuple[int, float]]] = ()
    finish: str | None = None
    cached: int = 0
    label: str = ""

    def delta(self, top_logprobs: int) -> ChoiceDelta:
        """Return the parts that training needs. Raises `BackendFailed` if token ids or logprobs are missing."""
        if self.tokens is None or self.logprobs is None:
            raise BackendFailed("the server returns no token ids or no logprobs")
        tops = [most_likely(row, top_logprobs) for row in self.tops] if top_logprobs else []
        return ChoiceDelta(
            choice=self.choice,
            tokens=self.tokens,
            logprobs=self.logprobs,
            tops=tops,
            finish=self.finish,
            cached_prompt_tokens=self.cached,
        )


# ---- /v1/completions ------------------------------------------------------------------------------------------


class CompletionLogprobs(Struct):
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class CompletionChoice(Struct):
    index: int = 0
    text: str = ""
    token_ids: list[int] | None = None
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    prompt_logprobs: list[dict[int, ScoredToken] | None] | None = None


class TextCompletion(ServerAnswer):
    choices: list[CompletionChoice] = msgspec.field(default_factory=list)


_completions = msgspec.json.Decoder(TextCompletion)


def completions_body(model: str, request: Generate, prompt: list[int], tokens_max: int) -> bytes:
    """Return the request's body. `tokens_max` is the limit on prompt and completion together."""
    sampling = request.sampling
    body: dict[str, object] = {
        "model": model,
        "prompt": prompt,
        "n": request.n,
        "max_tokens": tokens_max - len(prompt),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop_token_ids": sampling.stop_token_ids,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "logprobs": sampling.top_logprobs,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "stream": request.stream,
    }
    body |= penalty_fields(sampling)
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    return _encoder.encode(body)


def parse_completions(data: bytes) -> list[ServerChoice]:
    """Parse one event or answer. Raises `BackendFailed` if it is invalid."""
    answer = _completions.decode(data)
    answer.check()
    return [_completion_choice(choice, answer.cached_prompt_tokens) for choice in answer.choices]


def completions_scoring_body(model: str, tokens: list[int]) -> bytes:
    """Return the body of a request that scores `tokens` as vLLM does. The request must also sample a token."""
    return _encoder.encode({"model": model, "prompt": tokens, "max_tokens": 1, "prompt_logprobs": 0})


def parse_completions_scores(data: bytes, tokens: list[int]) -> list[float] | None:
    """Return the logprobs of all `tokens` except the first, or None if the server gives none. Raises `BackendFailed`
    for an impossible answer."""
    answer = _completions.decode(data)
    answer.check()
    rows = answer.choices[0].prompt_logprobs if answer.choices else None
    found = [(row or {}).get(token) for token, row in zip(tokens[1:], (rows or [])[1:])]
    logprobs = [each.logprob for each in found if each is not None]
    return logprobs if len(logprobs) == len(tokens) - 1 else None


def _completion_choice(choice: CompletionChoice, cached: int) -> ServerChoice:
    reported = choice.logprobs
    if reported is None or None in reported.token_logprobs:
        logprobs = None
    else:
        logprobs = [one or 0.0 for one in reported.token_logprobs]
    return ServerChoice(
        choice=choice.index,
        text=choice.text,
        tokens=choice.token_ids,
        logprobs=logprobs,
        tops=[_by_token(row or {}) for row in (reported.top_logprobs or [])] if reported is not None else [],
        finish=choice.finish_reason,
        cached=cached,
    )


def _by_token(row: dict[str, float]) -> list[tuple[int, float]]:
    try:
        return [(int(token.removeprefix(TOKEN_PREFIX)), logprob) for token, logprob in row.items()]
    except ValueError as error:
        raise BackendFailed("the server returns alternatives as text, not as token ids") from error


# ---- SGLang's /generate ---------------------------------------------------------------------------------------

SglangLogprob = tuple[float, int, str | None]


class SglangFinish(Struct):
    type: str = ""
    message: str = ""


class SglangMeta(Struct):
    finish_reason: SglangFinish | None = None
    output_token_logprobs: list[SglangLogprob] | None = None
    input_token_logprobs: list[tuple[float | None, int, str | None]] | None = None
    output_top_logprobs: list[list[SglangLogprob] | None] | None = None
    cached_tokens: int = 0
    weight_version: str | None = None


class SglangChoice(Struct):
    text: str = ""
    meta_info: SglangMeta = msgspec.field(default_factory=SglangMeta)


_sglang = msgspec.json.Decoder(list[SglangChoice] | SglangChoice)


def sglang_body(request: Generate, prompt: list[int], tokens_max: int) -> bytes:
    """Return the request's body, which has no seed because SGLang does not accept a seed per request.

    The answer is not streamed, because what its parts contain depends on the server's options. Raises `Refused` for a
    repetition penalty, because SGLang's penalty considers only sampled tokens (sglang/srt/sampling/penaltylib), not the
    prompt.
    """
    sampling = request.sampling
    if sampling.repetition_penalty != 1:
        why = "repetition_penalty is not supported here: SGLang does not count the prompt's tokens. Leave it out."
        raise Refused(Code.UNSUPPORTED, why)
    parameters: dict[str, object] = {
        "n": request.n,
        "max_new_tokens": tokens_max - len(prompt),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "stop_token_ids": sampling.stop_token_ids,
        "skip_special_tokens": False,
    } | penalty_fields(sampling)
    body = {
        "input_ids": prompt,
        "sampling_params": parameters,
        "return_logprob": True,
        "top_logprobs_num": sampling.top_logprobs,
        "stream": False,
    }
    return _encoder.encode(body)


def parse_sglang(data: bytes) -> list[ServerChoice]:
    """Parse an answer. The sampled ids are taken from the logprobs, since `output_ids` may lack a stop token."""
    answer = _sglang.decode(data)
    choices = answer if isinstance(answer, list) else [answer]
    return [_sglang_choice(number, choice) for number, choice in enumerate(choices)]


def sglang_scoring_body(tokens: list[int]) -> bytes:
    """Return the body of a request that scores `tokens`. The request also samples a token."""
    scoring = {"return_logprob": True, "logprob_start_len": 0, "stream": False}
    return _encoder.encode({"input_ids": tokens, "sampling_params": {"max_new_tokens": 1}, **scoring})


def parse_sglang_scores(data: bytes, tokens: list[int]) -> list[float] | None:
    """Return the logprobs of all `tokens` except the first, or None if the server gives none."""
    answer = _sglang.decode(data)
    choice = answer[0] if isinstance(answer, list) else answer
    rows = (choice.meta_info.input_token_logprobs or [])[1:]
    logprobs = [logprob for (logprob, token, _), own in zip(rows, tokens[1:]) if logprob is not None and token == own]
    return logprobs if len(logprobs) == len(tokens) - 1 else None


def _sglang_choice(number: int, choice: SglangChoice) -> ServerChoice:
    meta = choice.meta_info
    scored = meta.output_token_logprobs
    return ServerChoice(
        choice=number,
        text=choice.text,
        tokens=None if scored is None else [token for _, token, _ in scored],
        logprobs=None if scored is None else [logprob for logprob, _, _ in scored],
        tops=[[(token, logprob) for logprob, token, _ in row or []] for row in meta.output_top_logprobs or []],
        finish="abort" if meta.finish_reason is None else meta.finish_reason.type,
        cached=meta.cached_tokens,
        label=meta.weight_version or "",
    )
