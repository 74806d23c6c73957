"""Times as users write them: a date, a time on the log's last day, or an offset from its end or its start."""

import re
import time
from datetime import datetime
from functools import lru_cache

from bombus.replay.running import BadUsage

SECOND = 1_000_000_000
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_RELATIVE = re.compile(r"([+-]?)(\d+(?:\.\d+)?)([smhd])")
_CLOCK = re.compile(r"\d{1,2}:\d\d(:\d\d(\.\d+)?)?")


def moment(text: str, start_ns: int, end_ns: int) -> int:
    """Return the time that `text` denotes, in nanoseconds since the epoch.

    It can be `-10m` (before the end), `+30s` (after the start), `14:03:20` (on the last day) or an ISO time. `10m`
    means `-10m`, which a command line would parse as an option. Times without a zone are local. Raises `BadUsage` for
    any other text.
    """
    relative = _RELATIVE.fullmatch(text)
    if relative:
        span_ns = int(float(relative[2]) * _UNITS[relative[3]] * SECOND)
        return start_ns + span_ns if relative[1] == "+" else end_ns - span_ns
    try:
        if _CLOCK.fullmatch(text):
            day = datetime.fromtimestamp(end_ns / SECOND).date().isoformat()
            return _ns(datetime.fromisoformat(f"{day}T{text.zfill(len(text) + (text[1] == ':'))}"))
        return _ns(datetime.fromisoformat(text))
    except ValueError:
        raise BadUsage(
            f"{text!r} is not a time: use 2026-01-31T14:03:20, 14:03:20 (on the log's last day), 10m (before its end) "
            "or +30s (after its start)"
        ) from None


def _ns(moment: datetime) -> int:
    return int(moment.timestamp() * 1_000_000) * 1_000


def clock(at_ns: int) -> str:
    """Format a time as `14:03:20.125`, in the local zone."""
    return f"{_local(at_ns // SECOND)[11:]}.{at_ns % SECOND // 1_000_000:03d}"


def date(at_ns: int) -> str:
    """Format a time as the date `2026-01-31`, in the local zone."""
    return _local(at_ns // SECOND)[:10]


@lru_cache(maxsize=64)  # a log may have thousands of events in one second
def _local(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
