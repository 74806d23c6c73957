"""Two generations of the hive's keys are valid at once, and gateways learn of new ones without a restart."""

import argparse
import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from bombus.bus import Bus
from bombus.bus_address import BusUser
from bombus.commands import up
from bombus.commands.init import make_credentials
from bombus.config.cluster import Cluster
from bombus.errors import Code, Refused
from bombus.host.credentials import read_environment
from bombus.host.layout import Layout, services
from bombus.insight.web.access import opening
from bombus.machine import hive_keys
from bombus.machine.hive_keys import HiveKeys, KeyRing, add_key_arguments, keys_for
from bombus.private import write_private
from bombus.sdk.transport import address
from tests.gateway.swarm_hive import played_hive
from tests.patience import until

ADMINS = ("an-admin-key-for-tests-1", "an-admin-key-for-tests-2", "an-admin-key-for-tests-3")
CLIENTS = ("a-client-key-for-tests-1", "a-client-key-for-tests-2", "a-client-key-for-tests-3")
ALICES = ("a-key-of-alice-for-tests-1", "a-key-of-alice-for-tests-2", "a-key-of-alice-for-tests-3")


def given(*words: str, environment: Mapping[str, str] | None = None) -> HiveKeys:
    parser = argparse.ArgumentParser()
    add_key_arguments(parser)
    parser.set_defaults(host="127.0.0.1")
    return keys_for(parser.parse_args(words), environment or {})


def write(folder: Path, generation: int) -> list[str]:
    """Write the keys of a generation, which replaces the one before, and return the arguments that name the files."""
    first = max(generation - 1, 0)
    for name, keys in (("admin", ADMINS), ("client", CLIENTS)):
        write_private(folder / name, "".join(f"{key}\n" for key in reversed(keys[first : generation + 1])))
    before = {"before": ALICES[generation - 1]} if generation else {}
    write_private(folder / "clients", json.dumps({"alice": {"key": ALICES[generation], **before}}))
    flags = {"--admin-key-file": "admin", "--client-key-file": "client", "--client-keys-file": "clients"}
    return [word for flag, name in flags.items() for word in (flag, str(folder / name))]


async def opened(http: httpx.AsyncClient) -> list[tuple[bool, bool, bool]]:
    """Return for each generation which of its keys open a route: the admin's, the unnamed client's, and alice's."""
    found = []
    for generation in zip(ADMINS, CLIENTS, ALICES, strict=True):
        paths = ("/events?after=x", "/get_engine_status", "/get_engine_status")
        replies = [
            await http.get(path, headers={"x-api-key": key}) for path, key in zip(paths, generation, strict=True)
        ]
        found.append(tuple(reply.status_code != 401 for reply in replies))
    return found  # type: ignore[return-value]


async def test_a_gateway_takes_over_new_keys_without_a_restart_and_the_ones_before_them_stay_valid(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hive_keys, "LOOK_AGAIN_S", 0.01)
    yes, no = (True,) * 3, (False,) * 3
    async with played_hive(bus, keys=given(*write(tmp_path, 0))) as played:
        ring = played.gateway.key_ring
        following = asyncio.create_task(ring.follow())
        try:
            assert await opened(played.http) == [yes, no, no]
            write(tmp_path, 1)
            await until(lambda: ring.keys.admin == ADMINS[1] and ring.keys.client == CLIENTS[1])
            await until(lambda: ring.keys.clients["alice"].key == ALICES[1])
            assert await opened(played.http) == [yes, yes, no]
            for key in ALICES[:2]:
                assert played.gateway.clients.holder([(b"x-api-key", key.encode())]).name == "alice"
            write(tmp_path, 2)
            await until(lambda: ring.keys.admin == ADMINS[2] and ring.keys.client == CLIENTS[2])
            await until(lambda: ring.keys.clients["alice"].key == ALICES[2])
            assert await opened(played.http) == [no, yes, yes]
        finally:
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following


