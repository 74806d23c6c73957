"""The routes of Tinker's REST client that training does not need."""

import asyncio
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec
from fastapi import Request, Response
from starlette.responses import FileResponse, RedirectResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from bombus.errors import Code, Refused
from bombus.hive import inbox
from bombus.hive.operations.owners import seen_by
from bombus.hive.operations.state import KeptWeights
from bombus.hive.state import EngineState
from bombus_gateway.context import Gateway
from bombus_gateway.decoding.json_body import decode_body
from bombus_gateway.operations.catching_up import found
from bombus_gateway.operations.listings import found_checkpoint, iso_time, own_checkpoint, path_of
from bombus_gateway.operations.operation_log import OperationLog
from bombus_gateway.operations.rest.downloads import ARCHIVE, LINK_S, Archive, Downloads, files_of
from bombus_gateway.operations.rest.searching import found_sessions, read_search
from bombus_gateway.operations_wire.checkpoints import checked_ttl
from bombus_gateway.operations_wire.paths import CheckpointPath, read_path
from bombus_gateway.plain_routes import JsonResponse, PlainRoute

CHECKPOINT = "/training_runs/{model}/checkpoints/{kind}/{name}"


class _Ttl(msgspec.Struct):
    ttl_seconds: float | None = None


_ttls = msgspec.json.Decoder(_Ttl)


