"""The routes with which xorl's clients register inference servers, sync weights to them, and put the trainer to sleep.

These routes answer directly, without a future. A failure is answered with `success: false` and an explanation, not with
an HTTP error.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable

from fastapi import Request, Response

from bombus.errors import Refused
from bombus.hive import inbox
from bombus.hive.events import EndpointAdded
from bombus.hive.operations.owners import seen_by
from bombus.hive.operations.state import endpoint_id
from bombus.hive.state import EngineState
from bombus_gateway.context import Gateway
from bombus_gateway.operations.catching_up import catch_up
from bombus_gateway.operations.endpoints.servers import Target, check_allowed, looked_at
from bombus_gateway.operations.endpoints.syncing import WeightSync
from bombus_gateway.operations.full_weights import RegisteredModel
from bombus_gateway.operations.operation_log import OperationLog
from bombus_gateway.operations_wire.dialects import is_tinkers
from bombus_gateway.operations_wire.endpoints import Endpoint, SyncRequest, read_endpoint, read_new_endpoint, read_sync
from bombus_gateway.operations_wire.submission import DEFAULT_MODEL
from bombus_gateway.plain_routes import JsonResponse, PlainRoute

REST_S = 900.0  # time to finish the current operation and recovery checkpoints, or to rebuild models


class EndpointRoutes:
    """The inference endpoints of one engine."""

    def __init__(
        self, gateway: Gateway, operations: OperationLog, registered: RegisteredModel, rest_s: float = REST_S
    ) -> None:
        self._gateway = gateway
        self._registered = registered
        self._rest_s = rest_s
        self._operations = operations
        self._sync = WeightSync(gateway, operations)

    def routes(self) -> list[PlainRoute]:
        """Return the routes at the root, and the one that is also below `/api/v1`."""
        return [
            PlainRoute("POST", "/add_inference_endpoint", self.add),
            PlainRoute("POST", "/remove_inference_endpoint", self.remove),
            PlainRoute("GET", "/list_inference_endpoints", self.list),
            PlainRoute("POST", "/sync_inference_weights", self.sync),
            PlainRoute("POST", "/api/v1/sync_inference_weights", self.sync),
        ]

    def controlling(self) -> list[PlainRoute]:
        """Return the routes that stop the work of all clients."""
        return [PlainRoute("POST", "/sleep", self.sleep), PlainRoute("POST", "/wake_up", self.wake_up)]

    # ---- endpoints ------------------------------------------------------------------------------------------------

    async def add(self, request: Request) -> Response:
        return await _answered(self._add(await self._gateway.bodies.small(request), self._gateway.holder_of(request)))

    async def _add(self, body: bytes, holder: str) -> dict[str, object]:
        asked = read_new_endpoint(body)
        check_allowed(self._gateway.settings.inference_hosts, asked.at)
        await catch_up(self._gateway.follower)  # the address may be that of a replica that has just joined
        target = await looked_at(self._gateway, asked.at)
        if target.failure or target.server is None:
            return {"success": False, "message": f"The endpoint was not registered: {target.failure}"}
        add = inbox.AddEndpoint(
            id=uuid.uuid4().hex,
            engine=self._operations.engine,
            host=asked.at.host,
            port=asked.at.port,
            world_size=asked.world_size,
            owner=holder,
        )
        await self._gateway.carry_out(add)
        synced, said = False, None
        if asked.sync:
            synced, said = await self._synced(asked.at, holder)
        return {
            "success": True,
            "message": f"{endpoint_id(asked.at.host, asked.at.port)} will get the weights of each sync.",
            "endpoint": _entry(asked.at, asked.world_size, target),
            "weights_synced": synced,
            "sync_message": said,
        }

    async def _synced(self, at: Endpoint, holder: str) -> tuple[bool, str]:
        """Give a new endpoint the current weights. The endpoint stays registered even if the sync fails."""
        try:
            report = await self._sync.sync(SyncRequest(), holder, only=at)
        except Refused as refusal:
            return False, refusal.why
        return report.success, report.message

    async def remove(self, request: Request) -> Response:
        return await _answered(
            self._remove(await self._gateway.bodies.small(request), self._gateway.holder_of(request))
        )

    async def _remove(self, body: bytes, holder: str) -> dict[str, object]:
        at = read_endpoint(body)
        name = endpoint_id(at.host, at.port)
        if name not in seen_by(self._operations.clients, holder).endpoints:
            return {"success": False, "message": f"{name} is not registered."}
        remove = inbox.RemoveEndpoint(id=uuid.uuid4().hex, engine=self._operations.engine, host=at.host, port=at.port)
        await self._gateway.carry_out(remove)
        return {"success": True, "message": f"{name} will get no more weights."}

    async def list(self, request: Request) -> Response:
        """Answer with all endpoints that the client may use. An endpoint that does not respond is listed as not
        `healthy`."""
        added = [*seen_by(self._operations.clients, self._gateway.holder_of(request)).endpoints.values()]
        entries = await asyncio.gather(*(self._looked_up(each) for each in added))
        return JsonResponse({"endpoints": entries, "count": len(entries)})

    async def _looked_up(self, added: EndpointAdded) -> dict[str, object]:
        at = Endpoint(added.host, added.port)
        return _entry(at, added.world_size, await looked_at(self._gateway, at))

    async def sync(self, request: Request) -> Response:
        body, holder = await self._gateway.bodies.small(request), self._gateway.holder_of(request)

        async def synced() -> object:
            asked = read_sync(body)
            await catch_up(self._gateway.follower)  # other gateways may have added models, endpoints or replicas
            models = seen_by(self._operations.clients, holder).open_models
            meant = asked.model or ("" if any(not is_tinkers(each.name) for each in models) else DEFAULT_MODEL)
            if self._registered.unborn(meant, holder):
                await self._registered.create(holder)  # the sync then sends the base's weights
            return await self._sync.sync(asked, holder)

        return await _answered(synced())

    # ---- the trainer's sleep --------------------------------------------------------------------------------------

    async def sleep(self, request: Request) -> Response:
        return await _answered(self._rest(self._gateway.operator_of(request), asleep=True))

    async def wake_up(self, request: Request) -> Response:
        return await _answered(self._rest(self._gateway.operator_of(request), asleep=False))

    async def _rest(self, by: str, asleep: bool) -> dict[str, object]:
        """Put the trainer to sleep or wake it up, and answer once the trainer has done so."""
        engine_name = self._operations.engine
        await self._gateway.carry_out(inbox.AskRest(id=uuid.uuid4().hex, engine=engine_name, asleep=asleep, by=by))
        run = self._operations.state.run
        is_over = _over(lambda: self._operations.state, run, asleep)
        try:
            await self._gateway.follower.wait_for(lambda _: is_over(), self._rest_s)
        except TimeoutError:
            if not asleep:
                why = f"The trainer has not rebuilt its models within {self._rest_s:g} s; ask again."
                return {"success": False, "result": why}
            await self._gateway.carry_out(inbox.AskRest(id=uuid.uuid4().hex, engine=engine_name, asleep=False))
            why = f"The trainer has not freed its memory within {self._rest_s:g} s, so it stays awake. Is it running?"
            return {"success": False, "result": why}
        engine = self._operations.state
        if not engine.asleep == engine.rest_wanted == asleep or engine.run != run:
            return {"success": False, "result": "The run has since ended, or another client asked for the opposite."}
        if asleep:
            return {"success": True, "result": "The trainer has freed its memory. Operations will wait for /wake_up."}
        return {"success": True, "result": "The trainer has restored all of its models, unchanged."}


def _over(state: Callable[[], EngineState], run: int, asleep: bool) -> Callable[[], bool]:
    """Return a predicate that is true once the trainer has reached the wanted state (asleep or awake), or can no longer
    reach it."""

    def over() -> bool:
        engine = state()
        return engine.asleep == asleep or engine.run != run or engine.rest_wanted != asleep

    return over


async def _answered(answering: Awaitable[object]) -> Response:
    """Answer with JSON. A refusal is also answered with status 200, since clients check `success`."""
    try:
        return JsonResponse(await answering)
    except Refused as refusal:
        return JsonResponse({"success": False, "message": refusal.why, "result": refusal.why, "code": refusal.code})


def _entry(at: Endpoint, world_size: int, target: Target) -> dict[str, object]:
    """Return an endpoint in the form that xorl's client reads."""
    server = target.server
    return {
        "host": at.host,
        "port": at.port,
        "worker_port": at.port,
        "world_size": world_size,
        "healthy": not target.failure,
        "why": target.failure,
        "server_info": None if server is None else {"model_path": server.model, "version": server.kind.value},
    }
