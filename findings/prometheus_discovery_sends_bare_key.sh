#!/usr/bin/env bash
# Asked:     which header does Prometheus send to a service-discovery URL (`http_sd_configs`) with `authorization: {credentials: KEY}`?
# One would  guess `Authorization: Bearer KEY`, as for scrapes: the documentation says that `type` defaults to Bearer in both places.
# In truth   the request for targets has `Authorization: KEY`, without a scheme, while the scrapes of the same file have Bearer; with
#            `type: Bearer` written out both have it. A server that checks the scheme answers 401, and no target is found.
# Version:   Prometheus 2.42.0 (Debian 12: apt install prometheus)
# Source:    https://prometheus.io/docs/prometheus/latest/configuration/configuration/#http_sd_config
# Seen:      /targets KEY
#            /metrics Bearer KEY
set -euo pipefail
folder=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$folder"' EXIT
prometheus --version 2>&1 | grep -q "version 2.42.0" || { echo "this needs Prometheus 2.42.0"; exit 1; }
cat > "$folder/show.py" <<'PYTHON'
import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

seen = {}


class Shown(BaseHTTPRequestHandler):
    def do_GET(self):
        seen[self.path] = self.headers["Authorization"]
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps([{"targets": [f"127.0.0.1:{server.server_port}"]}]).encode())

    def log_message(self, *_):
        pass


server = HTTPServer(("127.0.0.1", 0), Shown)
url = f"http://127.0.0.1:{server.server_port}/targets"
key = {"credentials": "KEY"}
job = {"job_name": "x", "scrape_interval": "1s", "scrape_timeout": "1s", "authorization": key, "http_sd_configs": [{"url": url, "authorization": key}]}
with open(sys.argv[1], "w") as file:
    json.dump({"scrape_configs": [job]}, file)
while "/metrics" not in seen:
    server.handle_request()
for path, header in seen.items():
    print(path, header)
assert seen == {"/targets": "KEY", "/metrics": "Bearer KEY"}
PYTHON
timeout 60 python3 "$folder/show.py" "$folder/prometheus.yml" &
shown=$!
until [ -s "$folder/prometheus.yml" ]; do sleep 0.1; done
prometheus --config.file="$folder/prometheus.yml" --storage.tsdb.path="$folder/data" --web.listen-address=127.0.0.1:0 > "$folder/log" 2>&1 &
wait $shown
