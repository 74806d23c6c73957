"""What both drivers share: how a `Send` becomes an httpx request, and an httpx response a `Reply`."""

import os
from typing import Any

import httpx

from bombus import telemetry
from bombus.sdk.core import Reply, Send

CONNECTIONS_MAX = 512
CONNECT_S = 10.0


def base_url(server_url: str, engine: str | None) -> str:
    """Where the swarm routes of an engine are; without one those of the hive's first."""
    url = server_url.rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"server_url {server_url!r} must begin with http:// or https://")
    return f"{url}/e/{engine}" if engine else url


def admin_key(given: str | None) -> str:
    return os.environ.get("BOMBUS_ADMIN_KEY", "") if given is None else given


def client_options(server_url: str) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=CONNECTIONS_MAX, max_keepalive_connections=CONNECTIONS_MAX)
    return {"base_url": server_url, "limits": limits}


def request_options(send: Send) -> dict[str, Any]:
    headers = dict(send.headers)
    if traceparent := telemetry.current():
        headers[telemetry.HEADER] = traceparent
    timeout = httpx.Timeout(send.timeout_s, connect=CONNECT_S)
    return {"method": send.method, "url": send.path, "content": send.body, "headers": headers, "timeout": timeout}


def reply_of(response: httpx.Response) -> Reply:
    try:
        retry_after_s = float(response.headers.get("retry-after", 0))
    except ValueError:
        retry_after_s = 0.0  # a date: our own server never sends one
    return Reply(status=response.status_code, body=response.content, retry_after_s=max(0.0, min(retry_after_s, 60.0)))
