"""The wire format of vLLM's `/inference/v1/generate`: token ids in, token ids out, and which weights sampled them."""

import msgspec
from msgspec import Struct

from bombus.hive.generation import Generate
from bombus_inference.backends.answers import ChoiceDelta, most_likely
from bombus_inference.backends.http_calls import BackendFailed
from bombus_inference.backends.protocol import TopLogprobs
from bombus_inference.backends.vllm.structured import structured_outputs
from bombus_inference.backends.wire import ServerAnswer, penalty_fields


class VllmLogprob(Struct):
    token_id: int
    logprob: float
    top_logprobs: list["VllmLogprob"] = []


class VllmLogprobs(Struct):
    content: list[VllmLogprob]


class VersionSpan(Struct):
    version: str
    start: int
    end: int


class VllmChoice(Struct):
    index: int
    token_ids: list[int]
    logprobs: VllmLogprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[VersionSpan] | None = None


class VllmChunk(ServerAnswer):
    """One server-sent event, or the whole answer to a request that is not streamed."""

    choices: list[VllmChoice] = msgspec.field(default_factory=list)


_chunks = msgspec.json.Decoder(VllmChunk)
_encoder = msgspec.json.Encoder()


def request_body(request: Generate, prompt: list[int], tokens_max: int, model: str, stream: bool) -> bytes:
    """Return the request's body. `tokens_max` is the limit on prompt and completion together.

    `model` is vLLM's name for the model or for an adapter.
    """
    sampling = request.sampling
    parameters: dict[str, object] = {
        "n": request.n,
        "max_tokens": tokens_max - len(prompt),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop_token_ids": sampling.stop_token_ids,
        "ignore_eos": True,  # the gateway decides what ends a turn
        "detokenize": False,
        # The sampled token is listed first. It takes an extra place if it is not among the most likely tokens.
        "logprobs": sampling.top_logprobs + 1 if sampling.top_logprobs else 0,
    }
    parameters |= penalty_fields(sampling)
    if request.constraint is not None:
        parameters["structured_outputs"] = structured_outputs(request.constraint)
    if sampling.seed is not None:
        parameters["seed"] = sampling.seed
    body: dict[str, object] = {"model": model, "token_ids": prompt, "sampling_params": parameters}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    return _encoder.encode(body)


def parse_deltas(data: bytes, run: int, top_logprobs: int) -> list[ChoiceDelta]:
    """Parse one event or answer. Raises `BackendFailed` if it is an error or invalid, or if not all of its tokens are
    from weights of `run`."""
    chunk = _chunks.decode(data)
    chunk.check()
    return [_delta(choice, run, top_logprobs, chunk.cached_prompt_tokens) for choice in chunk.choices]


def _delta(choice: VllmChoice, run: int, top_logprobs: int, cached: int) -> ChoiceDelta:
    entries = choice.logprobs.content if choice.logprobs is not None else []
    if [entry.token_id for entry in entries] != choice.token_ids:
        raise BackendFailed("the logprobs do not belong to the tokens")
    if choice.finish_reason is not None and choice.weight_versions is None:
        raise BackendFailed("the engine does not say which weights sampled the tokens")
    tops: list[TopLogprobs] = []
    if top_logprobs:
        tops = [
            most_likely([(top.token_id, top.logprob) for top in entry.top_logprobs], top_logprobs) for entry in entries
        ]
    return ChoiceDelta(
        choice=choice.index,
        tokens=choice.token_ids,
        logprobs=[entry.logprob for entry in entries],
        tops=tops,
        finish=choice.finish_reason,
        versions=None if choice.weight_versions is None else versions_of(choice.weight_versions, run),
        cached_prompt_tokens=cached,
    )


def versions_of(spans: list[VersionSpan], run: int) -> list[int]:
    """Return one version for each token. Raises `BackendFailed` if any of the weights are not from `run`."""
    versions: list[int] = []
    for span in spans:
        span_run, slash, version = span.version.partition("/")
        if not slash or span_run != str(run) or not version.isdecimal():
            raise BackendFailed(f"tokens were sampled by weights labelled {span.version!r}, not by those of run {run}")
        if span.start != len(versions) or span.end < span.start:
            raise BackendFailed(f"the engine's version spans leave out tokens: {span.start} after {len(versions)}")
        versions += [int(version)] * (span.end - span.start)
    return versions
