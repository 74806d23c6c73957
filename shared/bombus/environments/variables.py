"""Read numbers from environment variables, such as NUM_GENERATIONS and MAX_TURNS."""

from collections.abc import Mapping

from bombus.errors import Code, Refused


def number_of(variables: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    """Return the number in a variable, or `default` if it is unset or blank. Raises `Refused` if the value is not a
    number from `least` to `most`."""
    text = variables.get(name, "").strip()
    if not text:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 20) or not least <= int(text) <= most:
        raise Refused(Code.BAD_CONFIG, f"{name} is {text[:40]!r}: it must be a number from {least} to {most}")
    return int(text)