@pytest.mark.parametrize("text", ["", "short", f"{CLIENTS[0]}\n", f"{ADMINS[0]}\n{ADMINS[1]}\n{ADMINS[2]}\n"])
def test_keys_that_cannot_be_used_change_nothing(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    keys = given(*write(tmp_path, 0))
    ring = KeyRing(keys)
    (tmp_path / "admin").write_text(text)
    ring.read_again()
    assert ring.keys is keys
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("the keys stay as they were: ")
    assert not any(key in message for key in (*ADMINS, *CLIENTS))


def test_a_hive_that_needs_keys_does_not_open_itself_when_a_file_is_emptied(tmp_path: Path) -> None:
    write(tmp_path, 0)
    ring = KeyRing(given("--client-keys-file", str(tmp_path / "clients")))
    (tmp_path / "clients").write_text("{}")
    ring.read_again()
    assert ring.keys.for_clients


def test_a_variable_has_the_key_that_is_replaced_after_a_comma() -> None:
    keys = given(environment={"BOMBUS_ADMIN_KEY": f"{ADMINS[1]},{ADMINS[0]}", "BOMBUS_CLIENT_KEY": CLIENTS[1]})
    assert (keys.admins, keys.unnamed) == ((ADMINS[1], ADMINS[0]), (CLIENTS[1],))
    assert given(environment=keys.environment()) == keys
    assert opening(keys) == [*keys.admins]
    assert address("http://hive:1", None, keys.environment())[1] == ADMINS[1]
    with pytest.raises(Refused, match="There are 3 admin keys") as refused:
        given(environment={"BOMBUS_ADMIN_KEY": ",".join(ADMINS)})
    assert refused.value.code == Code.BAD_CONFIG


def test_processes_of_a_supervisor_read_the_files_and_get_no_key_from_them(tmp_path: Path) -> None:
    keys = given(*write(tmp_path, 1))
    cluster = Cluster.model_validate({"engines": {"main": {"trainer": {}}}})
    found = services(Layout(cluster=cluster, keys=keys, web=True), "nats://nowhere")
    for each in found:
        has_files = [str(tmp_path / name) in each.command for name in ("admin", "client", "clients")]
        assert has_files == [each.kind in ("gateway", "web")] * 3, each.kind
        assert not {*ADMINS, *CLIENTS} & {*each.environment.values()}


def test_init_rotates_the_keys_and_a_hive_reads_them_from_their_files(tmp_path: Path) -> None:
    def files() -> list[list[str]]:
        return [(tmp_path / "main" / f"{name}.key").read_text().split() for name in ("admin", "client")]

    def variables(user: BusUser) -> list[str]:
        found = read_environment(tmp_path, "main", user)
        return [found["BOMBUS_ADMIN_KEY"], found["BOMBUS_CLIENT_KEY"]]

    generations = []
    for rotate in (False, True, True):
        make_credentials(tmp_path, "main", rotate=rotate)
        generations.append([keys[0] for keys in files()])
        assert variables(BusUser.GATEWAY) == [",".join(keys) for keys in files()]
        assert variables(BusUser.OPERATOR) == generations[-1]
    assert files() == [[new, old] for new, old in zip(generations[2], generations[1], strict=True)]
    assert len({key for keys in generations for key in keys}) == 6
    assert all(path.stat().st_mode & 0o77 == 0 for path in (tmp_path / "main").iterdir())

    cluster = Cluster.model_validate({"credentials": str(tmp_path), "engines": {"main": {}}})
    parser = argparse.ArgumentParser()
    add_key_arguments(parser)
    arguments = parser.parse_args([])
    arguments.host = "0.0.0.0"
    found = keys_for(arguments, up.own_variables(cluster, arguments))
    assert [list(found.admins), list(found.unnamed)] == files()
    assert found.files.admin == tmp_path / "main" / "admin.key"
