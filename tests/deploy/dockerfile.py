"""What deploy/Dockerfile says, as tests and pages need it."""

import json
import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "deploy/Dockerfile").read_text().replace("\\\n", " ")
STAGES: dict[str, str] = dict(re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM |\Z)", TEXT, re.MULTILINE | re.DOTALL))
TARGETS = ("coordinator", "gateway", "environment", "trainer", "inference", "all")


def command(target: str) -> list[str]:
    """Return what an image runs by default."""
    (found,) = re.findall(r"^CMD (\[.*\])$", STAGES[target], re.MULTILINE)
    words: list[str] = json.loads(found)
    return words


def health_url(target: str) -> str:
    (found,) = re.findall(r"^HEALTHCHECK .* CMD (\[.*\])$", STAGES[target], re.MULTILINE)
    program, url = json.loads(found)
    assert program == "healthy"
    return str(url)


def installed(target: str) -> tuple[list[str], list[str]]:
    """Return the extras that an image has, and the packages of these that are left out."""
    (words,) = re.findall(r"install\.sh extras (.*)$", STAGES[f"{target}-build"], re.MULTILINE)
    names = shlex.split(words)
    return [name for name in names if name[0] != "-"], [name[1:] for name in names if name[0] == "-"]
