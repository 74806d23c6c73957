"""Format numbers for people, and make text from outside fit on one line."""


def seconds_between(start_ns: int, end_ns: int) -> float:
    """Return the seconds between two times, or 0 if the second time is earlier: the clocks of two machines may
    differ."""
    return max(0, end_ns - start_ns) / 1e9


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, which is plural unless the number is 1: `1 episode`, `0 episodes`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def duration(seconds: float) -> str:
    """Format a duration in at most two units: `4.2 s`, `3 m 05 s`, `7 h 12 m`, `3 d 04 h`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} m {total % 60:02d} s"
    if total < 86_400:
        return f"{total // 3600} h {total % 3600 // 60:02d} m"
    return f"{total // 86_400} d {total % 86_400 // 3600:02d} h"


def byte_size(size: int) -> str:
    """Format a number of bytes in units of a thousand: `512 B`, `43 kB`, `1.2 MB`, `988 MB`."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.1f} {unit}" if value < 9.95 and unit not in ("B", "kB") else f"{value:.0f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def one_line(text: str) -> str:
    """Make text from outside safe for a terminal: a single line without control or escape characters."""
    return "".join(char if char.isprintable() else " " for char in text).strip()
