"""The playground, for trying an environment by hand on a server with one slot, and the server's OpenAPI document."""

import html
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

PAGE = Path(__file__).with_name("playground.html")


def playground(name: str) -> Mapping[str, tuple[str, bytes]]:
    """Return a mapping from the page's path to its content type and body.

    The page holds the slot while it is open: on a server with several slots, a forgotten page would take one away from
    a training job.
    """
    page = PAGE.read_text().replace("{{name}}", html.escape(name))
    return {"/": ("text/html; charset=utf-8", page.encode())}


def openapi(metadata: Mapping[str, str]) -> dict[str, object]:
    """Return the OpenAPI document. It omits OpenEnv's `/reset`, `/step` and `/state`, which share one environment: here
    each client has its own session, as in OpenEnv's production mode."""
    said = {
        "/health": ("get", "The numbers of slots, of leases and of waiting clients"),
        "/metadata": ("get", "The name and the description of the environment"),
        "/schema": ("get", "The JSON schemas of actions, observations and states"),
        "/mcp": ("post", "Sessions and tool calls over JSON-RPC"),
        "/ws": ("get", "A session over a WebSocket"),
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": metadata["name"], "description": metadata["description"], "version": version("bombus")},
        "paths": {
            path: {method: {"summary": what, "responses": {"default": {"description": what}}}}
            for path, (method, what) in said.items()
        },
    }
