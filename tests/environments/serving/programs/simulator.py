"""A simulator for tests: keeps what is put at a path until it is reset. It imports nothing of bombus."""

import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

kept: dict[str, bytes] = {}
broken: list[bool] = []


class Simulator(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer(200 if self.path == "/health" else 404, kept.get(self.path, b""))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path == "/reset":
            kept.clear()
        elif self.path == "/break":
            broken.append(True)
        else:
            kept[self.path] = body
        self._answer(500 if broken else 200, b"")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(200 if body else status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


ThreadingHTTPServer(("127.0.0.1", int(os.environ["GATEWAY_PORT"])), Simulator).serve_forever()
