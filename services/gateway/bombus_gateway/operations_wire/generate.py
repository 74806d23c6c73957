"""`/generate` in SGLang's form, which xorl's sampling client uses."""

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from bombus.errors import Code, Refused
from bombus.hive.records import SamplingParams
from bombus_gateway import limits
from bombus_gateway.decoding.json_body import decode_body, field_names, refuse_unknown
from bombus_gateway.operations_wire.data.json_numbers import numbers_in
from bombus_gateway.operations_wire.data.tensors import NumberBudget, as_tokens, whole
from bombus_gateway.operations_wire.samples import SampledTokens, checked_finish
from bombus_gateway.operations_wire.sampling import (
    TOKENS_MAX,
    DrawingParams,
    SampleRequest,
    counted,
    stops_of,
)
from bombus_gateway.operations_wire.submission import NOT_GIVEN, Seed, is_given


class GenerateRequest(msgspec.Struct, frozen=True):
    """A request for samples. If the prompt is given as `text`, the prompt of `asked` is empty.

    `adapter` is the path or the name of a checkpoint to sample from, or empty.
    """

    asked: SampleRequest
    text: str = ""
    adapter: str = ""
    logprobs: bool = False


class _GenerateParams(DrawingParams, forbid_unknown_fields=True, kw_only=True):
    """The supported parameters. Any other parameter could change the samples, so a request with one is refused."""

    max_new_tokens: int = 128
    sampling_seed: Seed | None = None
    return_routed_experts: bool = False


class _Generate(msgspec.Struct):
    text: str | None = None
    input_ids: msgspec.Raw = NOT_GIVEN
    sampling_params: _GenerateParams | None = None
    return_logprob: bool = False
    top_logprobs_num: int = 0
    lora_path: str | None = None
    stream: bool = False
    return_routed_experts: bool = False
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    logprob_start_len: int = -1
    rid: Any = None  # the client's own id for the request; ignored
    model: Any = None  # the client's name for the model; ignored, since there is only one


_generates = msgspec.json.Decoder(_Generate)
_FIELDS = field_names(_Generate)


def read_generate(body: bytes) -> GenerateRequest:
    """Read a `/generate`. Raises `Refused`."""
    given = decode_body(_generates, body)
    params = given.sampling_params or _GenerateParams()
    for name, is_wanted in (
        ("stream", given.stream),
        ("top_logprobs_num", given.top_logprobs_num > 0),
        ("logprob_start_len", given.logprob_start_len >= 0),
        ("image_data", bool(given.image_data)),
        ("video_data", bool(given.video_data)),
        ("audio_data", bool(given.audio_data)),
        ("return_routed_experts", given.return_routed_experts or params.return_routed_experts),
    ):
        if is_wanted:
            raise Refused(Code.UNSUPPORTED, f"{name} is not offered here: leave it out.")
    refuse_unknown(body, _FIELDS)
    if is_given(given.input_ids) == bool(given.text):
        raise Refused(Code.MALFORMED, "The prompt is missing or given twice: send either input_ids or a text.")
    asked = SampleRequest(
        prompt=_prompt(given.input_ids) if is_given(given.input_ids) else b"",
        sampling=_sampling(params),
        samples=counted("n", params.n, 1, limits.SAMPLES),
        stops=stops_of(params.stop)[0],
        ends_at_eos=not params.ignore_eos,
    )
    return GenerateRequest(asked, given.text or "", given.lora_path or "", given.return_logprob)


def write_generated(
    samples: Sequence[SampledTokens],
    texts: Sequence[str],
    prompt_tokens: int,
    logprobs: bool,
    reasons_are_objects: bool = False,
) -> dict[str, object] | list[dict[str, object]]:
    """Return samples with their texts. A single sample is not wrapped in a list.

    `finish_reason` is a string, as xorl's client expects, or an object, as in SGLang.
    """
    answers = [_answer(sample, text, prompt_tokens, logprobs) for sample, text in zip(samples, texts, strict=True)]
    if reasons_are_objects:
        for answer in answers:
            meta = answer["meta_info"]
            assert isinstance(meta, dict)
            meta["finish_reason"] = {"type": meta["finish_reason"]}
    return answers[0] if len(answers) == 1 else answers


def _answer(sample: SampledTokens, text: str, prompt_tokens: int, logprobs: bool) -> dict[str, object]:
    tokens = array("i", sample.tokens).tolist()
    meta: dict[str, object] = {
        "finish_reason": checked_finish(sample.finish).value,
        "prompt_tokens": prompt_tokens,
        "completion_tokens": len(tokens),
    }
    if logprobs:
        scored = zip(array("f", sample.logprobs), tokens, strict=True)
        meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in scored]
    return {"text": text, "output_ids": tokens, "meta_info": meta}


def _sampling(params: _GenerateParams) -> SamplingParams:
    found = params.checked(counted("max_new_tokens", params.max_new_tokens, 1, TOKENS_MAX))
    return found if params.sampling_seed is None else msgspec.structs.replace(found, seed=params.sampling_seed)


def _prompt(given: msgspec.Raw) -> bytes:
    numbers, shape = numbers_in(given, NumberBudget(), "input_ids")
    if len(shape) != 1 or not numbers:
        raise Refused(Code.MALFORMED, "input_ids must be a list of at least one token id; send one prompt at a time.")
    return as_tokens(whole(numbers, "input_ids"), "input_ids")
