"""The bus over TLS, with certificates of `bombus init --tls`, on a real nats-server."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from bombus.bus import Bus, Reader
from bombus.bus_address import VARIABLE, BusUser
from bombus.cli import main
from bombus.commands.init_tls import AUTHORITY, CERTIFICATE, make_certificate
from bombus.errors import BusUnavailable
from bombus.host.credentials import read_environment
from bombus.machine import certificates
from tests.bus.guarded_server import guarded_server
from tests.bus.test_bulk import MANY, fill
from tests.conftest import SMALL_STREAMS
from tests.patience import PATIENCE_S

HIVE = "main"


@contextmanager
def trusting(folder: Path | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the clients of this process trust the authority of a folder with credentials while the block runs."""
    caches = (certificates.trusted, certificates.certificates)
    with monkeypatch.context() as patched:
        authority = None if folder is None else folder / AUTHORITY
        for name in (certificates.TRUST_VARIABLE, "SSL_CERT_FILE"):  # the second is for SDKs of others
            patched.delenv(name, raising=False)
            if authority is not None and authority.exists():
                patched.setenv(name, str(authority))
        for cached in caches:
            cached.cache_clear()
        yield
    for cached in caches:
        cached.cache_clear()


def address(folder: Path, user: BusUser = BusUser.OPERATOR) -> str:
    return read_environment(folder, HIVE, user)[VARIABLE]


async def test_streams_are_written_and_read_in_bulk_over_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "bombus.bus.reader")
    with guarded_server(tmp_path, HIVE, tls=["localhost"]), trusting(tmp_path, monkeypatch):
        assert address(tmp_path).startswith("tls://main.operator.1:")
        async with await Bus.connect(address(tmp_path), HIVE) as bus, asyncio.timeout(PATIENCE_S):
            await bus.ensure_streams(SMALL_STREAMS)
            await fill(bus, [b"x" * 500] * MANY)
            async with Reader(bus, bus.subjects.calls_stream, 1) as reader:
                found = 0
                while found < MANY:
                    found += len(await reader.read())
    assert f"read 1 to {MANY} in bulk" in caplog.text
    assert "eof_received" not in caplog.text


async def test_a_server_that_another_authority_has_signed_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    make_certificate(theirs, ["localhost"])
    with guarded_server(ours, HIVE, tls=["localhost"]):
        for trusted in (theirs, None):
            with trusting(trusted, monkeypatch), pytest.raises(BusUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
                await Bus.connect(address(ours), HIVE, timeout_s=2)


async def test_a_server_under_a_name_that_its_certificate_lacks_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with guarded_server(tmp_path, HIVE, tls=["localhost"]), trusting(tmp_path, monkeypatch):
        elsewhere = address(tmp_path).replace("@127.0.0.1:", "@127.0.0.2:")
        with pytest.raises(BusUnavailable):
            await Bus.connect(elsewhere, HIVE, timeout_s=2)
        async with await Bus.connect(address(tmp_path).replace("@127.0.0.1:", "@localhost:"), HIVE):
            pass


async def test_no_login_is_sent_to_a_server_that_does_not_offer_tls() -> None:
    received = bytearray()

    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x","version":"2.10.0","max_payload":1048576,"headers":true}\r\n')
        received.extend(await reader.read(1 << 16))
        writer.close()

    async with await asyncio.start_server(plain, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(BusUnavailable, match="does not speak TLS"):
            await Bus.connect(f"tls://user:secret-word@127.0.0.1:{port}", HIVE, timeout_s=1)
    assert b"secret-word" not in received


def test_a_client_that_does_not_encrypt_is_refused(tmp_path: Path) -> None:
    with guarded_server(tmp_path, HIVE, tls=["localhost"]):
        where = urlsplit(address(tmp_path))
        with socket.create_connection((where.hostname, where.port or 0), timeout=PATIENCE_S) as connection:
            assert connection.recv(1 << 16).startswith(b"INFO ")
            connection.sendall(b'CONNECT {"verbose":true}\r\nPING\r\n')
            said = bytearray()
            try:
                while data := connection.recv(1 << 16):
                    said += data
            except ConnectionResetError:
                pass
        assert b"PONG" not in said


async def test_a_renewed_certificate_is_served_once_the_server_reloads_and_the_authority_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with guarded_server(tmp_path, HIVE, tls=["localhost"]) as server, trusting(tmp_path, monkeypatch):
        async with await Bus.connect(address(tmp_path), HIVE) as before:
            first = (tmp_path / CERTIFICATE).read_bytes()
            authority = (tmp_path / AUTHORITY).read_bytes()
            assert main(["init", str(tmp_path)]) == 0
            assert (tmp_path / CERTIFICATE).read_bytes() == first
            assert main(["init", str(tmp_path), "--rotate"]) == 0
            second = (tmp_path / CERTIFICATE).read_bytes()
            assert second != first
            server.reload()
            async with await Bus.connect(address(tmp_path), HIVE) as after:
                where = after.client.connected_url
                shown = await asyncio.to_thread(_certificate_of, where.hostname, where.port)
            assert shown == _pem(second)
            assert (tmp_path / AUTHORITY).read_bytes() == authority
            assert before.client.is_connected, "its connection goes on"


def test_a_certificate_is_for_all_names_that_were_ever_given(tmp_path: Path) -> None:
    assert main(["init", str(tmp_path), "--tls", "one", "10.0.0.1"]) == 0
    assert main(["init", str(tmp_path), "--tls", "two", "fd00::2"]) == 0
    context = ssl.create_default_context(cafile=tmp_path / AUTHORITY)
    made = ssl._ssl._test_decode_cert(str(tmp_path / CERTIFICATE))  # type: ignore[attr-defined]
    names = {value for _, value in made["subjectAltName"]}
    assert {"one", "two", "localhost", "10.0.0.1", "127.0.0.1"} < names
    assert "FD00:0:0:0:0:0:0:2" in names
    assert len(context.get_ca_certs()) == 1


def _certificate_of(host: str, port: int) -> bytes:
    """Return the certificate that a NATS server shows."""
    context = ssl.create_default_context(cafile=None)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection((host, port), timeout=PATIENCE_S) as plain:
        plain.recv(1 << 16)
        with context.wrap_socket(plain) as encrypted:
            return encrypted.getpeercert(binary_form=True) or b""


def _pem(combined: bytes) -> bytes:
    text = combined.decode()
    return ssl.PEM_cert_to_DER_cert(text[text.index("-----BEGIN CERTIFICATE") :])
