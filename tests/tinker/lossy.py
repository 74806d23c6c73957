"""A proxy that loses answers on their way, and sends requests twice."""

import random
import socket
import threading
import time

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

KEPT = ("content-type", "content-encoding", "x-api-key", "x-idempotency-key", "authorization")


class LossyProxy:
    """Forwards everything to `target`; of `lost` of the answers a 502 is left. One request of five is sent twice."""

    def __init__(self, target: str, seed: int, lost: float = 0.15) -> None:
        self._target = target
        self._random = random.Random(seed)
        self._share = lost
        self.lost = self.repeated = 0
        self._client = httpx.AsyncClient(timeout=90.0)
        bound = socket.socket()
        bound.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        app = Starlette(routes=[Route("/{path:path}", self._forward, methods=["GET", "POST", "DELETE"])])
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [bound]}, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)

    async def _forward(self, request: Request) -> Response:
        body = await request.body()
        headers = {name: value for name, value in request.headers.items() if name in KEPT}
        twice = self._random.random() < 0.2
        self.repeated += twice
        for _ in range(1 + twice):
            url = f"{self._target}{request.url.path}?{request.url.query}"
            answer = await self._client.request(request.method, url, content=body, headers=headers)
        if self._random.random() < self._share:
            self.lost += 1
            return Response("lost", 502)
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(30)
