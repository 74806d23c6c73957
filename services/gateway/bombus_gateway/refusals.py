"""Headers that every API adds to the response to a refused request."""

RETRY_AFTER = {"retry-after": "1"}
ERROR_HEADERS = {401: {"www-authenticate": "Bearer"}, 429: RETRY_AFTER, 503: RETRY_AFTER}  # by status
