"""Bytes that are not what they should be are one error, whatever is wrong with them."""

import msgspec
import pytest

from bombus.errors import LogCorrupted
from bombus.hive import events, generation, inbox
from bombus.hive.decoding import decoded
from bombus.hive.records import decode_record

ANYTHING = msgspec.msgpack.Decoder()
BAD = [b"", b"\xc1", b"\xa2\xc3(", b"\x91" * 5000 + b"\x01"]
READERS = [inbox.decode_message, inbox.decode_answer, events.decode_event, generation.decode_request]
KINDS = [
    b"\x82\xa4kind\xa4stop\xa2id\xa2",
    b"\x83\xa4kind\xa7refusal\xa4code\xa7timeout\xa3why\xa2",
    b"\x82\xa4kind\xaeengine.started\xa6engine\xa2",
    b"\x81\xa2id\xa2",
]


@pytest.mark.parametrize("body", BAD)
def test_bytes_that_are_not_msgpack_are_one_error(body: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decoded(ANYTHING.decode, body)


@pytest.mark.parametrize(("read", "head"), zip(READERS, KINDS), ids=lambda each: getattr(each, "__name__", ""))
def test_text_that_is_not_utf_8_is_that_error_in_every_message_of_the_bus(read: object, head: bytes) -> None:
    assert callable(read)
    with pytest.raises(msgspec.MsgspecError):
        read(head + b"\xc3(")


def test_a_record_that_is_not_utf_8_is_a_damaged_log() -> None:
    with pytest.raises(LogCorrupted):
        decode_record(b"\x82\xa4kind\xa7call.v1\xa2id\xa2\xc3(")


@pytest.mark.parametrize("depth", [128, 129])
def test_metadata_is_as_deep_as_every_reader_can_decode_again(depth: int) -> None:
    value: dict[str, object] = {}
    for _ in range(depth - 1):
        value = {"a": value}
    end = inbox.End(id="i", client="c", results=(inbox.EpisodeResult(episode="e", task="t", metadata=value),))
    if depth == 128:
        assert inbox.decode_message(inbox.encode_message(end)) == end
    else:
        with pytest.raises(msgspec.DecodeError, match="nested deeper than 128"):
            inbox.decode_message(inbox.encode_message(end))
