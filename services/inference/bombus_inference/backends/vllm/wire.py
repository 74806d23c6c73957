"""The words of vLLM's `/inference/v1/generate`: token ids in, token ids out, and which weights sampled them."""

import msgspec
from msgspec import Struct

from bombus.hive.generation import Generate
from bombus_inference.backends.answers import Portion, TopRow, likeliest
from bombus_inference.backends.http_calls import EngineGone


class Label(Struct, frozen=True):
    """What vLLM is told to call its weights. vLLM only repeats it, so it carries the run as well."""

    run: int
    version: int

    def __str__(self) -> str:
        return f"{self.run}/{self.version}"


class Entry(Struct):
    token_id: int
    logprob: float
    top_logprobs: list["Entry"] = []


class Logprobs(Struct):
    content: list[Entry]


class VersionSpan(Struct):
    version: str
    start: int
    end: int


class Choice(Struct):
    index: int
    token_ids: list[int]
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[VersionSpan] | None = None


class PromptDetails(Struct):
    cached_tokens: int | None = None


class Usage(Struct):
    prompt_tokens_details: PromptDetails | None = None


class Problem(Struct):
    message: str = ""


class Chunk(Struct):
    """One server-sent event, or the whole answer where nothing is streamed."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Problem | None = None


_chunks = msgspec.json.Decoder(Chunk)
_encoder = msgspec.json.Encoder()


def request_body(request: Generate, prompt: list[int], tokens_max: int, model: str) -> bytes:
    """`tokens_max` is of prompt and completion together; `model` is vLLM's name of the model, or of an adapter."""
    sampling = request.sampling
    parameters: dict[str, object] = {
        "n": request.n,
        "max_tokens": tokens_max - len(prompt),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop_token_ids": sampling.stop_token_ids,
        "ignore_eos": True,  # what ends a turn is for the gateway to say
        "detokenize": False,
        # The sampled token is listed before the likeliest, and takes a place of its own where it is none of them.
        "logprobs": sampling.top_logprobs + 1 if sampling.top_logprobs else 0,
    }
    if sampling.seed is not None:
        parameters["seed"] = sampling.seed
    body: dict[str, object] = {"model": model, "token_ids": prompt, "sampling_params": parameters}
    if request.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    return _encoder.encode(body)


def portions(data: bytes, run: int, top_logprobs: int) -> list[Portion]:
    """What one event or answer says, of weights of `run`. Raises `EngineGone`."""
    chunk = _chunks.decode(data)
    if chunk.error is not None:
        raise EngineGone(chunk.error.message)
    details = chunk.usage.prompt_tokens_details if chunk.usage is not None else None
    cached = (details.cached_tokens or 0) if details is not None else 0
    return [_portion(choice, run, top_logprobs, cached) for choice in chunk.choices]


def _portion(choice: Choice, run: int, top_logprobs: int, cached: int) -> Portion:
    entries = choice.logprobs.content if choice.logprobs is not None else []
    if [entry.token_id for entry in entries] != choice.token_ids:
        raise EngineGone("the logprobs are not those of the tokens")
    if choice.finish_reason is not None and choice.weight_versions is None:
        raise EngineGone("the engine does not say which weights sampled the tokens")
    tops: list[TopRow] = []
    if top_logprobs:
        tops = [
            likeliest([(top.token_id, top.logprob) for top in entry.top_logprobs], top_logprobs) for entry in entries
        ]
    return Portion(
        choice=choice.index,
        tokens=choice.token_ids,
        logprobs=[entry.logprob for entry in entries],
        tops=tops,
        finish=choice.finish_reason,
        versions=None if choice.weight_versions is None else versions_of(choice.weight_versions, run),
        cached_prompt_tokens=cached,
    )


def versions_of(spans: list[VersionSpan], run: int) -> list[int]:
    """One version for each token. Raises `EngineGone` for weights that are not of `run`."""
    versions: list[int] = []
    for span in spans:
        its_run, slash, version = span.version.partition("/")
        if not slash or its_run != str(run) or not version.isdecimal():
            raise EngineGone(f"tokens were sampled by weights labelled {span.version!r}, not by those of run {run}")
        if span.start != len(versions) or span.end < span.start:
            raise EngineGone(f"the engine's version spans leave out tokens: {span.start} after {len(versions)}")
        versions += [int(version)] * (span.end - span.start)
    return versions
