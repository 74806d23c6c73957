"""An OpenAI-compatible server on a port of its own, whose model is a function of the conversation."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Conversation = list[dict[str, Any]]
Reply = str | dict[str, Any] | int  # a text, a message, or the status of a refusal


class ScriptedModel(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    reply: Callable[[Conversation], Reply]

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "scripted", "owned_by": None}]} if self.path == "/v1/models" else {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        said = type(self).reply(body["messages"])
        if isinstance(said, int):
            self._send(said, {"error": {"message": "the scripted model refuses"}})
            return
        message = {"role": "assistant", "content": said} if isinstance(said, str) else said
        prompt = sum(len(str(each.get("content")).split()) for each in body["messages"])
        usage = {"prompt_tokens": prompt, "completion_tokens": len(str(message.get("content")).split())}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        self._send(200, {"id": "chatcmpl-1", "object": "chat.completion", "choices": [choice], "usage": usage})

    def _send(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        except ConnectionError:
            self.close_connection = True  # the program that asked was interrupted, as the test wanted

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def model_server(reply: Callable[[Conversation], Reply]) -> Iterator[str]:
    """Serve a model until the block is left, and give the server's address."""
    handler = type("Handler", (ScriptedModel,), {"reply": staticmethod(reply)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
