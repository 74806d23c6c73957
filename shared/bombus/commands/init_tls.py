"""The certificates of `bombus init --tls`: an authority of the folder's own, and one certificate for all its services.

They are made by `openssl`. The authority's key is needed for nothing but new certificates, and may be kept elsewhere.
"""

import ipaddress
import shutil
import socket
import subprocess
from collections.abc import Iterable
from pathlib import Path

from bombus.errors import Code, Refused
from bombus.machine.certificates import TRUST_VARIABLE, VARIABLE
from bombus.private import private_folder, write_private

AUTHORITY, AUTHORITY_KEY, CERTIFICATE = "ca.pem", "ca-key.pem", "server.pem"
TLS_CONFIG = "tls.conf"
AUTHORITY_DAYS, DAYS = 3650, 398
RENEWED_S = 60 * 86_400  # a certificate that ends sooner is made anew
_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-sha256")


def make_certificate(folder: Path, names: Iterable[str], renew: bool = False) -> None:
    """Make a certificate for these names and addresses, for those of the one before, and for this machine's.

    What exists is kept if it has them all and is not about to end, unless `renew` is given. Raises `Refused`.
    """
    private_folder(folder)
    authority, key, certificate = folder / AUTHORITY, folder / AUTHORITY_KEY, folder / CERTIFICATE
    if not authority.exists():
        own = ("-subj", "/CN=bombus hives", "-addext", "keyUsage=critical,keyCertSign,cRLSign")
        _openssl("req", "-x509", *_KEY, "-keyout", key, "-out", authority, "-days", AUTHORITY_DAYS, *own)
    known = _names_of(certificate) if certificate.exists() else set()
    wanted = known | {*names, "localhost", "127.0.0.1", "::1", socket.gethostname()}
    if renew or wanted != known or not _lasts(certificate):
        made = folder / ".server-key.pem"
        alternatives = ",".join(f"{'IP' if _is_address(name) else 'DNS'}:{name}" for name in sorted(wanted))
        extensions = (
            f"subjectAltName={alternatives}",
            "basicConstraints=critical,CA:FALSE",
            "keyUsage=critical,digitalSignature",
            "extendedKeyUsage=serverAuth,clientAuth",  # NATS servers are clients of each other
        )
        signed = _openssl(
            *("req", "-x509", "-CA", authority, "-CAkey", key, *_KEY, "-keyout", made, "-days", DAYS),
            *("-subj", "/CN=bombus", *(word for each in extensions for word in ("-addext", each))),
        )
        write_private(certificate, made.read_text() + signed)
        made.unlink()
    path, trusted = certificate.absolute(), authority.absolute()
    write_private(
        folder / TLS_CONFIG, f'tls {{ cert_file: "{path}", key_file: "{path}", ca_file: "{trusted}", timeout: 5 }}\n'
    )


def tls_variables(folder: Path) -> dict[str, str]:
    """Return the variables by which a service trusts the folder's authority and answers with its certificate."""
    if not (folder / AUTHORITY).exists():
        return {}
    return {TRUST_VARIABLE: str((folder / AUTHORITY).absolute()), VARIABLE: str((folder / CERTIFICATE).absolute())}


def _names_of(certificate: Path) -> set[str]:
    shown = _openssl("x509", "-in", certificate, "-noout", "-ext", "subjectAltName")
    found = (each.strip().partition(":")[2] for each in shown.partition("\n")[2].split(","))
    return {str(ipaddress.ip_address(name)) if _is_address(name) else name for name in found if name}


def _lasts(certificate: Path) -> bool:
    try:
        _openssl("x509", "-in", certificate, "-noout", "-checkend", RENEWED_S)
    except Refused:
        return False
    return True


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _openssl(*words: object) -> str:
    if shutil.which("openssl") is None:
        raise Refused(Code.BAD_CONFIG, "--tls needs the program openssl, version 3: install it, or leave --tls out")
    done = subprocess.run(["openssl", *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        raise Refused(Code.BAD_CONFIG, f"openssl {words[0]} failed: {done.stderr.strip()[-300:]}")
    return done.stdout
