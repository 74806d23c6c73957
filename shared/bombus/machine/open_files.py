"""Logs when a process cannot open any more files. A server that cannot accept connections has no other way to report
it."""

import asyncio
import errno
import logging
import os
import resource

log = logging.getLogger(__name__)

LOOK_S = 1.0


async def watch(every_s: float = LOOK_S) -> None:
    """Check every `every_s` seconds whether this process can open a file, and log when it no longer can and when it can
    again."""
    is_short = False
    while True:
        why = _why_none()
        if why and not is_short:
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            log.error(
                "%s: no connection can be accepted or made, and no file opened, until some are closed. The limit of "
                "this process is %d: raise it with `ulimit -n` or systemd's LimitNOFILE",
                why,
                limit,
            )
        elif is_short and not why:
            log.warning("files and connections can be opened again")
        is_short = bool(why)
        await asyncio.sleep(every_s)


def _why_none() -> str:
    """Return why no file can be opened, or "" if files can be opened."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return os.strerror(error.errno)
    return ""
