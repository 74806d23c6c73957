"""Tinker's `asample` and sessions of sampling, read; and samples, written."""

import struct

import msgspec
import pytest

from bombus.errors import Refused
from bombus.hive.records import FinishReason, SamplingParams
from bombus.operations import Category, CheckpointKind, Failed
from bombus_gateway.operations_wire.dialects import TrainingDialect
from bombus_gateway.operations_wire.paths import CheckpointPath
from bombus_gateway.operations_wire.samples import SampledTokens, unscored, write_samples
from bombus_gateway.operations_wire.sampling import (
    SampleRequest,
    SamplingSession,
    read_sample,
    read_sampling_session,
    sample_accepted,
)
from tests.gateway.operations_wire.protobuf_bodies import float32s, int32s, number, part

TINKER, XORL = TrainingDialect.TINKER, TrainingDialect.XORL


def body(params: dict[str, object], tokens: list[int], **more: object) -> bytes:
    return msgspec.json.encode(
        {
            "prompt": {"chunks": [{"tokens": tokens, "type": "encoded_text"}]},
            "sampling_params": params,
            "sampling_session_id": "S:sample:0",
            "seq_id": 7,
            "type": "sample",
            **more,
        }
    )


def asked(params: dict[str, object], **more: object) -> SampleRequest:
    submission = read_sample(body(params, [1, 2, 3], **more))
    assert (submission.session, submission.seq) == ("S:sample:0", 7)
    assert isinstance(submission.asked, SampleRequest), submission.asked
    return submission.asked


def error(given: bytes) -> str:
    submission = read_sample(given)
    assert isinstance(submission.asked, Failed)
    assert submission.asked.category == Category.USER
    return submission.asked.error


def test_a_request_is_read_with_all_that_it_says() -> None:
    params = {"max_tokens": 12, "seed": 11, "stop": ["\n"], "temperature": 0.5, "top_k": 20, "top_p": 0.9}
    assert asked(params, num_samples=3, prompt_logprobs=True, topk_prompt_logprobs=2, topk_sample_logprobs=4) == (
        SampleRequest(
            prompt=int32s(1, 2, 3),
            sampling=SamplingParams(max_tokens=12, temperature=0.5, top_p=0.9, top_k=20, seed=11, top_logprobs=4),
            samples=3,
            stops=("\n",),
            ends_at_eos=False,
            scored=2,
            top_prompt=2,
        )
    )


def test_without_settings_the_model_is_sampled_as_it_is() -> None:
    assert asked({"temperature": 1.0, "top_k": -1, "top_p": 1.0}) == SampleRequest(
        prompt=int32s(1, 2, 3), sampling=SamplingParams()
    )


@pytest.mark.parametrize(
    ("stop", "texts", "tokens", "ends_at_eos"),
    [
        (None, (), (), True),
        ([], (), (), False),
        ("end", ("end",), (), False),
        (["a", "b"], ("a", "b"), (), False),
        ([3, 4], (), (3, 4), False),
    ],
)
def test_what_ends_a_sample(stop: object, texts: tuple[str, ...], tokens: tuple[int, ...], ends_at_eos: bool) -> None:
    found = asked({"stop": stop})
    assert (found.stops, found.sampling.stop_token_ids, found.ends_at_eos) == (texts, tokens, ends_at_eos)


@pytest.mark.parametrize(
    ("more", "scored"),
    [
        ({}, None),
        ({"prompt_logprobs": False}, None),
        ({"prompt_logprobs": True}, 2),
        ({"topk_prompt_logprobs": 1}, 2),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 1}, 1),
    ],
)
def test_the_first_token_of_a_prompt_is_never_scored(more: dict[str, object], scored: int | None) -> None:
    assert asked({}, **more).scored == scored


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (body({}, []), "The prompt has no tokens"),
        (body({}, [1, -2]), "prompt has the token -2"),
        (body({}, [1], prompt={"chunks": [{"type": "image"}]}), "The prompt has a chunk of type 'image'"),
        (body({}, [1], num_samples=0), "num_samples is 0, but must be from 1 to 256"),
        (body({}, [1], num_samples=257), "num_samples is 257"),
        (body({"max_tokens": 0}, [1]), "max_tokens is 0, but must be from 1 to 16777216"),
        (body({"temperature": -0.5}, [1]), "temperature is -0.5, but must be from 0 to 100"),
        (body({"top_p": 0}, [1]), "top_p is 0, but must be above 0"),
        (body({"top_p": 1.5}, [1]), "top_p is 1.5, but must be from 0 to 1"),
        (body({"top_k": -2}, [1]), "top_k is -2"),
        (body({"stop": ["x" * 300]}, [1]), "stop takes up to 16 texts of 1 to 256 characters"),
        (body({"stop": [-3]}, [1]), "stop takes up to 16 token ids"),
        (body({"stop": [1.5]}, [1]), "sampling_params.stop[0]: Expected `int | str`"),
        (body({}, [1], topk_prompt_logprobs=21), "topk_prompt_logprobs is 21, but must be from 0 to 20"),
        (body({}, [1], prompt_logprobs=True, prompt_logprobs_last_n=1), "a prompt of one token, which has no logprob"),
        (body({}, [1], prompt_alt_tokens_k=2), "prompt_alt_tokens_k is not offered here: leave it out"),
        (body({}, [1], target_prompt_logprobs={"data": []}), "target_prompt_logprobs is not offered"),
        (body({}, [1], record_stability_info=True), "train with another loss (in a recipe loss_fn=)"),
    ],
)
def test_what_cannot_be_sampled_fails_in_words(given: bytes, why: str) -> None:
    assert why in error(given)


