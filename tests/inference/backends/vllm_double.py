"""A double of vLLM's server process: vLLM's API on a unix socket, with fixed tokens and true versions.

It uses the standard library alone, and samples 1, 2, 3, ... A request whose prompt begins with 7 stops half-way until
the weights have changed; one that scores such a prompt answers then. The name of the weights' folder selects a failure:
with `broken...` loading fails, with `dead...` the process does not start, with `strange...` it does so only without a
tokenizer, with `plain...` only without LoRA, with `sick...` the weights load and the engine dies, with
`nan...` scores are not numbers, with `refused...` it scores nothing, with `busy...` it is for ever about to, and with
`without_ids`, `without_logprobs`, `without_versions` or `without_routes` it is a vLLM that lacks these.
"""

import http.server
import json
import socketserver
import sys
import threading
from pathlib import Path
from typing import Any


class Weights:
    """The state of the server."""

    def __init__(self) -> None:
        self.label = "default"
        self.paused = False
        self.running = 0
        self.healthy = True
        self.lacks = ""
        self.name = ""
        self.changed = threading.Condition()


WEIGHTS = Weights()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def address_string(self) -> str:
        return "a unix socket"

    def log_message(self, format: str, *arguments: object) -> None: ...

    def do_GET(self) -> None:
        metrics = f'vllm:num_requests_running{{engine="0"}} {WEIGHTS.running}\n'
        healthy = WEIGHTS.healthy or self.path != "/health"
        self._answer(200 if healthy else 503, metrics.encode())

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("content-length", 0)))
        body: dict[str, Any] = json.loads(content) if content else {}
        path = self.path.partition("?")[0]
        if WEIGHTS.lacks == "routes":
            self._answer(404, b'{"detail":"Not Found"}')
            return
        if path == "/inference/v1/generate":
            self._generate(body)
            return
        with WEIGHTS.changed:
            if path == "/collective_rpc" and Path(body["kwargs"]["weights_path"]).name.startswith("broken"):
                self._answer(500, b'{"error": {"message": "the file breaks off"}}')
                return
            if path == "/collective_rpc":
                WEIGHTS.name = Path(body["kwargs"]["weights_path"]).name
                WEIGHTS.healthy = not WEIGHTS.name.startswith("sick")
            if path in ("/pause", "/resume"):
                WEIGHTS.paused = path == "/pause"
            elif path == "/update_weight_version":
                WEIGHTS.label = body["new_version"]
            WEIGHTS.changed.notify_all()
        self._answer(200, b'{"success":true}')

    def _generate(self, body: dict[str, Any]) -> None:
        count = body["sampling_params"]["max_tokens"]
        began = WEIGHTS.label
        if "prompt_logprobs" in body["sampling_params"]:
            self._score(body["token_ids"])
            return
        WEIGHTS.running += 1
        if body.get("stream"):
            self.send_response(200)
            self.send_header("connection", "close")
            self.end_headers()
        labels: list[str] = []
        for at in range(count):
            if body["token_ids"][0] == 7 and at == count // 2:
                with WEIGHTS.changed:
                    WEIGHTS.changed.wait_for(lambda: WEIGHTS.label != began and not WEIGHTS.paused)
            labels.append(WEIGHTS.label)
            if body.get("stream"):
                event = {"choices": [choice(range(at, at + 1), labels, at + 1 == count)]}
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        WEIGHTS.running -= 1
        if body.get("stream"):
            self.wfile.write(b"data: [DONE]\n\n")
            self.close_connection = True
        else:
            self._answer(200, json.dumps({"choices": [choice(range(count), labels, True)]}).encode())

    def _score(self, tokens: list[int]) -> None:
        """Give each token a logprob that is minus its id."""
        began, name = WEIGHTS.label, WEIGHTS.name.partition("-")[0]
        if name == "refused":
            self._answer(400, b'{"error": {"message": "the prompt is too long"}}')
            return
        if name == "busy":
            threading.Event().wait()
        if tokens[0] == 7:
            with WEIGHTS.changed:
                WEIGHTS.changed.wait_for(lambda: WEIGHTS.label != began and not WEIGHTS.paused)
        scores = [
            None,
            *(
                {str(token): {"logprob": float("nan") if name == "nan" else -float(token), "rank": 1}}
                for token in tokens[1:]
            ),
        ]
        self._answer(200, json.dumps({"choices": [], "prompt_logprobs": scores}).encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def choice(places: range, labels: list[str], last: bool) -> dict[str, Any]:
    tokens = [at + 1 for at in places]
    spans = [{"version": label, "start": at, "end": at + 1} for at, label in enumerate(labels)]
    logprobs = {"content": [{"token_id": token, "logprob": -0.5, "top_logprobs": []} for token in tokens]}
    return {
        "index": 0,
        "token_ids": None if WEIGHTS.lacks == "ids" else tokens,
        "logprobs": None if WEIGHTS.lacks == "logprobs" else logprobs,
        "finish_reason": "length" if last else None,
        "weight_versions": spans if last and WEIGHTS.lacks != "versions" else None,
    }


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


def main(words: list[str]) -> None:
    model = Path(words[words.index("--model") + 1]).name
    if model.startswith("dead"):
        raise RuntimeError("no such model")
    if model.startswith("strange") and "--skip-tokenizer-init" not in words:
        raise RuntimeError("this tokenizer needs code of its own")
    if model.startswith("plain") and "--enable-lora" in words:
        raise RuntimeError("PlainForCausalLM does not support LoRA yet")
    if model.startswith("without_"):
        WEIGHTS.lacks = model.removeprefix("without_").partition("-")[0]
    Server(words[words.index("--uds") + 1], Handler).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
