"""The messages sent to a hive: commands, which get an answer, and facts, which do not.

All messages go through one stream, the inbox, in one order. Only the coordinator decides which events follow from them
(R1).
"""

import msgspec

from bombus.hive.decoding import decoded
from bombus.hive.events import HIVE
from bombus.hive.inbox.answers import *  # noqa: F403 - the parts of one namespace
from bombus.hive.inbox.answers import Answer, AnyAnswer
from bombus.hive.inbox.commands import *  # noqa: F403
from bombus.hive.inbox.commands import AnyCommand, End, MultiModelEnd, OpenSession
from bombus.hive.inbox.common import *  # noqa: F403
from bombus.hive.inbox.common import Message
from bombus.hive.inbox.facts import *  # noqa: F403
from bombus.hive.inbox.facts import AnyFact
from bombus.hive.subjects import is_name

DEPTH_MAX = 128  # the deepest nesting of lists and objects in metadata
_NOT_PLAIN = f"metadata that is not JSON, or nested deeper than {DEPTH_MAX}"

AnyMessage = AnyCommand | AnyFact

_encoder = msgspec.msgpack.Encoder()
_messages: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)
_answers: msgspec.msgpack.Decoder[AnyAnswer] = msgspec.msgpack.Decoder(AnyAnswer)


def encode_message(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_message(body: bytes) -> AnyMessage:
    """Decode a message. Raises `msgspec.MsgspecError` if this version of bombus cannot read the bytes."""
    message = decoded(_messages.decode, body)
    if message.engine != HIVE and not is_name(message.engine):  # the name becomes part of a subject
        raise msgspec.DecodeError(f"{message.engine[:40]!r} is not a valid engine name")
    if isinstance(message, End) and not all(_is_plain(result.metadata) for result in message.results):
        raise msgspec.DecodeError(_NOT_PLAIN)
    if isinstance(message, MultiModelEnd):
        reported = [result for results in message.results for result in results.values()]
        if not all(_is_plain(result.metadata) for result in reported):
            raise msgspec.DecodeError(_NOT_PLAIN)
    if isinstance(message, OpenSession) and not _is_plain(message.metadata):
        raise msgspec.DecodeError(_NOT_PLAIN)
    return message


def _is_plain(value: object, depth: int = DEPTH_MAX) -> bool:
    """Return whether a value can be written as JSON, and is not nested too deeply for any reader's recursion limit."""
    if isinstance(value, dict):
        return depth > 0 and all(isinstance(key, str) and _is_plain(each, depth - 1) for key, each in value.items())
    if isinstance(value, list):
        return depth > 0 and all(_is_plain(each, depth - 1) for each in value)
    return value is None or isinstance(value, bool | int | float | str)


def encode_answer(answer: Answer) -> bytes:
    return _encoder.encode(answer)


def decode_answer(body: bytes) -> AnyAnswer:
    """Decode an answer. Raises `msgspec.MsgspecError` if this version of bombus cannot read the bytes."""
    return decoded(_answers.decode, body)
