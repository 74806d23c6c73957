"""Log formats: lines for a terminal, or JSON with `BOMBUS_LOG=json`.

Ids are passed as `extra={"episode": ...}`, and those listed in FIELDS are printed. Logging is not on a hot path,
because services log changes, not every call.

A message and its fields are one line, even if clients have put control characters into them: these characters are
escaped. The lines of a traceback are indented, so that none of them can be mistaken for a separate entry.
"""

import json
import logging
import os
import re
import sys
import time
from collections.abc import Mapping
from types import TracebackType

from bombus.terminal import escaped, json_escaped

FIELDS = ("hive", "engine", "run", "episode", "call", "step", "version", "replica", "client", "epoch", "trace")
FORMAT_VARIABLE = "BOMBUS_LOG"
INDENT = "    "
_PLAIN = re.compile(r'[^\s"=]+')
_COLOURS = {logging.WARNING: "\x1b[33m", logging.ERROR: "\x1b[31m", logging.CRITICAL: "\x1b[31;1m"}


class _Context(logging.Filter):
    """Adds to every record the fields that apply to the whole process."""

    def __init__(self, service: str, constants: Mapping[str, str]) -> None:
        super().__init__()
        self._service = service
        self._constants = constants

    def filter(self, record: logging.LogRecord) -> bool:
        record.service = self._service
        for name, value in self._constants.items():
            if not hasattr(record, name):
                setattr(record, name, value)
        return True


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {name: getattr(record, name) for name in FIELDS if getattr(record, name, "") not in ("", None)}


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "service": getattr(record, "service", ""),
            "message": record.getMessage(),
            "logger": record.name,
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json_escaped(json.dumps(line, default=str))


class LineFormatter(logging.Formatter):
    """Formats a record as `12:30:01 trainer      step 3 done  engine=main step=3`."""

    def __init__(self, colour: bool) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = " ".join(f"{name}={_quoted(value)}" for name, value in _fields(record).items() if name != "hive")
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        line = f"{clock} {getattr(record, 'service', ''):<12} {level}{record.getMessage()}"
        if fields:
            line += f"  {fields}"
        line = escaped(line)
        if record.exc_info:
            traceback = self.formatException(record.exc_info).split("\n")
            line += "".join(f"\n{INDENT}{escaped(part)}" for part in traceback)
        colour = _COLOURS.get(record.levelno, "") if self._colour else ""
        return f"{colour}{line}\x1b[0m" if colour else line


def _quoted(value: object) -> str:
    """Return a field's value, quoted if it could be mistaken for several fields."""
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def configure(service: str, level: str = "info", **constants: str) -> None:
    """Send this process's logs to stderr. `constants` (such as `hive`) are added to every line."""
    handler = logging.StreamHandler(sys.stderr)
    as_json = os.environ.get(FORMAT_VARIABLE, "") == "json"
    handler.setFormatter(JsonFormatter() if as_json else LineFormatter(colour=sys.stderr.isatty()))
    handler.addFilter(_Context(service, constants))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("httpx", "httpcore", "nats", "uvicorn.access", "transformers", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    sys.excepthook = _log_crash


def _log_crash(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Log the error that ends this process. It is escaped like all other entries, since its text may come from
    outside."""
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
    else:
        logging.getLogger(__name__).critical("this process ends", exc_info=(kind, error, traceback))
