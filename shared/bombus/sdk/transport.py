"""What both drivers share: how a `Send` becomes an httpx request, and an httpx response a `Reply`."""

import os
from collections.abc import Mapping
from typing import Any

import httpx

from bombus import telemetry
from bombus.host.hive_keys import ADMIN_VARIABLE, CLIENT_VARIABLE
from bombus.sdk.core import Reply, Send

CONNECTIONS_MAX = 512
CONNECT_S = 10.0


def address(server_url: str, api_key: str | None, environment: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """(the hive's URL, the key that it is asked with; "" for none).

    A key in the path is taken out of the URL, which gets into logs, errors and the base URLs that agents are given.
    """
    url, mark, in_path = server_url.rstrip("/").partition("/k/")
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"server_url {url!r} must begin with http:// or https://")
    if "/" in in_path:
        raise ValueError(f"server_url {url + mark + '...'!r} must end with its key; an engine has its own argument")
    if api_key is None:
        api_key = in_path or environment.get(ADMIN_VARIABLE) or environment.get(CLIENT_VARIABLE, "")
    key = api_key.strip()
    if not all("!" <= character <= "~" for character in key):
        raise ValueError("the hive's key has characters that no header can carry")
    return url, key


def client_options(server_url: str, engine: str | None, key: str) -> dict[str, Any]:
    """`engine` leads to its own routes; without one they are those of the hive's first."""
    limits = httpx.Limits(max_connections=CONNECTIONS_MAX, max_keepalive_connections=CONNECTIONS_MAX)
    base_url = f"{server_url}/e/{engine}" if engine else server_url
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return {"base_url": base_url, "limits": limits, "headers": headers}


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
