"""Passwords of a bus: no process has one in its command line, which every user of the machine can read."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
from pydantic import ValidationError

from bombus.bus.connection import Bus
from bombus.bus.server import find_server
from bombus.bus_address import bus_arguments, bus_environment, has_login, without_login
from bombus.commands.web import SEEN_AT
from bombus.config.cluster import Cluster
from bombus.config.parts import InferencePart
from bombus.errors import Refused
from bombus.host.layout import Layout, services
from bombus.machine.process import free_port
from bombus_inference.settings import OpenAISettings

PASSWORD = "a-password-for-tests"


@pytest.mark.parametrize(
    ("url", "bare"),
    [
        (f"nats://me:{PASSWORD}@bus:4222", "nats://bus:4222"),
        (f"nats://{PASSWORD}@bus:4222", "nats://bus:4222"),
        (f"me:{PASSWORD}@bus:4222", "bus:4222"),
        (f"tls://me:{PASSWORD}@a:1,nats://me:{PASSWORD}@b:2", "tls://a:1,nats://b:2"),
        (f"nats://a:1,me:{PASSWORD}@b:2", "nats://a:1,b:2"),
        (f"nats://me:@{PASSWORD}@bus:4222", "nats://bus:4222"),
        ("nats://bus:4222", "nats://bus:4222"),
    ],
)
def test_the_login_of_a_bus_is_found_and_removed(url: str, bare: str) -> None:
    assert has_login(url) == (url != bare)
    assert without_login(url) == bare
    assert bus_arguments(url) == (() if url != bare else ("--nats", bare))
    assert bus_environment(url) == {"BOMBUS_NATS": url}


@pytest.mark.parametrize(
    "url",
    [
        *(f"nats://me:{PASSWORD}{sign}x@bus:4222" for sign in "/?#,"),
        f"nats://{PASSWORD}/x@bus:4222",
        "nats://bus:port",
        "nats://bus:99999",
        "nats://",
        "",
        "nats://a:1,",
    ],
)
async def test_an_address_that_cannot_be_read_is_refused_and_its_password_is_not_shown(url: str) -> None:
    with pytest.raises(Refused, match="the address of the bus cannot be read") as refused:
        await Bus.connect(url, "main")
    assert PASSWORD not in str(refused.value)


def test_no_planned_process_has_the_password_in_its_command() -> None:
    kinds: tuple[dict[str, object], ...] = (
        {},
        {"backend": "vllm"},
        {"backend": "openai", "url": "http://gpu7:8000", "api_key_env": "SERVER_KEY"},
    )
    engine = {"trainer": {"backend": "verl", "processes": 2}, "inference": kinds}
    cluster = Cluster.model_validate({"engines": {"main": engine}})
    url = f"nats://me:{PASSWORD}@bus:4222"
    found = services(Layout(cluster=cluster), url)
    assert len(found) == 6
    for service in found:
        assert PASSWORD not in " ".join(service.command)
        assert PASSWORD not in str(service)
        assert service.environment["BOMBUS_NATS"] == url


def test_a_login_in_the_url_of_a_foreign_server_is_refused() -> None:
    for model in (partial(InferencePart, backend="openai"), OpenAISettings):
        assert model(url="http://gpu7:8000/a@b").url
        with pytest.raises(ValidationError, match="url"):
            model(url=f"http://me:{PASSWORD}@gpu7:8000")


@pytest.fixture
def guarded_bus(tmp_path: Path) -> Iterator[str]:
    """Run a nats-server that wants a password; yield its URL with it."""
    port = free_port()
    config = tmp_path / "nats.conf"
    config.write_text(
        f'port: {port}\nhost: "127.0.0.1"\nmax_payload: 8MB\njetstream {{ store_dir: "{tmp_path}/js" }}\n'
        f"authorization {{ user: me, password: {PASSWORD} }}\n"
    )
    server = subprocess.Popen([str(find_server()), "--config", str(config)], stderr=subprocess.DEVNULL)
    yield f"nats://me:{PASSWORD}@127.0.0.1:{port}"
    server.terminate()
    server.wait(20)


def test_a_hive_on_a_bus_with_a_password_shows_it_to_nobody(tmp_path: Path, guarded_bus: str) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(f"nats: {guarded_bus}\ngateway: {{port: {free_port()}}}\nengines: {{main: {{}}}}\n")
    data = tmp_path / "data"
    command = [sys.executable, "-m", "bombus", "up", "--config", str(cluster), "--data-dir", str(data)]
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log) as up:
        try:
            assert up.stdout is not None
            shown = [up.stdout.readline().decode() for _ in range(2)]
            assert shown[0].startswith(SEEN_AT)
            assert shown[1].startswith("ready http://"), (tmp_path / "log").read_text()
            family = [psutil.Process(up.pid), *psutil.Process(up.pid).children(recursive=True)]
            assert len(family) == 4, "with coordinator, gateway and page"
            assert not any(PASSWORD in word for process in family for word in process.cmdline())
            status = [sys.executable, "-m", "bombus", "status"]
            environment = {**os.environ, "BOMBUS_NATS": guarded_bus}
            told = subprocess.run(status, env=environment, capture_output=True, text=True, timeout=60)
            assert told.returncode == 0, told.stderr
            assert PASSWORD not in "".join(shown) + told.stdout + (tmp_path / "log").read_text()
        finally:
            up.send_signal(signal.SIGINT)
            up.wait(60)


def test_a_bus_that_does_not_let_us_in_is_named_without_its_password(guarded_bus: str) -> None:
    wrong = guarded_bus.replace(PASSWORD, "a-wrong-password")
    told = subprocess.run(
        [sys.executable, "-m", "bombus", "status"],
        env={**os.environ, "BOMBUS_NATS": wrong}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert told.returncode == 1
    assert "user and password right" in told.stderr
    assert "a-wrong-password" not in told.stderr
