"""Routes that say whether a gateway is alive (`/health`), and whether it would answer calls now (`/ready`)."""

import asyncio
from typing import Literal

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from bombus.errors import BusUnavailable
from bombus.hive.state import EngineState, Phase
from bombus_gateway.context import Gateway
from bombus_gateway.refusals import RETRY_AFTER

ANSWER_S = 0.4  # for the bus, and again for the fold, as orchestrators wait one second in total


class HealthAnswer(BaseModel):
    """The fields that are read by xorl's clients and by programs that wait for a hive."""

    status: Literal["healthy", "starting"]
    engine_running: bool
    active_requests: int
    total_requests: int


class ReadyAnswer(BaseModel):
    """`why` says why calls would not be answered now, and is "" if they would be."""

    ready: bool
    why: str


def health_router(gateway: Gateway, engine: str) -> APIRouter:
    """Return one engine's routes. They need no key, since load balancers and orchestrators have none."""
    router = APIRouter(tags=["health"])

    @router.get(
        "/health",
        summary="Whether this gateway is alive",
        response_model=HealthAnswer,
        responses={503: {"model": HealthAnswer, "description": "The gateway is still reading the log, or is stopping"}},
    )
    async def health() -> JSONResponse:
        state = gateway.follower.hive.engine(engine)
        answer = HealthAnswer(
            status="healthy" if gateway.ready else "starting",
            engine_running=state.phase != Phase.OFFLINE,
            active_requests=state.clients.waiting,
            total_requests=state.clients.accepted,
        ).model_dump()
        return JSONResponse(answer) if gateway.ready else JSONResponse(answer, 503, RETRY_AFTER)

    @router.get(
        "/ready",
        summary="Whether this gateway would answer calls now",
        response_model=ReadyAnswer,
        responses={503: {"model": ReadyAnswer, "description": "Calls would not be answered, and why"}},
    )
    async def ready() -> JSONResponse:
        why = await _why_not_ready(gateway, engine)
        answer = ReadyAnswer(ready=not why, why=why).model_dump()
        return JSONResponse(answer, 503, RETRY_AFTER) if why else JSONResponse(answer)

    return router


async def _why_not_ready(gateway: Gateway, engine: str) -> str:
    """Return why calls for an engine would not be answered, or "" if they would be."""
    if not gateway.ready:
        return "This gateway is still reading the log, or is being stopped."
    position = gateway.follower.position
    try:
        async with asyncio.timeout(ANSWER_S):
            last = await gateway.bus.last(gateway.bus.subjects.events_stream)
    except (BusUnavailable, TimeoutError):
        return "The bus is unreachable."
    try:
        await gateway.follower.wait_position(0 if last is None else last.seq, ANSWER_S)
    except TimeoutError:
        return f"This gateway is behind the log: it has read {position} of {last.seq if last else 0} events."
    return _why_not_served(gateway.follower.hive.engine(engine))


def _why_not_served(engine: EngineState) -> str:
    """Return why no replica would answer calls for an engine. Return "" if a replica would, or if none is needed
    now."""
    if not engine.has_policy and not engine.serves_operations:
        return ""
    if engine.phase == Phase.BOOTING:
        return f"Engine {engine.name} is booting: {engine.stage or 'it is waiting for its trainer'}."
    serving = engine.usable.keys() & engine.loaded if engine.rolling else engine.usable.keys()
    if serving:  # or will be soon, with the weights of the last step
        return ""
    return f"No replica serves engine {engine.name}: {len(engine.replicas)} are running, but none has loaded its model."
