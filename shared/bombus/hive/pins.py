"""The bytes that each holder pins in the stream `calls`: they cannot be purged while the holder's episodes need them
(R12).

A holder is a key, or all clients without a named key. Each holder's calls have a subject of their own, which is purged
up to the claim of the holder's oldest episode that still needs its calls. An episode therefore pins every call that its
holder has stored since the episode's claim, even calls that are no longer needed, but no other holder's calls.
"""

from collections.abc import Iterable, Mapping

import msgspec

from bombus.figures import byte_size
from bombus.hive.shares import has_share_of_stream


class Pin(msgspec.Struct, frozen=True, array_like=True):
    """The claim of an episode, with the number of `bytes` of calls that the episode's holder had stored by then.

    All calls of the episode are at or after the sequence number `calls_from` in the stream.
    """

    calls_from: int
    bytes: int


class HeldCalls(msgspec.Struct):
    """One holder's calls on an engine. `pins` contains a pin for each episode that still needs its calls, in the order
    of the episodes' claims."""

    bytes: int = 0  # total size of all noted calls, including late ones
    pinned: int = 0  # the bytes that cannot be purged
    pins: dict[str, Pin] = {}

    def floor(self, newest_call: int) -> int:
        """Return the sequence number below which none of the holder's calls are needed any more."""
        return min((pin.calls_from for pin in self.pins.values()), default=newest_call)


class StoredCalls(msgspec.Struct):
    """An engine's calls by holder, and how many bytes all holders together pin."""

    holders: dict[str, HeldCalls] = {}
    pinned: int = 0

    def claim(self, holder: str, episode: str, newest_call: int) -> None:
        calls = self.holders.get(holder) or self.holders.setdefault(holder, HeldCalls())
        calls.pins[episode] = Pin(newest_call, calls.bytes)

    def store(self, holder: str, size: int) -> None:
        calls = self.holders.get(holder) or self.holders.setdefault(holder, HeldCalls())
        calls.bytes += size
        if calls.pins:
            calls.pinned += size
            self.pinned += size

    def lower(self, holder: str, episode: str, seq: int) -> None:
        """Record that an episode has a call before its `calls_from`, because the stream has lost its end (R6)."""
        pins = self.holders[holder].pins
        if episode in pins:
            pins[episode] = Pin(seq, pins[episode].bytes)

    def release(self, episodes: Iterable[str]) -> None:
        """Record that the calls of these episodes are no longer needed."""
        names = tuple(episodes)
        for calls in self.holders.values():
            before = len(calls.pins)
            for name in names:
                calls.pins.pop(name, None)
            if len(calls.pins) < before:
                self._count(calls)

    def keep(self, episodes: Iterable[str]) -> None:
        """Record that only the calls of these episodes are still needed."""
        kept = set(episodes)
        self.release([name for calls in self.holders.values() for name in calls.pins if name not in kept])

    def _count(self, calls: HeldCalls) -> None:
        oldest = next(iter(calls.pins.values()), None)
        pinned = 0 if oldest is None else calls.bytes - oldest.bytes
        self.pinned += pinned - calls.pinned
        calls.pinned = pinned


def why_no_share(pinned: Mapping[str, int], holder: str, size: int, more: int = 1) -> str:
    """Return why a holder may not pin `more` bytes of a stream of `size` bytes, or "" if the holder may."""
    if has_share_of_stream(pinned, holder, size, more):
        return ""
    return (
        f"The episodes of this key keep {byte_size(pinned.get(holder, 0))} of recorded calls from being removed, and "
        f"all keys together {byte_size(sum(pinned.values()))} of {byte_size(size)}: more than its share. End or abort "
        "its oldest episodes and try again, or raise the limit with --calls-bytes-max."
    )
