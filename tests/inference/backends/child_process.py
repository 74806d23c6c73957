"""A process that is managed in place of vLLM: `python child_process.py SOCKET [dies|deaf|stubborn]`.

It has a child of its own, as vLLM has its engine, and answers `/health` on a unix socket. `dies` ends with an exception
instead, `deaf` never listens, and `stubborn` listens and ignores SIGTERM.
"""

import http.server
import os
import signal
import socketserver
import subprocess
import sys


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.send_header("content-length", "0")
        self.end_headers()

    def address_string(self) -> str:
        return "a unix socket"


def main(socket: str, how: str = "") -> None:
    engine = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    print(f"engine {engine.pid} DEV={os.environ.get('VLLM_SERVER_DEV_MODE')}", flush=True)
    if how == "dies":
        print("(APIServer pid=1) WARNING 11-21 15:20:24 [base.py:1] ValueError: no chat template", flush=True)
        print("(EngineCore pid=1) ERROR 11-21 15:20:24 [core.py:1] RuntimeError: no such model:", flush=True)
        print("(EngineCore pid=1) ERROR 11-21 15:20:24 [core.py:1]   nowhere", flush=True)
        raise ValueError("what follows from it")
    if how == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if how == "deaf":
        signal.pause()
    socketserver.UnixStreamServer(socket, Handler).serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
