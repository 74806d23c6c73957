"""The playground, to try an environment by hand on servers with a single slot, and the OpenAPI document of a server."""

import html
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

PAGE = Path(__file__).with_name("playground.html")


def playground(name: str) -> Mapping[str, tuple[str, bytes]]:
    """Return the page by its path, with its type of content.

    It takes the slot while it is open: on a server with several, a forgotten page would take one from a training run.
    """
    page = PAGE.read_text().replace("{{name}}", html.escape(name))
    return {"/": ("text/html; charset=utf-8", page.encode())}


def openapi(metadata: Mapping[str, str]) -> dict[str, object]:
    """Return the OpenAPI document. It has none of OpenEnv's `/reset`, `/step` and `/state`, which share one
    environment: here each client has a session of its own, as in the mode that OpenEnv calls production.
    """
    said = {
        "/health": ("get", "The number of slots, of leases and of clients that wait"),
        "/metadata": ("get", "The name of the environment, and what it is"),
        "/schema": ("get", "The JSON schemas of actions, observations and states"),
        "/mcp": ("post", "Sessions and calls of tools in JSON-RPC"),
        "/ws": ("get", "A session, by WebSocket"),
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": metadata["name"], "description": metadata["description"], "version": version("bombus")},
        "paths": {
            path: {method: {"summary": what, "responses": {"default": {"description": what}}}}
            for path, (method, what) in said.items()
        },
    }
