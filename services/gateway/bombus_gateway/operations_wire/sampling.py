"""The requests to Tinker's `asample`, and requests from either client to begin a sampling session."""

import math

import msgspec

from bombus.errors import Code, Refused
from bombus.hive.records import SamplingParams
from bombus.operations import Failed
from bombus_gateway import limits
from bombus_gateway.decoding.json_body import (
    decode_body,
    field_names,
    raw_fields,
    refuse_unknown,
    stop_strings,
    stop_tokens,
)
from bombus_gateway.operations_wire.data.json_numbers import numbers_in
from bombus_gateway.operations_wire.data.tensors import INT32_MAX, NumberBudget, as_tokens, whole
from bombus_gateway.operations_wire.dialects import TrainingDialect, sampling_session
from bombus_gateway.operations_wire.paths import CheckpointPath, read_path
from bombus_gateway.operations_wire.submission import NOT_GIVEN, Seed, SeqId, attempted, checked_id, is_given

TOKENS_MAX = 1 << 24  # maximum for one sample; the engine also checks what fits its model


class SampleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for samples. `prompt` contains token ids as int32.

    A `max_tokens` of 0 allows as many tokens as the model's context has room for. Without `ends_at_eos`, a sample ends
    only at one of `stops` or at a stop token of `sampling`. The last `scored` tokens of the prompt are scored, and for
    each of them the `top_prompt` likeliest tokens are returned. `scored` is None if no scores are wanted, and 0 for a
    prompt of one token.
    """

    prompt: bytes
    sampling: SamplingParams
    samples: int = 1
    stops: tuple[str, ...] = ()
    ends_at_eos: bool = True
    scored: int | None = None
    top_prompt: int = 0


class SampleSubmission(msgspec.Struct, frozen=True, kw_only=True):
    """A numbered request in a sampling session. If the same request is sent again, it is a repeat and gets the same
    answer."""

    session: str
    seq: int
    asked: SampleRequest | Failed

    @property
    def request_id(self) -> str:
        return f"{self.session}:{self.seq}"


class SamplingSession(msgspec.Struct, frozen=True):
    """A new sampling session, for a base model or a checkpoint."""

    id: str
    base: str = ""
    checkpoint: CheckpointPath | None = None


class DrawingParams(msgspec.Struct, kw_only=True):
    """The sampling parameters that `/generate` has in both SGLang's form and vLLM's."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: Seed | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False

    def checked(self, max_tokens: int) -> SamplingParams:
        """Return the parameters of a sample of up to `max_tokens` tokens. Raises `Refused` if any of them is
        invalid."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=bounded("temperature", self.temperature, 0.0, 100.0),
            top_p=checked_top_p(self.top_p),
            top_k=max(counted("top_k", self.top_k, -1, INT32_MAX), 0),
            min_p=bounded("min_p", self.min_p, 0.0, 1.0),
            presence_penalty=bounded("presence_penalty", self.presence_penalty, -2.0, 2.0),
            frequency_penalty=bounded("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            repetition_penalty=bounded("repetition_penalty", self.repetition_penalty, 0.01, 2.0),
            seed=self.seed,
            stop_token_ids=stops_of(self.stop_token_ids)[1],
        )


class _Params(msgspec.Struct):
    max_tokens: int | None = None
    seed: Seed | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class _PromptChunk(msgspec.Struct):
    tokens: msgspec.Raw = NOT_GIVEN
    type: str = "encoded_text"


class _Prompt(msgspec.Struct):
    chunks: list[_PromptChunk]


class _Sample(msgspec.Struct):
    """The body of an `asample`. It also has the fields of `_SampleAddress`, and the `type` that all of Tinker's bodies
    have."""

    prompt: _Prompt
    sampling_params: _Params
    num_samples: int = 1
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    prompt_logprobs_last_n: int | None = None
    prompt_alt_tokens_k: int = 0
    target_prompt_logprobs: msgspec.Raw = NOT_GIVEN
    record_stability_info: bool | None = None


class _SampleAddress(msgspec.Struct):
    sampling_session_id: str
    seq_id: SeqId


class _Session(msgspec.Struct):
    session_id: str = ""
    sampling_session_seq_id: SeqId | None = None
    base_model: str | None = None
    model_path: str | None = None
    model_id: str | None = None


_samples = msgspec.json.Decoder(_Sample)
_SAMPLE_FIELDS = {*field_names(_Sample), *field_names(_SampleAddress), "type"}
_PARAMS_FIELDS = field_names(_Params)
_addresses = msgspec.json.Decoder(_SampleAddress)
_sessions = msgspec.json.Decoder(_Session)


def read_sampling_session(dialect: TrainingDialect, body: bytes) -> SamplingSession:
    """Read a `create_sampling_session` request. Raises `Refused` for an invalid one, since the request is answered
    directly and not with a future."""
    given = decode_body(_sessions, body)
    checkpoint = read_path(given.model_path, given.model_id or "") if given.model_path else None
    if checkpoint is None and not given.base_model:
        raise Refused(Code.MALFORMED, "Neither model_path nor base_model is given: send one of them.")
    if dialect == TrainingDialect.XORL:
        return SamplingSession(given.model_path or "", given.base_model or "", checkpoint)
    if given.sampling_session_seq_id is None:
        raise Refused(Code.MALFORMED, "sampling_session_seq_id is missing: send the number of the sampling session.")
    session = sampling_session(checked_id(given.session_id, "session_id"), given.sampling_session_seq_id)
    return SamplingSession(session, given.base_model or "", checkpoint)


def read_sample_session(body: bytes) -> str:
    """Return the sampling session of a request, without decoding the rest. Raises the same errors as `read_sample`."""
    return _read_address(body)[0]


def read_sample(body: bytes) -> SampleSubmission:
    """Read an `asample` request. Raises `Refused` if the body is not JSON, or if its session or number is missing."""
    session, seq = _read_address(body)
    return SampleSubmission(session=session, seq=seq, asked=attempted(lambda: _asked(body)))


def _read_address(body: bytes) -> tuple[str, int]:
    given = decode_body(_addresses, body)
    return checked_id(given.sampling_session_id, "sampling_session_id"), given.seq_id


def sample_accepted(submission: SampleSubmission) -> dict[str, object]:
    """Return the answer to an `asample`. The client requires an id for each sample."""
    asked = submission.asked
    count = asked.samples if isinstance(asked, SampleRequest) else 1
    ids = [f"{submission.request_id}:{index}" for index in range(count)]
    return {"request_id": submission.request_id, "sample_sequence_ids": ids}


def _asked(body: bytes) -> SampleRequest:
    given = decode_body(_samples, body)
    _refuse_the_rest(given)
    refuse_unknown(body, _SAMPLE_FIELDS)
    refuse_unknown(bytes(decode_body(raw_fields, body)["sampling_params"]), _PARAMS_FIELDS)
    prompt = _prompt(given.prompt)
    params = given.sampling_params
    stops, stop_ids = stops_of(params.stop)
    sampling = SamplingParams(
        max_tokens=0 if params.max_tokens is None else counted("max_tokens", params.max_tokens, 1, TOKENS_MAX),
        temperature=bounded("temperature", params.temperature, 0.0, 100.0),
        top_p=checked_top_p(params.top_p),
        top_k=max(counted("top_k", params.top_k, -1, INT32_MAX), 0),
        seed=params.seed,
        stop_token_ids=stop_ids,
        top_logprobs=counted("topk_sample_logprobs", given.topk_sample_logprobs, 0, limits.TOP_LOGPROBS),
    )
    length = len(prompt) // 4
    return SampleRequest(
        prompt=prompt,
        sampling=sampling,
        samples=counted("num_samples", given.num_samples, 1, limits.SAMPLES),
        stops=stops,
        ends_at_eos=params.stop is None,
        scored=_scored(given, length),
        top_prompt=counted("topk_prompt_logprobs", given.topk_prompt_logprobs, 0, limits.TOP_LOGPROBS),
    )


def _refuse_the_rest(given: _Sample) -> None:
    """Raise `Refused` for fields of the client's API that no engine here supports."""
    for name, is_wanted in (
        ("target_prompt_logprobs", is_given(given.target_prompt_logprobs)),
        ("prompt_alt_tokens_k", given.prompt_alt_tokens_k > 0),
    ):
        if is_wanted:
            raise Refused(Code.UNSUPPORTED, f"{name} is not offered here: leave it out.")
    if given.record_stability_info:
        why = "record_stability_info is not offered here, nor is the loss stable_reinforce, which needs it"
        raise Refused(
            Code.UNSUPPORTED, f"{why}: train with another loss (in a recipe loss_fn=), such as importance_sampling."
        )


