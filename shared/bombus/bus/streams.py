"""The streams of one hive: their limits and how they are configured."""

from typing import Any

import msgspec

from bombus.hive.subjects import Subjects

MB = 1 << 20
GB = 1 << 30
LEASES_BYTES_MAX = MB


class StreamLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The size in bytes at which each stream is full and refuses (R12). The server reserves it on its disk."""

    inbox_bytes_max: int = 256 * MB
    events_bytes_max: int = GB
    calls_bytes_max: int = 4 * GB
    blobs_bytes_max: int = 2 * GB
    secrets_bytes_max: int = MB
    replicas: int = 1

    def __post_init__(self) -> None:
        for name in ("inbox", "events", "calls", "blobs", "secrets"):
            value = getattr(self, f"{name}_bytes_max")
            if value < 4096:
                raise ValueError(f"{name}_bytes_max is {value}: at least 4096")
        if self.replicas not in (1, 3, 5):
            raise ValueError(f"replicas is {self.replicas}: use 1, 3 or 5")


def stream_configs(subjects: Subjects, limits: StreamLimits) -> list[dict[str, Any]]:
    """Return the configuration of every stream, as the server's API takes it."""

    def stream(name: str, subject: str, bytes_max: int, window_s: int = 120, **more: Any) -> dict[str, Any]:
        return {
            "name": name,
            "subjects": [subject],
            "retention": "limits",
            "discard": "new",
            "storage": "file",
            "max_bytes": bytes_max,
            "max_msgs": -1,
            "max_msgs_per_subject": -1,
            "max_consumers": -1,
            "max_msg_size": -1,
            "max_age": 0,
            "num_replicas": limits.replicas,
            "duplicate_window": window_s * 1_000_000_000,
            "deny_delete": True,
            "deny_purge": False,  # the coordinator removes what is answered or no longer needed (R12)
            "allow_direct": True,
            "allow_msg_ttl": True,
            **more,
        }

    return [
        stream(subjects.inbox_stream, subjects.all_inbox, limits.inbox_bytes_max, allow_atomic=True),
        stream(subjects.events_stream, subjects.all_events, limits.events_bytes_max, 600, allow_atomic=True),
        stream(subjects.calls_stream, subjects.all_calls, limits.calls_bytes_max, allow_atomic=True),
        # The layout of NATS' own object store and key-value buckets, so that its tools can read them.
        stream(blob_stream(subjects), "", limits.blobs_bytes_max)
        | {
            "subjects": [f"$O.{subjects.blobs_bucket}.C.>", f"$O.{subjects.blobs_bucket}.M.>"],
            "allow_rollup_hdrs": True,
            "deny_delete": False,
        },
        stream(secret_stream(subjects), f"$KV.{subjects.secrets_bucket}.>", limits.secrets_bytes_max)
        | {"max_msgs_per_subject": 1, "allow_rollup_hdrs": True},
        stream(lease_stream(subjects), f"$KV.{subjects.leases_bucket}.>", LEASES_BYTES_MAX)
        | {"max_msgs_per_subject": 1, "allow_rollup_hdrs": True},
    ]


def blob_stream(subjects: Subjects) -> str:
    return f"OBJ_{subjects.blobs_bucket}"


def lease_stream(subjects: Subjects) -> str:
    return f"KV_{subjects.leases_bucket}"


def secret_stream(subjects: Subjects) -> str:
    return f"KV_{subjects.secrets_bucket}"
