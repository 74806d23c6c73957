"""The OpenAPI description of the swarm routes.

FastAPI generates it from routes that are never called. Analysing each of them takes a millisecond, so this is done only
when the document is first requested, not every time a gateway starts.
"""

from collections.abc import Iterable

from fastapi import APIRouter, Depends, Response
from fastapi.responses import JSONResponse

from bombus.errors import STATUS, Code
from bombus_gateway.access import Access
from bombus_gateway.context import Gateway
from bombus_gateway.schemas import request_body, schema_of
from bombus_gateway.swarm.answers import ANSWERS, REFUSALS
from bombus_gateway.swarm.routes import SwarmRoute


def described(gateway: Gateway, routes: Iterable[SwarmRoute]) -> APIRouter:
    """Return a router from which FastAPI describes the routes."""
    guards = {Access.CLIENT: Depends(gateway.clients), Access.CONTROL: Depends(gateway.control)}
    router = APIRouter(tags=["swarm"])
    for access, method, path, handler, body in routes:
        answer = ANSWERS[path]
        is_described = isinstance(answer, dict)
        router.add_api_route(
            path,
            handler,
            methods=[method],
            dependencies=[guards[access]],
            response_model=None if is_described else answer,
            response_class=Response if is_described else JSONResponse,
            status_code=200 if answer is not None else STATUS[Code.UNSUPPORTED],
            responses={**REFUSALS, 200: answer} if is_described else REFUSALS,
            openapi_extra=None if body is None else {"requestBody": request_body(schema_of(body.model_json_schema()))},
        )
    return router
