"""The TLS context shared by the HTTP clients of a process."""

import ssl
from functools import cache


@cache
def certificates(trusts_environment: bool) -> ssl.SSLContext:
    """Return the TLS context for a client. It has httpx's root certificates or, if the environment is trusted, any
    others that the environment names.

    The context is shared because reading all root certificates takes 25 to 60 ms for each client.
    """
    import httpx

    return httpx.create_ssl_context(trust_env=trusts_environment)