def _prompt(given: _Prompt) -> bytes:
    budget = NumberBudget()
    parts = []
    for chunk in given.chunks:
        if not is_given(chunk.tokens):
            why = f"The prompt has a chunk of type {chunk.type[:40]!r}, but the models here read only text."
            raise Refused(Code.UNSUPPORTED, why)
        parts.append(as_tokens(whole(numbers_in(chunk.tokens, budget, "prompt")[0], "prompt"), "prompt"))
    prompt = b"".join(parts)
    if not prompt:
        raise Refused(
            Code.MALFORMED, "The prompt has no tokens: send at least the token with which the model's texts begin."
        )
    return prompt


def stops_of(given: str | list[str | int] | list[str] | list[int] | None) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the texts and the tokens that end a sample."""
    stops = [given] if isinstance(given, str) else given or []
    texts = stop_strings([each for each in stops if isinstance(each, str)], "stop")
    return texts, stop_tokens([each for each in stops if isinstance(each, int)], "stop")


def _scored(given: _Sample, length: int) -> int | None:
    """Return how many of the prompt's last tokens to score. The first is never scored, as no token precedes it."""
    if not given.prompt_logprobs and not given.topk_prompt_logprobs:
        return None
    if given.prompt_logprobs_last_n is None:
        return length - 1
    if length == 1:
        why = "prompt_logprobs_last_n is given for a prompt of one token, which has no logprob: leave it out."
        raise Refused(Code.MALFORMED, why)
    return counted("prompt_logprobs_last_n", given.prompt_logprobs_last_n, 1, length - 1)


def checked_top_p(value: float) -> float:
    if value == 0.0:
        raise Refused(Code.MALFORMED, "top_p is 0, but must be above 0, or no token could be sampled.")
    return bounded("top_p", value, 0.0, 1.0)


def counted(name: str, value: int, least: int, most: int) -> int:
    if not least <= value <= most:
        raise Refused(Code.MALFORMED, f"{name} is {value}, but must be from {least} to {most}.")
    return value


def bounded(name: str, value: float, least: float, most: float) -> float:
    if not math.isfinite(value) or not least <= value <= most:
        raise Refused(Code.MALFORMED, f"{name} is {value}, but must be from {least:g} to {most:g}.")
    return value
