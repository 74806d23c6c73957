#!/usr/bin/env bash
# Asked:     which sequence numbers (`seq_id`) does Tinker's SDK give to samples, of a sampling client and of its copy?
# One would  guess 0, 1, 2 ... for each, as every new client begins: small integers, for which 32 bits, or a double, do.
# In truth   a copy, such as `pickle` makes for another process, begins at a random multiple of 10^9, up to 10^18, so that
#            copies that do not know each other never share a number. A server that reads JSON's numbers as doubles rounds
#            most of them (above 2^53, about 9 * 10^15): neighbours then look like one request that was sent twice.
# Version:   tinker 0.38.0
# Source:    tinker/lib/public_interfaces/sampling_client.py, `_cloned_sampler_id` (https://pypi.org/project/tinker/0.38.0/)
# Seen:      the client counts [0, 1] and its copy [788503554000000000, 788503554000000001]; as doubles these two are equal
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet tinker==0.38.0
cat > "$folder/show.py" <<'PYTHON'
import json
import os
import pickle
import queue
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

numbers = queue.Queue()
ANSWERS = {
    "create_session": {"session_id": "s"},
    "create_sampling_session": {"sampling_session_id": "s:sample:0"},
    "asample": {"request_id": "r"},
    "retrieve_future": {"type": "try_again", "request_id": "r", "queue_state": "active"},
}


class Server(BaseHTTPRequestHandler):
    def do_GET(self):
        self.do_POST()

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        route = self.path.rpartition("/")[2]
        if route == "asample":
            numbers.put(json.loads(body)["seq_id"])
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(ANSWERS.get(route, {})).encode())

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ.update(TINKER_BASE_URL=f"http://127.0.0.1:{server.server_port}", TINKER_API_KEY="tml-any", TINKER_TELEMETRY="0")

import tinker  # noqa: E402  (it reads the variables)

client = tinker.ServiceClient().create_sampling_client(base_model="any").result()
prompt, params = tinker.ModelInput.from_ints([1, 2]), tinker.SamplingParams(max_tokens=1)
found = []
for each in (client, pickle.loads(pickle.dumps(client))):
    for _ in range(2):
        each.sample(prompt, 1, params)
    found.append(sorted(numbers.get(timeout=60) for _ in range(2)))
print("the client counts", found[0], "and its copy", found[1], end="")
print("; as doubles these two are", "equal" if float(found[1][0]) == float(found[1][1]) else "not equal", flush=True)
first = found[1][0]
as_expected = found[0] == [0, 1] and first % 10**9 == 0 and 10**9 <= first <= 10**18 and found[1][1] == first + 1
os._exit(0 if as_expected else 1)  # the answers are never there
PYTHON
"$folder/venv/bin/python" "$folder/show.py"
