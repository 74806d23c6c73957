"""What all messages of the inbox have in common."""

import msgspec

from bombus.hive.events import HIVE


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind"):
    """A message in the inbox. The sender chooses `id`: the same id is the same message and gets the same answer."""

    id: str
    engine: str = HIVE
