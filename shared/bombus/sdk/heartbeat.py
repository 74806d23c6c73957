"""A client's heartbeat: tells the hive that the client's process is alive, and aborts its open episodes at a clean
exit."""

import atexit
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from bombus.sdk import transport
from bombus.sdk.claimed import GIVE_BACK_S, ClaimedEpisodes, Send
from bombus.sdk.core import finished
from bombus.sdk.requests import NoReply, ServerReply, ServerRequest

THREAD = "bombus-heartbeat"
BEAT_S = 3.0
AGAIN_S = 1.0  # pause after a beat that did not reach the hive
BEATS = 5  # minimum number of beats within the silence after which the hive considers the client dead


class Heartbeat:
    """Sends a request every few seconds while a client has any open episodes.

    The heartbeat has its own thread, so that it continues even if an agent blocks the client's thread or loop. The
    thread ends with the client, even if the client is garbage-collected without having been closed.
    """

    def __init__(self, claimed: ClaimedEpisodes, options: Mapping[str, Any]) -> None:
        self._claimed = claimed
        self._options = options
        self._every_s = BEAT_S
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        _all.add(self)

    def begin(self, silence_s: float) -> None:
        """Start beating for a hive that considers the client dead after `silence_s` seconds without a sign of life."""
        with self._lock:
            self._every_s = min(self._every_s, silence_s / BEATS)
            if self._thread is not None and self._thread.is_alive():  # a forked process has no thread yet
                return
            over = self._over
            arguments = (weakref.ref(self, lambda _: over.set()), over, self._options)
            self._thread = threading.Thread(target=_beat, args=arguments, name=THREAD, daemon=True)
            self._thread.start()

    def beat(self, http: httpx.Client) -> float:
        """Tell the hive that the client is alive, if it has open episodes. Return the seconds until the next beat."""
        is_heard = not self._claimed.open() or finished(self._claimed.touch_client(self._every_s, _by(http)))
        return self._every_s if is_heard else min(self._every_s, AGAIN_S)

    def end(self) -> None:
        """Stop, and abort the open episodes. In a fork of the client's process, the episodes are left alone."""
        self._over.set()
        if self._process == os.getpid() and (episodes := self._claimed.open()):
            with httpx.Client(**self._options) as http:
                finished(self._claimed.give_up(episodes, _by(http)))


_all: "weakref.WeakSet[Heartbeat]" = weakref.WeakSet()


@atexit.register
def _end_at_exit() -> None:
    """End the heartbeats of clients that were not closed."""
    end_each(list(_all), GIVE_BACK_S)


def end_each(heartbeats: Sequence[Heartbeat], within_s: float) -> None:
    """End heartbeats one by one until the time is up, which may happen if a hive does not answer. The hives of the
    remaining heartbeats will notice the silence."""
    until = time.monotonic() + within_s
    for heartbeat in heartbeats:
        heartbeat.end()
        if time.monotonic() > until:
            break


def _beat(of: "weakref.ref[Heartbeat]", over: threading.Event, options: Mapping[str, Any]) -> None:
    with httpx.Client(**options) as http:
        while (heartbeat := of()) is not None:
            every_s = heartbeat.beat(http)
            del heartbeat
            if over.wait(every_s):
                return


def _by(http: httpx.Client) -> Send:
    async def send(request: ServerRequest) -> ServerReply | NoReply:
        return transport.sent(http, request)

    return send
