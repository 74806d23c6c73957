"""A gateway's OpenAPI document, built when it is first requested. Only then is this module imported."""

from typing import Any

from fastapi import FastAPI

from bombus_gateway.anthropic.docs import add_anthropic_paths
from bombus_gateway.context import Gateway
from bombus_gateway.openai.docs import add_openai_paths
from bombus_gateway.responses.docs import add_responses_paths
from bombus_gateway.swarm.docs import described
from bombus_gateway.swarm.health import health_router
from bombus_gateway.swarm.routes import hive_routes, swarm_routes


def openapi_document(title: str, description: str, gateway: Gateway) -> dict[str, Any]:
    app = FastAPI(title=title, description=description)
    for prefix, engine in gateway.mounts:
        app.include_router(health_router(gateway, engine), prefix=prefix)
        app.include_router(described(gateway, swarm_routes(gateway, engine)), prefix=prefix)
    app.include_router(described(gateway, hive_routes(gateway)))
    document = app.openapi()
    prefixes = [prefix for prefix, _ in gateway.mounts]
    add_openai_paths(document, prefixes)
    add_anthropic_paths(document, prefixes)
    add_responses_paths(document, prefixes)
    return document
