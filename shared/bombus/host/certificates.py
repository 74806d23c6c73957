"""What checks the certificates of servers, once for a process."""

import ssl
from functools import cache


@cache
def certificates(trusts_environment: bool) -> ssl.SSLContext:
    """Return what checks certificates: those of httpx, unless the environment names others and may be trusted.

    An HTTP client makes one of its own, unless it is given one, and reading all root certificates takes 25 to 60 ms.
    """
    import httpx

    return httpx.create_ssl_context(trust_env=trusts_environment)
