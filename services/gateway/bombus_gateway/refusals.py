"""Headers that every API adds to the response to a refused request."""

from collections.abc import Mapping

from bombus.errors import Code, Refused

RETRY_AFTER = {"retry-after": "1"}
ERROR_HEADERS = {401: {"www-authenticate": "Bearer"}, 429: RETRY_AFTER, 503: RETRY_AFTER}  # by status


class RateLimited(Refused):
    """A key has reached a limit. The request can be sent again after `retry_after_s`."""

    def __init__(self, why: str, retry_after_s: int) -> None:
        super().__init__(Code.QUOTA, why)
        self.retry_after_s = retry_after_s


def headers_of(error: Refused) -> Mapping[str, str]:
    """Return the headers of the response that reports an error."""
    if isinstance(error, RateLimited):
        return {"retry-after": str(error.retry_after_s)}
    return ERROR_HEADERS.get(error.status, {})
