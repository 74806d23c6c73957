"""The events of a hive, named in the past tense. All state is the fold of the events.

Events only ever gain fields: a new field gets a default, and no field is renamed or given a different meaning.
tests/logs contains logs from every released version, all of which must still fold.
"""

import msgspec

from bombus.hive.decoding import decoded
from bombus.hive.events.common import *  # noqa: F403 - the parts of one namespace
from bombus.hive.events.common import Event
from bombus.hive.events.engines import *  # noqa: F403
from bombus.hive.events.engines import EngineEvent
from bombus.hive.events.episodes import *  # noqa: F403
from bombus.hive.events.episodes import EpisodeEvent
from bombus.hive.events.groups import *  # noqa: F403
from bombus.hive.events.groups import GroupEvent
from bombus.hive.events.operations import *  # noqa: F403
from bombus.hive.events.operations import OperationEvent
from bombus.hive.events.upkeep import *  # noqa: F403
from bombus.hive.events.upkeep import UpkeepEvent

AnyEvent = EngineEvent | EpisodeEvent | OperationEvent | GroupEvent | UpkeepEvent

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyEvent] = msgspec.msgpack.Decoder(AnyEvent)


def kind_of(tagged: msgspec.Struct | type[msgspec.Struct]) -> str:
    """Return the wire name of a kind of event, message or operation, such as `episode.claimed`."""
    kind = tagged.__struct_config__.tag
    assert isinstance(kind, str)
    return kind


def encode_event(event: Event) -> bytes:
    return _encoder.encode(event)


def decode_event(body: bytes) -> AnyEvent:
    """Decode an event. Raises `msgspec.MsgspecError` if this version of bombus cannot read the bytes."""
    return decoded(_decoder.decode, body)
