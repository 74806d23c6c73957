"""TLS: whom the clients of a process trust, and the certificate with which its servers answer.

`$BOMBUS_CA` names the authority of a hive's certificates, which its clients and services trust. Servers answer with
TLS where `$BOMBUS_TLS` names a file with a certificate and its key, and take a replaced file for new connections.
"""

import asyncio
import logging
import os
import ssl
from functools import cache

from bombus.errors import Code, Refused

log = logging.getLogger(__name__)

VARIABLE = "BOMBUS_TLS"
TRUST_VARIABLE = "BOMBUS_CA"
LOOK_S = 10.0


@cache
def certificates(trusts_environment: bool) -> ssl.SSLContext:
    """Return the TLS context for a client. It has httpx's root certificates or, if the environment is trusted, any
    others that the environment names, and in either case the hive's authority.

    The context is shared because reading all root certificates takes 25 to 60 ms for each client.
    """
    import httpx

    context = httpx.create_ssl_context(trust_env=trusts_environment)
    if authority := os.environ.get(TRUST_VARIABLE):
        context.load_verify_locations(authority)
    return context


@cache
def trusted() -> ssl.SSLContext:
    """Return the TLS context for a connection within a hive, to the bus or a replica. It trusts the hive's authority
    alone if there is one, or the usual ones."""
    return ssl.create_default_context(cafile=os.environ.get(TRUST_VARIABLE))


def scheme() -> str:
    """Return how the servers of this process are reached: `https` or `http`."""
    return "https" if os.environ.get(VARIABLE) else "http"


def served() -> ssl.SSLContext | None:
    """Return a TLS context for a server, or None if it answers without TLS. Raises `Refused` for an unusable file."""
    if not (path := os.environ.get(VARIABLE)):
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(path)
    except (OSError, ssl.SSLError) as error:
        raise Refused(
            Code.BAD_CONFIG,
            f"${VARIABLE} names no PEM file with a certificate and its key ({path}): {error}",
        ) from error
    return context


async def keep_current(context: ssl.SSLContext | None) -> None:
    """Load the file of `served` again whenever it is replaced, until cancelled."""
    path, known = os.environ.get(VARIABLE, ""), 0
    while context is not None:
        try:
            changed = os.stat(path).st_mtime_ns
            if known and changed != known:
                context.load_cert_chain(path)
                log.info("new connections get the certificate that is in %s now", path)
            known = changed
        except (OSError, ssl.SSLError) as error:
            log.warning("the certificate in %s cannot be read, and stays as it was: %s", path, error)
        await asyncio.sleep(LOOK_S)