@pytest.mark.parametrize(
    "given", [b"{}", body({}, [1], seq_id=-1), body({}, [1], sampling_session_id=""), body({}, [1], seq_id=None)]
)
def test_a_request_without_a_session_and_a_number_is_refused_at_once(given: bytes) -> None:
    with pytest.raises(Refused):
        read_sample(given)


def test_each_sample_has_an_id_of_its_own() -> None:
    assert sample_accepted(read_sample(body({}, [1], num_samples=2))) == {
        "request_id": "S:sample:0:7",
        "sample_sequence_ids": ["S:sample:0:7:0", "S:sample:0:7:1"],
    }
    assert sample_accepted(read_sample(body({}, [])))["sample_sequence_ids"] == ["S:sample:0:7:0"]


@pytest.mark.parametrize(
    ("dialect", "fields", "session"),
    [
        (
            TINKER,
            {"session_id": "S", "sampling_session_seq_id": 0, "base_model": "org/name"},
            SamplingSession("S:sample:0", "org/name"),
        ),
        (
            TINKER,
            {"session_id": "S", "sampling_session_seq_id": 1, "model_path": "tinker://R/sampler_weights/a"},
            SamplingSession("S:sample:1", "", CheckpointPath("R", CheckpointKind.SAMPLER, "a")),
        ),
        (
            XORL,
            {"model_path": "sampler_weights/a", "model_id": "m"},
            SamplingSession("sampler_weights/a", "", CheckpointPath("m", CheckpointKind.SAMPLER, "a")),
        ),
    ],
)
def test_a_session_of_sampling_is_of_a_base_or_a_checkpoint(
    dialect: TrainingDialect, fields: dict[str, object], session: SamplingSession
) -> None:
    assert read_sampling_session(dialect, msgspec.json.encode(fields)) == session


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (b'{"session_id": "S", "sampling_session_seq_id": 0}', "Neither model_path nor base_model is given"),
        (b'{"session_id": "S", "base_model": "b"}', "sampling_session_seq_id is missing"),
        (b'{"sampling_session_seq_id": 0, "base_model": "b"}', "session_id must have 1 to 256 characters"),
    ],
)
def test_a_session_of_nothing_is_refused(given: bytes, why: str) -> None:
    with pytest.raises(Refused, match=why):
        read_sampling_session(TINKER, given)


# ---- answers ------------------------------------------------------------------------------------------------------


def sample(finish: FinishReason, top: tuple[tuple[tuple[int, float], ...], ...] = ()) -> SampledTokens:
    return SampledTokens(tokens=int32s(5, 6), logprobs=float32s(-1.0, -2.0), finish=finish, top=top)


def test_samples_are_written_with_their_tokens_and_logprobs() -> None:
    stopped = part(2, int32s(5, 6)) + part(3, float32s(-1.0, -2.0))  # the reason 0 is the default, and is not written
    cut = number(1, 1) + stopped
    answer = write_samples([sample(FinishReason.STOP), sample(FinishReason.LENGTH)], cached_prompt_tokens=9)
    assert answer == part(1, stopped) + part(1, cut) + number(4, 9)


def test_an_aborted_generation_is_no_sample() -> None:
    with pytest.raises(ValueError, match="ended with tool_calls"):
        write_samples([sample(FinishReason.TOOL_CALLS)])


def test_a_prompt_is_scored_from_behind_with_nan_before() -> None:
    scores = unscored(4, [-1.0, -2.0])
    assert struct.unpack("<4f", scores)[2:] == (-1.0, -2.0)
    assert scores[:8] == struct.pack("<2f", float("nan"), float("nan"))
    assert write_samples([], prompt_logprobs=scores) == part(2, scores)


def test_alternatives_are_matrices_filled_up_with_what_is_none() -> None:
    top = ((), ((3, -0.5), (4, -1.5)), ((5, -0.25),))
    matrices = (
        part(1, int32s(0, 0, 3, 4, 5, 0))
        + part(2, float32s(-99999.0, -99999.0, -0.5, -1.5, -0.25, -99999.0))
        + number(3, 2)
        + number(4, 3)
    )
    assert write_samples([], top_prompt=top) == part(3, matrices)
    assert part(4, matrices) in write_samples([sample(FinishReason.STOP, top)])
