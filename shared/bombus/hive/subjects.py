"""The names used on the bus. Each name contains the hive's name, so several hives can share a server (R19)."""

import re
from functools import lru_cache
from hashlib import blake2b

SIGNING_SECRET = "episode-keys"  # name of the secret that signs keys; the key for replicas is derived from it
REPLICA_KEY = "replica-key"  # name of that key in the same bucket, for services that may not read the secret
NAME_CHARACTERS_MAX = 32
_NAME = re.compile(r"^[a-z0-9][a-z0-9-]{0,31}\Z")


def is_name(text: str) -> bool:
    """Return whether this is a valid hive or engine name: 1 to 32 lower-case letters, digits and dashes."""
    return len(text) <= NAME_CHARACTERS_MAX and _is_name(text)


@lru_cache(1024)
def _is_name(text: str) -> bool:
    return _NAME.match(text) is not None


def check_name(name: str, what: str) -> str:
    """Return `name` if it is 1 to 32 lower-case letters, digits and dashes. Raises `ValueError` otherwise."""
    if not is_name(name):
        raise ValueError(
            f"{what} {name!r} is not a valid name: use 1 to 32 lower-case letters, digits and dashes, "
            "starting with a letter or digit"
        )
    return name


class Subjects:
    """The streams, subjects and buckets of one hive."""

    def __init__(self, hive: str) -> None:
        self.hive = check_name(hive, "hive")
        stem = f"BOMBUS_{hive}"
        self.inbox_stream = f"{stem}_inbox"
        self.events_stream = f"{stem}_events"
        self.calls_stream = f"{stem}_calls"
        self.ops_stream = f"{stem}_ops"
        self.trajectories_stream = f"{stem}_trajectories"
        self.blobs_bucket = f"{stem}_blobs"  # object store: tokenizers, snapshots
        self.secrets_bucket = f"{stem}_secrets"  # key-value: the secret that signs keys
        self.leases_bucket = f"{stem}_leases"  # key-value: the leader's lease
        self.all_inbox = f"bombus.{hive}.inbox.>"
        self.all_events = f"bombus.{hive}.event.>"
        self.all_calls = f"bombus.{hive}.call.>"
        self.all_ops = f"bombus.{hive}.op.>"
        self.all_trajectories = f"bombus.{hive}.trajectory.>"

    def inbox(self, kind: str) -> str:
        return f"bombus.{self.hive}.inbox.{kind}"

    def event(self, engine: str, kind: str) -> str:
        return f"bombus.{self.hive}.event.{engine}.{kind}"

    def trainer(self, engine: str, epoch: int) -> str:
        """Return the subject on which the trainer of this epoch answers while it runs. Its messages are not stored."""
        return f"bombus.{self.hive}.trainer.{engine}.{epoch}"

    def full_copies(self, engine: str, epoch: int) -> str:
        """Return the subject for asking this trainer for a full copy of its newest version. Its messages are not
        stored."""
        return f"bombus.{self.hive}.full-copies.{engine}.{epoch}"

    @property
    def undecided(self) -> str:
        """Return the subject on which the leader reports why it is making no decisions. Its messages are not stored."""
        return f"bombus.{self.hive}.undecided"

    def call(self, engine: str, holder: str) -> str:
        """Return the subject for one holder's calls (see pins.py)."""
        return f"bombus.{self.hive}.call.{engine}.{_short(holder)}"

    def calls_of(self, engine: str) -> str:
        return f"bombus.{self.hive}.call.{engine}.>"

    def operation(self, engine: str, model: str) -> str:
        """Return the subject for the bodies of one model's operations and for their results."""
        return f"bombus.{self.hive}.op.{engine}.{_short(model)}"

    def trajectory(self, engine: str, holder: str) -> str:
        """Return the subject for the bodies of a holder's rollout groups. Older releases had one subject per engine."""
        return f"bombus.{self.hive}.trajectory.{engine}.{_short(holder)}"


def _short(name: str) -> str:
    """Return a hash to use in a subject in place of a name, because a name may contain any characters."""
    return blake2b(name.encode(), digest_size=8).hexdigest()
