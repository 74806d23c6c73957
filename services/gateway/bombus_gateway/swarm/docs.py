"""The OpenAPI description of the swarm routes.

FastAPI makes it, from routes that answer nothing: it analyses each for a millisecond, so that is done when somebody
reads the page, and not at the start of each gateway.
"""

from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter, Depends
from pydantic import BaseModel

from bombus.errors import STATUS, Code
from bombus_gateway.access import Access, Guard
from bombus_gateway.context import Gateway
from bombus_gateway.swarm.answers import ANSWERS, REFUSALS
from bombus_gateway.swarm.routes import SwarmRoute


def described(gateway: Gateway, routes: Iterable[SwarmRoute]) -> APIRouter:
    """Return routes as FastAPI describes them."""
    settings = gateway.settings
    guards = {access: Depends(Guard(access, settings.keys, settings.public_url)) for access in Access}
    router = APIRouter(tags=["swarm"])
    for access, method, path, handler, body in routes:
        answer = ANSWERS[path]
        router.add_api_route(
            path,
            handler,
            methods=[method],
            dependencies=[guards[access]],
            response_model=answer,
            status_code=200 if answer is not None else STATUS[Code.UNSUPPORTED],
            responses=REFUSALS,
            openapi_extra={"requestBody": _described_body(body)} if body is not None else None,
        )
    return router


def _described_body(body: type[BaseModel]) -> dict[str, Any]:
    """Return a request's schema. Bodies are parsed by hand, so FastAPI does not know it."""
    schema = body.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inlined(part: Any) -> Any:
        if isinstance(part, list):
            return [inlined(item) for item in part]
        if not isinstance(part, dict):
            return part
        if "$ref" in part:
            return inlined(definitions[part["$ref"].rpartition("/")[2]])
        return {name: inlined(item) for name, item in part.items()}

    return {"required": True, "content": {"application/json": {"schema": inlined(schema)}}}
