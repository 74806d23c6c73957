"""The streams of one hive: how they are created and changed on the server."""

from collections.abc import Mapping
from typing import Any

from bombus.bus.wire import StreamState
from bombus.config.streams import NEW_STREAMS, StreamLimits
from bombus.figures import byte_size
from bombus.hive.subjects import Subjects

LEASES_BYTES_MAX = 1 << 20
SECRETS_BYTES_MAX = 1 << 20


def stream_configs(subjects: Subjects, limits: StreamLimits) -> list[dict[str, Any]]:
    """Return the configuration with which each stream is created, in the form that the server's API accepts."""
    own = {secret_stream(subjects): SECRETS_BYTES_MAX, lease_stream(subjects): LEASES_BYTES_MAX}
    sizes = {**own, **_sizes(subjects, NEW_STREAMS), **_sizes(subjects, limits)}
    replicas = limits.replicas or NEW_STREAMS.replicas

    def stream(name: str, subject: str, window_s: int = 120, **more: Any) -> dict[str, Any]:
        return {
            "name": name,
            "subjects": [subject],
            "retention": "limits",
            "discard": "new",
            "storage": "file",
            "max_bytes": sizes[name],
            "max_msgs": -1,
            "max_msgs_per_subject": -1,
            "max_consumers": -1,
            "max_msg_size": -1,
            "max_age": 0,
            "num_replicas": replicas,
            "duplicate_window": window_s * 1_000_000_000,
            "deny_delete": True,
            "deny_purge": False,  # the coordinator removes messages that are answered or no longer needed (R12)
            "allow_direct": True,
            "allow_msg_ttl": True,
            **more,
        }

    return [
        stream(subjects.inbox_stream, subjects.all_inbox, allow_atomic=True),
        stream(subjects.events_stream, subjects.all_events, 600, allow_atomic=True),
        stream(subjects.calls_stream, subjects.all_calls, allow_atomic=True),
        stream(subjects.ops_stream, subjects.all_ops),
        stream(subjects.trajectories_stream, subjects.all_trajectories),
        # The layout of NATS's own object store and key-value buckets, so that its tools can read them.
        stream(blob_stream(subjects), "")
        | {
            "subjects": [f"$O.{subjects.blobs_bucket}.C.>", f"$O.{subjects.blobs_bucket}.M.>"],
            "allow_rollup_hdrs": True,
            "deny_delete": False,
        },
        stream(secret_stream(subjects), f"$KV.{subjects.secrets_bucket}.>")
        | {"max_msgs_per_subject": 1, "allow_rollup_hdrs": True},
        stream(lease_stream(subjects), f"$KV.{subjects.leases_bucket}.>")
        | {"max_msgs_per_subject": 1, "allow_rollup_hdrs": True},
    ]


def changes_of(subjects: Subjects, stream: str, limits: StreamLimits) -> dict[str, int]:
    """Return the stream settings that the operator has given, under their names in the server's API."""
    found = {"num_replicas": limits.replicas, "max_bytes": _sizes(subjects, limits).get(stream)}
    return {name: value for name, value in found.items() if value is not None}


def limited_streams(subjects: Subjects) -> dict[str, str]:
    """Return the streams whose size the operator sets, by the short name that settings and messages use."""
    return {
        "inbox": subjects.inbox_stream,
        "events": subjects.events_stream,
        "calls": subjects.calls_stream,
        "ops": subjects.ops_stream,
        "trajectories": subjects.trajectories_stream,
        "blobs": blob_stream(subjects),
    }


def stream_text(state: StreamState) -> str:
    """Return a short text that states a stream's size, limit and replicas."""
    limit = f" of {byte_size(state.max_bytes)}" if state.max_bytes > 0 else ""
    late = f", of which {state.late} offline or not caught up" if state.late else ""
    replicas = "1 replica" if state.replicas == 1 else f"{state.replicas} replicas"
    return f"{byte_size(state.bytes)}{limit}, {replicas}{late}"


def _sizes(subjects: Subjects, limits: StreamLimits) -> Mapping[str, int]:
    """Return the size limit of each stream for which `limits` gives one."""
    given = {name: getattr(limits, f"{short}_bytes_max") for short, name in limited_streams(subjects).items()}
    return {name: size for name, size in given.items() if size is not None}


def blob_stream(subjects: Subjects) -> str:
    return f"OBJ_{subjects.blobs_bucket}"


def lease_stream(subjects: Subjects) -> str:
    return f"KV_{subjects.leases_bucket}"


def secret_stream(subjects: Subjects) -> str:
    return f"KV_{subjects.secrets_bucket}"
