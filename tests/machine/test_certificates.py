"""Servers of HTTP with a certificate, and clients that trust its authority."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from bombus.commands.init_tls import CERTIFICATE, make_certificate
from bombus.errors import Refused
from bombus.machine import certificates
from bombus.machine.http_server import http_server
from bombus.machine.process import listen
from tests.bus.test_tls import trusting
from tests.patience import PATIENCE_S


async def hello(scope: dict[str, Any], receive: Any, send: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": scope["scheme"].encode()})


async def test_a_server_answers_with_the_certificate_that_is_in_its_file_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_certificate(tmp_path, ["localhost"])
    monkeypatch.setenv(certificates.VARIABLE, str(tmp_path / CERTIFICATE))
    monkeypatch.setattr(certificates, "LOOK_S", 0.01)
    with trusting(tmp_path, monkeypatch), listen("127.0.0.1", 0) as bound:
        port = bound.getsockname()[1]

        async def serial(context: object) -> bytes:
            async with (
                httpx.AsyncClient(verify=context) as client,  # type: ignore[arg-type]
                client.stream("GET", f"https://localhost:{port}/") as answer,
            ):
                assert (await answer.aread()) == b"https"
                shown = answer.extensions["network_stream"].get_extra_info("ssl_object")
                return bytes(shown.getpeercert(binary_form=True))

        async with http_server(hello, bound, drain_s=0):
            first = await serial(certificates.certificates(True))
            (tmp_path / CERTIFICATE).with_name("new").write_text("not a certificate")
            (tmp_path / "new").replace(tmp_path / CERTIFICATE)
            await asyncio.sleep(0)
            assert await serial(certificates.trusted()) == first, "a file that cannot be read changes nothing"
            (tmp_path / CERTIFICATE).unlink()
            make_certificate(tmp_path, ["localhost"])
            async with asyncio.timeout(PATIENCE_S):
                while await serial(certificates.trusted()) == first:
                    await asyncio.sleep(0.01)
            with pytest.raises(httpx.TransportError):
                async with httpx.AsyncClient() as plain:
                    await plain.get(f"http://localhost:{port}/")
            with trusting(None, monkeypatch), pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await serial(certificates.certificates(True))


async def test_a_server_whose_certificate_cannot_be_read_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(certificates.VARIABLE, str(tmp_path / "nothing"))
    with listen("127.0.0.1", 0) as bound, pytest.raises(Refused, match="BOMBUS_TLS names no PEM file"):
        async with http_server(hello, bound, drain_s=0):
            pass
