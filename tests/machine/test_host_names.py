"""A server without a key answers to its own names only, so that no stranger's name can be pointed at it."""

import subprocess
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from bombus.bus import Bus
from bombus.config.cluster import Cluster
from bombus.host.layout import Layout, services
from bombus.machine.hive_keys import HiveKeys
from bombus.machine.host_names import OwnHostNames, OwnHostsOnly, host_of
from bombus.machine.process import listen
from tests.gateway.openai_hive import gateway_of

LOOPBACK = ("localhost", "LocalHost:10086", "localhost.:1", "127.0.0.1", "127.8.8.8:99", "[::1]:10086")
STRANGE = (
    "evil.example",
    "evil.example:10086",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "[",
    "",
    "a@b@c",
    ":1",
)


@pytest.mark.parametrize("listens_at", ["127.0.0.1", "::1", "192.0.2.7", "0.0.0.0", "::"])
def test_loopback_is_always_a_name_and_a_strangers_never(listens_at: str) -> None:
    own = OwnHostNames(listens_at)
    assert all(own.include(host) for host in LOOPBACK)
    assert not any(own.include(host) for host in STRANGE)


def test_the_address_where_it_listens_and_given_names_count() -> None:
    own = OwnHostNames("192.0.2.7", ("Hive.Example", host_of("https://proxy.example:444/x"), host_of("")))
    assert all(own.include(host) for host in ("192.0.2.7:10086", "hive.example", "HIVE.example:1", "proxy.example"))
    assert not any(own.include(host) for host in ("192.0.2.8:10086", "x.hive.example"))


def test_at_every_address_any_address_counts() -> None:
    for listens_at in ("0.0.0.0", "::"):
        own = OwnHostNames(listens_at)
        assert own.include("192.0.2.8:10086")
        assert own.include("[2001:db8::1]:10086")


async def test_a_gateway_without_a_key_refuses_a_name_that_was_pointed_at_it(bus: Bus) -> None:
    """As a browser does for a page of http://evil.example:PORT, once that name resolves to 127.0.0.1."""
    async with gateway_of(bus, host_names=("hive.lan",)) as (_, url), httpx.AsyncClient(base_url=url) as http:
        port = url.rpartition(":")[2]
        for path in ("/get_engine_status", "/v1/models", "/v1/chat/completions", "/openapi.json", "/k/x/claim_episode"):
            refused = await http.request("POST", path, headers={"host": f"evil.example:{port}"})
            assert (refused.status_code, refused.json()["code"]) == (421, "unknown_host"), path
            assert "--host-name" in refused.json()["detail"]
        for host in (f"127.0.0.1:{port}", f"localhost:{port}", "hive.lan"):
            assert (await http.get("/get_engine_status", headers={"host": host})).status_code == 200


async def test_a_gateway_with_a_client_key_answers_by_any_name(bus: Bus) -> None:
    keys = HiveKeys(admin="an-admin-key-for-tests", client="a-client-key-for-tests")
    async with gateway_of(bus, keys=keys) as (_, url), httpx.AsyncClient(base_url=url) as http:
        headers = {"host": "hive.example", "x-api-key": keys.client}
        assert (await http.get("/get_engine_status", headers=headers)).status_code == 200


async def test_each_of_several_hosts_in_one_request_has_to_be_a_name_of_the_server() -> None:
    passed: list[object] = []
    sent: list[MutableMapping[str, Any]] = []

    async def app(scope: object, receive: object, send: object) -> None:
        passed.append(scope)

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request"}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    with listen("127.0.0.1", 0) as bound:
        checked = OwnHostsOnly(app, bound, ())
    for hosts, status in (((), None), ((b"localhost",), None), ((b"localhost", b"evil.example"), 421)):
        sent.clear()
        await checked({"type": "http", "headers": [(b"host", host) for host in hosts]}, receive, send)
        assert (sent[0]["status"] if sent else None) == status
    assert len(passed) == 2


def test_names_reach_gateways_from_the_cluster_file_and_the_command_line(tmp_path: Path) -> None:
    cluster = Cluster.model_validate({"gateway": {"host_names": ("a.lan", "b.lan")}, "engines": {"main": {}}})
    gateway = services(Layout(cluster=cluster), "nats://nowhere")[-1]
    assert "--host-name a.lan --host-name b.lan" in " ".join(gateway.command)
    command = [sys.executable, "-m", "bombus", "up", "--dry-run", "--host-name", "c.lan"]
    planned = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=True).stdout
    assert "--host-name c.lan" in planned
    refused = subprocess.run([*command, "--host-name", "a b"], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert refused.returncode == 2
    assert "host_names" in refused.stderr or "--host-name" in refused.stderr
