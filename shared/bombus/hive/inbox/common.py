"""The base class of all inbox messages."""

import msgspec

from bombus.hive.events import HIVE


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind"):
    """A message in the inbox. The sender chooses `id`: a message resent with the same id gets the same answer."""

    id: str
    engine: str = HIVE
