"""The address by which a service says that others reach it."""

import socket
from contextlib import closing

import pytest

from bombus.bus import Bus
from bombus.machine.advertising import url_for_others, url_of
from bombus.machine.process import listen


@pytest.mark.parametrize(
    ("url", "own", "advertised"),
    [
        ("http://0.0.0.0:8000", "192.0.2.7", "http://192.0.2.7:8000"),
        ("http://[::]:8000", "192.0.2.7", "http://192.0.2.7:8000"),
        ("http://[::]:8000", "2001:db8::7", "http://[2001:db8::7]:8000"),
        ("http://0.0.0.0:8000", "worker-3", "http://worker-3:8000"),
        ("https://0.0.0.0/replica", "192.0.2.7", "https://192.0.2.7/replica"),
        ("http://0.0.0.0:8000", "127.0.0.1", ""),
        ("http://[::]:8000", "::1", ""),
        ("http://[::]:8000", "fe80::1", ""),
        ("http://0.0.0.0:8000", "2001:db8::7", ""),
        ("http://127.0.0.1:8000", "192.0.2.7", "http://127.0.0.1:8000"),
        ("http://replica.example:8000", "127.0.0.1", "http://replica.example:8000"),
    ],
)
def test_what_listens_at_every_address_is_reached_at_that_of_its_machine(url: str, own: str, advertised: str) -> None:
    assert url_for_others(url, own) == advertised


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_socket_has_the_url_where_it_listens(host: str) -> None:
    with closing(listen(host, 0)) as bound:
        assert url_of(bound) == f"http://{host}:{bound.getsockname()[1]}"


async def test_the_bus_shows_from_which_address_it_is_reached(bus: Bus) -> None:
    assert await bus.own_address() == "127.0.0.1"
    assert url_for_others("http://0.0.0.0:1", await bus.own_address()) == ""
    assert url_for_others("http://0.0.0.0:1", socket.gethostname()) == f"http://{socket.gethostname()}:1"
