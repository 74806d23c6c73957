"""Session searches by Tinker's client, newest first."""

from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from bombus.hive.events import SessionEnd
from bombus.hive.operations.state import TrainingClients, TrainingSession
from bombus_gateway.decoding.json_body import decode_body
from bombus_gateway.operations.listings import iso_time

PAGE_MAX = 200


class _Owner(msgspec.Struct, frozen=True):
    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: list[str] = []


class _Status(msgspec.Struct, frozen=True):
    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: list[str] | None = None


class _Cursor(msgspec.Struct, frozen=True):
    last_created_at: Annotated[datetime, Meta(tz=True)]
    last_session_id: str


class SessionSearch(msgspec.Struct, frozen=True):
    """The conditions of a search. A session must meet all of them, except that of `session_id` and `display_name` it
    needs to match only one.

    The words of `display_name` must all occur in the session's own display name, in any order and in upper or lower
    case.
    """

    session_id: str | None = None
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = {}
    display_name: str | None = None
    owner: _Owner = _Owner()
    statuses: list[_Status] | None = None
    limit: int = 50
    cursor: _Cursor | None = None


_searches = msgspec.json.Decoder(SessionSearch)


def read_search(body: bytes) -> SessionSearch:
    """Read a search. Raises `Refused` MALFORMED if the body is invalid."""
    return decode_body(_searches, body)


def found_sessions(clients: TrainingClients, search: SessionSearch, caller: str) -> dict[str, object]:
    """Return a page of the sessions found for a client whose key's name is `caller`."""
    found = [each for each in clients.sessions.values() if _fits(each, search, caller)]
    found.sort(key=lambda each: (each.opened_ns, each.session), reverse=True)
    if search.cursor is not None:
        last = (search.cursor.last_created_at, search.cursor.last_session_id)
        found = [each for each in found if (datetime.fromisoformat(iso_time(each.opened_ns)), each.session) < last]
    page = found[: max(1, min(search.limit, PAGE_MAX))]
    cursor = None
    if len(page) < len(found):
        cursor = {"last_created_at": iso_time(page[-1].opened_ns), "last_session_id": page[-1].session}
    return {"sessions": [_summary(clients, each) for each in page], "next_cursor": cursor}


def session_entry(clients: TrainingClients, session: TrainingSession) -> dict[str, object]:
    """Return a session with its models."""
    return {
        "training_run_ids": [model.name for model in clients.models.values() if model.session == session.session],
        "sampler_ids": [],
        "user_metadata": _metadata(session),
        "display_name": session.metadata.get("display_name"),
    }


def _fits(session: TrainingSession, search: SessionSearch, caller: str) -> bool:
    metadata = _metadata(session) or {}
    if any(metadata.get(name) != value for name, value in search.user_metadata.items()):
        return False
    if search.project_ids is not None and session.metadata.get("project_id") not in search.project_ids:
        return False
    if search.owner.type == "user" and session.owner not in search.owner.owner_urns:
        return False
    if search.owner.type == "own" and session.owner != caller:
        return False
    if search.statuses is not None and not any(_has_status(session, status) for status in search.statuses):
        return False
    named = [search.session_id == session.session] if search.session_id is not None else []
    if search.display_name is not None:
        name = str(session.metadata.get("display_name") or "").lower()
        named.append(all(word in name for word in search.display_name.lower().split()))
    return not named or any(named)


def _has_status(session: TrainingSession, wanted: _Status) -> bool:
    status = _status(session)
    if status is None or status["type"] != wanted.type:
        return False
    return wanted.reasons is None or status.get("reason", {}).get("type") in wanted.reasons


def _status(session: TrainingSession) -> dict[str, Any] | None:
    """Return the status of a session, or None if the session ended without its client having finished it."""
    ended = session.ended
    if ended is None:
        return {"type": "active"}
    if ended.reason != SessionEnd.FINISHED:
        return None
    reason, _, detail = ended.detail.partition(" ")
    if reason not in ("success", "errored", "interrupted"):
        reason, detail = "success", ended.detail
    return {"type": "client_finished", "reason": {"type": reason}, "detail": detail or None}


def _metadata(session: TrainingSession) -> dict[str, str] | None:
    """Return a session's metadata as text, the only form that clients read."""
    given = session.metadata.get("user_metadata") or {}
    return {name: value if isinstance(value, str) else str(value) for name, value in given.items()} or None


def _summary(clients: TrainingClients, session: TrainingSession) -> dict[str, object]:
    kept = [each for each in clients.kept.values() if each.noted.session == session.session]
    return {
        "session_id": session.session,
        "created_at": iso_time(session.opened_ns),
        "owner": session.owner,
        "project_id": str(session.metadata.get("project_id") or ""),
        "status": _status(session),
        "checkpoints_count": len(kept),
        "checkpoint_storage_bytes": sum(each.noted.saved.size_bytes for each in kept),
        "display_name": session.metadata.get("display_name"),
        "user_metadata": _metadata(session),
    }