class RestRoutes:
    """The routes for checkpoints and sessions of one engine."""

    def __init__(self, gateway: Gateway, operations: OperationLog) -> None:
        self._gateway = gateway
        self._operations = operations
        self._downloads = Downloads(gateway.keys, operations.engine)

    def routes(self) -> list[PlainRoute]:
        """Return the routes below `/api/v1` that need a client's key."""
        return [
            PlainRoute("PUT", f"{CHECKPOINT}/ttl", self.set_ttl),
            PlainRoute("POST", f"{CHECKPOINT}/publish", self.publish),
            PlainRoute("DELETE", f"{CHECKPOINT}/publish", self.unpublish),
            PlainRoute("GET", f"{CHECKPOINT}/external_weights_urls", self.urls),
            PlainRoute("GET", f"{CHECKPOINT}/archive", self.archive),
            PlainRoute("POST", "/sessions/search", self.search_sessions),
            PlainRoute("PUT", "/sessions/{session}/project", self.projects),
            PlainRoute("GET", "/sessions/{session}/trace_export", self.trace_export),
            PlainRoute("POST", "/copy_weights", self.copy_weights),
            PlainRoute("GET", "/audit", self.accounts),
            PlainRoute("GET", "/billing/usage/events", self.accounts),
            PlainRoute("GET", "/billing/usage/checkpoints/current", self.accounts),
        ]

    def links(self) -> list[PlainRoute]:
        """Return the route that serves download links, which needs no key."""
        return [PlainRoute("GET", "/api/v1/downloads/{link}/{file}", self.download)]

    @property
    def _state(self) -> EngineState:
        return self._operations.state

    async def _kept(self, request: Request) -> KeptWeights:
        """Return the checkpoint that a request may read."""
        path, holder = _path(request), self._gateway.holder_of(request)
        return await found(self._gateway.follower, lambda: found_checkpoint(self._state.clients, path, holder))

    async def _own(self, request: Request) -> KeptWeights:
        """Return the checkpoint that a request may change."""
        path, holder = _path(request), self._gateway.holder_of(request)
        return await found(self._gateway.follower, lambda: own_checkpoint(self._state.clients, path, holder))

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    async def set_ttl(self, request: Request) -> Response:
        """Keep a checkpoint for `ttl_seconds` from now, or forever."""
        ttl_s = checked_ttl(decode_body(_ttls, await self._gateway.bodies.small(request)).ttl_seconds)
        return await self._change(request, partial(inbox.RetainWeights, ttl_s=ttl_s))

    async def publish(self, request: Request) -> Response:
        return await self._change(request, partial(inbox.PublishWeights, public=True))

    async def unpublish(self, request: Request) -> Response:
        return await self._change(request, partial(inbox.PublishWeights, public=False))

    async def _change(
        self, request: Request, command: Callable[..., inbox.RetainWeights | inbox.PublishWeights]
    ) -> Response:
        """Carry out a command on the checkpoint that a request names."""
        noted = (await self._own(request)).noted
        named = command(
            id=uuid.uuid4().hex,
            engine=self._operations.engine,
            model=noted.model,
            use=noted.saved.use,
            name=noted.saved.name,
        )
        await self._gateway.carry_out(named)
        return Response(status_code=204)

    # ---- downloads ------------------------------------------------------------------------------------------------

    async def urls(self, request: Request) -> Response:
        """Answer with a link to each file of a checkpoint. The links need no key."""
        files, link, expires = await self._linked(request)
        return JsonResponse({"urls": {name: f"{link}/{name}" for name in files}, "expires": expires})

    async def archive(self, request: Request) -> Response:
        """Redirect to a link to the whole checkpoint as a tar."""
        _, link, expires = await self._linked(request)
        return RedirectResponse(f"{link}/{ARCHIVE}", 302, {"expires": expires})

    async def _linked(self, request: Request) -> tuple[dict[str, Path], str, str]:
        """Return a checkpoint's files, a link to them, and when it expires.

        The link begins with the gateway's public URL, or otherwise with the address that the client used.
        """
        kept = await self._kept(request)
        files = await asyncio.to_thread(files_of, kept)
        expires_ns = time.time_ns() + int(LINK_S * 1e9)
        before = request.url.path.partition("/api/v1/")[0]
        origin = self._gateway.settings.public_url.rstrip("/") or f"{request.url.scheme}://{request.url.netloc}"
        link = f"{origin}{before}/api/v1/downloads/{self._downloads.link(kept, expires_ns)}"
        return files, link, iso_time(expires_ns)

    async def download(self, request: Request) -> Response:
        """Send one file of a checkpoint, or all of them as a tar."""
        kept = self._downloads.linked(self._state, request.path_params["link"], time.time_ns())
        files, name = await asyncio.to_thread(files_of, kept), request.path_params["file"]
        if name == ARCHIVE:
            return await self._archived(kept, files)
        if name not in files:
            raise Refused(Code.UNKNOWN_PATH, f"{path_of(kept).id} has no file {name[:200]!r}.")
        whole = FileResponse(files[name], media_type="application/octet-stream", filename=name)
        return _Download(whole, self._downloads)

    async def _archived(self, kept: KeptWeights, files: dict[str, Path]) -> Response:
        with ExitStack() as stack:
            archive = await asyncio.to_thread(Archive, files, kept.noted.saved.name.lstrip("."))
            stack.callback(archive.close)
            headers = {
                "content-length": str(archive.size),
                "content-disposition": f'attachment; filename="{kept.noted.saved.name}.tar"',
            }
            whole = StreamingResponse(archive.chunks(), headers=headers, media_type="application/x-tar")
            return _Download(whole, self._downloads, stack.pop_all())

    # ---- sessions, and routes that are refused --------------------------------------------------------------------

    async def search_sessions(self, request: Request) -> Response:
        search = read_search(await self._gateway.bodies.small(request))
        caller = self._gateway.holder_of(request)
        return JsonResponse(found_sessions(seen_by(self._state.clients, caller), search, caller))

    async def projects(self, request: Request) -> Response:
        raise Refused(Code.UNSUPPORTED, "A hive has no projects: give a session its project_id when it is created.")

    async def trace_export(self, request: Request) -> Response:
        why = "traces are not exported here: the hive's log records what happened"
        return JsonResponse({"status": "failed", "error": why})

    async def copy_weights(self, request: Request) -> Response:
        raise Refused(
            Code.UNSUPPORTED,
            "Checkpoints are not copied here: create a model from this one and save it under another name, set its "
            "ttl, or publish it, after which all clients of the hive can load it.",
        )

    async def accounts(self, request: Request) -> Response:
        raise Refused(Code.UNSUPPORTED, "A hive has no billing and no organizations; its log shows what was used.")


def _path(request: Request) -> CheckpointPath:
    params = request.path_params
    return read_path(f"{params['kind']}/{params['name']}", params["model"])


class _Download(Response):
    """A response that counts as an open download while it is being sent."""

    def __init__(self, whole: Response, downloads: Downloads, closing: ExitStack | None = None) -> None:
        super().__init__()
        self._whole, self._downloads, self._closing = whole, downloads, closing or ExitStack()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._closing, self._downloads.room():
            await self._whole(scope, receive, send)
