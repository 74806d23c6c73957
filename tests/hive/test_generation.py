"""Requests and frames between a gateway and a replica, as bytes."""

import struct

from bombus.hive.generation import (
    Finished,
    Frame,
    FrameReader,
    Generate,
    PromptScores,
    Tokens,
    decode_request,
    encode_frame,
    encode_request,
)
from bombus.hive.records import SamplingParams, pack_logprobs, pack_tokens

PLAIN = Generate(id="r", engine="main", run=1, prompt=pack_tokens([1]), sampling=SamplingParams())
# A map of five: its names are short strings, the prompt is four bytes, and the sampling has no field of its own.
PLAIN_BYTES = b"\x85\xa2id\xa1r\xa6engine\xa4main\xa3run\x01\xa6prompt\xc4\x04\x01\x00\x00\x00\xa8sampling\x80"


def test_a_request_that_names_no_adapter_and_wants_no_scores_has_the_bytes_that_it_always_had() -> None:
    assert encode_request(PLAIN) == PLAIN_BYTES
    old = decode_request(PLAIN_BYTES)
    assert old == PLAIN
    assert (old.adapter, old.prompt_logprobs, old.top_prompt, old.plain_logprobs) == ("", False, 0, False)


def test_a_frame_of_an_older_replica_is_read() -> None:
    body = b"\x83\xa4kind\xa8finished\xa6reason\xa4stop\xb4cached_prompt_tokens\x07"
    (frame,) = FrameReader().feed(struct.pack("<I", len(body)) + body)
    assert frame == Finished(reason="stop", cached_prompt_tokens=7)


def test_frames_are_the_same_wherever_the_bytes_are_cut() -> None:
    sent: list[Frame] = [
        Tokens(version=3, tokens=pack_tokens([4]), logprobs=pack_logprobs([-0.5])),
        Tokens(version=3, tokens=pack_tokens([5]), logprobs=pack_logprobs([-0.5])),
        Finished(reason="length"),
    ]
    whole = b"".join(map(encode_frame, sent))
    for cut in range(len(whole) + 1):
        reader = FrameReader()
        assert [*reader.feed(whole[:cut]), *reader.feed(whole[cut:]), *reader.feed(whole)] == [*sent, *sent]
    reader = FrameReader()
    assert [frame for byte in whole for frame in reader.feed(bytes([byte]))] == sent


def test_scores_of_a_prompt_travel_as_frames_among_others() -> None:
    sent: list[Frame] = [
        PromptScores(
            version=3,
            logprobs=pack_logprobs([0.0, -1.5]),
            width=1,
            top_tokens=pack_tokens([0, 7]),
            top_logprobs=pack_logprobs([0.0, -0.25]),
        ),
        Tokens(version=3, tokens=pack_tokens([4]), logprobs=pack_logprobs([-0.5])),
        Finished(reason="length"),
    ]
    assert list(FrameReader().feed(b"".join(map(encode_frame, sent)))) == sent
