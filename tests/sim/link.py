"""A process's connection to the bus: what it sends may be late, lost, or stored without an acknowledgement."""

import random
from collections.abc import Callable, Sequence
from itertools import count
from typing import TypeVar

from bombus.bus import MessagePlace
from bombus.bus.append import Outgoing
from bombus.bus.headers import REPLY
from bombus.bus.wire import AckLost, NotNow, PubAck
from bombus.errors import BombusError, BusUnavailable, Refused, StreamEndLost
from bombus.hive import inbox
from bombus.hive.events import kind_of
from bombus.hive.inbox import Answer, AnyAnswer, Refusal
from tests.sim.faults import Fault, Faults
from tests.sim.loop import Future, Loop, Process
from tests.sim.server import INBOX_STREAM, Message, Server

T = TypeVar("T")
ACK_S = 3.0
ANSWER_S = 15.0
PAUSE_S_MAX = 1.0
AGAIN_S = 1.0
RETRY_S = 3.0
LATE_S_MAX = 6.0
LAG_S = 0.02
READ_LAGS_S = (0.01, 0.1)
SLOW_S_MAX = (1.0, 4.0, 15.0)


class Net:
    """The network, which all connections share."""

    def __init__(self, loop: Loop, server: Server, faults: Faults, pick: random.Random) -> None:
        self.loop = loop
        self.server = server
        self.faults = faults
        self.pick = pick
        self.links: dict[str, Link] = {}  # the newest of each process
        self.numbers = count(1)
        self.outage = False
        self.restarts = 0  # of the server, after which connections are new

    def fresh(self, what: str) -> str:
        """Return a unique name, as a uuid would be."""
        return f"{what}{next(self.numbers)}"


class Link:
    """The connection of one life of a process. `token` is its name on the log; `cut` means partitioned."""

    def __init__(self, process: Process, net: Net) -> None:
        self.process = process
        self.net = net
        self.server = net.server
        self.token = f"{process.name}.{process.lives}"
        before: Link | None = net.links.get(process.name)
        self.cut: bool = before is not None and before.cut
        self.slow: bool = before.slow if before is not None else net.pick.random() < 0.4  # whether SLOW can strike it
        self.epoch_fence: tuple[int, int] | None = None  # epoch, and where it was opened: append.py
        self._arrived_s = 0.0  # when the previous message reaches the server: messages stay in order
        self._pending: dict[str, Future[Answer]] = {}
        net.links[process.name] = self

    @property
    def down(self) -> bool:
        return self.cut or self.net.outage

    def call(self, operation: Callable[[], T], timeout_s: float = ACK_S, outlives: bool = False) -> Future[T]:
        """Run an operation on the server. It fails with the server's error, or with `AckLost` after `timeout_s`.

        A message of a dead process may still arrive until its next life is connected, and with `outlives` even later.
        """
        net = self.net
        answer: Future[T] = Future(net.loop)
        answer.fail_after(timeout_s, AckLost("no acknowledgement"))
        if net.faults.strikes(Fault.LOST_REQUEST):
            return answer
        now_s = net.loop.now_s
        self._arrived_s = max(self._arrived_s, now_s + net.pick.random() * LAG_S)
        late_s = net.pick.random() * LATE_S_MAX if net.faults.strikes(Fault.LATE) else 0.0
        net.loop.after(self._arrived_s - now_s + late_s, self._arrive, operation, answer, late_s > 0, outlives)
        return answer

    def _arrive(self, operation: Callable[[], T], answer: Future[T], is_late: bool, outlives: bool) -> None:
        replaced = self.net.links[self.process.name] is not self
        if (self.down and not is_late) or (replaced and not outlives):
            return
        lag_s = self.net.pick.random() * LAG_S
        try:
            value = operation()
        except BombusError as error:
            self.net.loop.after(lag_s, answer.fail, error)
            return
        if not self.down and not self.net.faults.strikes(Fault.LOST_ACK):
            self.net.loop.after(lag_s, answer.set, value)

    # ---- publishing and requests, as publisher.py and inbox_client.py do them ----

    def submit(
        self, stream: str, puts: Sequence[Outgoing], last: int | None = None, opened: int | None = None
    ) -> Future[PubAck]:
        """Send once, without a repeat, as an append does. Its fences hold whenever it arrives."""
        return self.call(lambda: self.server.streams[stream].append(puts, last, opened), outlives=True)

    async def publish(self, stream: str, put: Outgoing, timeout_s: float = 10.0) -> PubAck:
        """Publish repeatedly under one message id. Raises `BusUnavailable` when time is up."""
        deadline_s = self.net.loop.now_s + timeout_s
        while True:
            try:
                return await self.call(lambda: self.server.streams[stream].append([put]), AGAIN_S)
            except (AckLost, NotNow):
                if self.net.loop.now_s >= deadline_s:
                    raise
                await self.process.sleep(AGAIN_S / 2)

    async def send(self, message: inbox.AnyMessage, timeout_s: float = 10.0) -> PubAck:
        """Put a fact into the inbox, once for its id."""
        return await self.publish(INBOX_STREAM, _outgoing(message, message.id, ""), timeout_s)

    async def ask(self, message: inbox.AnyMessage) -> AnyAnswer | Refused | None:
        """Send a command. Return its answer or refusal, or after a pause None, when nobody has answered it."""
        try:
            return await self.request(message, ANSWER_S)
        except Refused as refused:
            return refused
        except BusUnavailable:
            await self.process.sleep(PAUSE_S_MAX * self.net.pick.random())
            return None

    async def request(self, message: inbox.AnyMessage, timeout_s: float) -> AnyAnswer:
        """Put a command into the inbox until it is answered. Raises `Refused`, `BusUnavailable`."""
        reply = self.net.fresh(f"{self.process.name}/{self.token}/")
        deadline_s = self.net.loop.now_s + timeout_s
        attempt = 0
        try:
            while self.net.loop.now_s < deadline_s:
                answered: Future[Answer] = Future(self.net.loop)
                self._pending[reply] = answered
                await self.publish(
                    INBOX_STREAM, _outgoing(message, f"{message.id}@{reply}.{attempt}", reply), timeout_s
                )
                attempt += 1
                answered.fail_after(RETRY_S, AckLost("no answer"))
                try:
                    answer = await answered
                except AckLost:
                    continue
                if isinstance(answer, Refusal):
                    raise Refused(answer.code, answer.why)
                assert isinstance(answer, AnyAnswer)
                return answer
        finally:
            self._pending.pop(reply, None)
        raise BusUnavailable(f"no coordinator answered {message.id}")

    def reply(self, to: str, answer: Answer) -> None:
        """Send an answer on core NATS, which delivers it at most once."""
        if self.down or self.net.faults.strikes(Fault.LOST_REPLY):
            return
        link = self.net.links[to.split("/")[0]]
        self.net.loop.after(self.net.pick.random() * LAG_S, link.receive, to, answer)

    def receive(self, to: str, answer: Answer) -> None:
        pending = self._pending.get(to)
        if pending is not None and not self.down:
            pending.set(answer)

    async def last(self, stream: str, subject: str = "") -> Message | None:
        """Read from the leader. Raises `BusUnavailable`."""
        return await self.call(lambda: self.server.streams[stream].last(subject))


class Reader:
    """Reads a stream in order, with a small or a large delay."""

    def __init__(self, link: Link, stream: str, start_seq: int, after: MessagePlace | None = None) -> None:
        self._link = link
        self._stream = link.server.streams[stream]
        self._next = start_seq
        self._newest = after  # the message before that, where it is known
        self._lag_s = link.net.pick.choice(READ_LAGS_S)

    async def read(self, count_max: int = 10_000) -> list[Message]:
        """Return what has arrived, at least one message, starting after what was purged.

        Raises `StreamEndLost` when what was read last is not there any more.
        """
        link, stream = self._link, self._stream
        while True:
            if stream.last_seq < self._next:
                grown: Future[None] = Future(link.net.loop)
                stream.waiting.append(grown)
                await grown
            arrived = stream.last_seq  # what arrives while we sleep or are stopped is for the next read
            slow = link.slow and link.net.faults.strikes(Fault.SLOW)  # a slow reader takes only a part
            await link.process.sleep(link.net.pick.random() * self._lag_s)
            if slow:
                await self._fall_behind()
            while link.down:
                await link.process.sleep(AGAIN_S)
            if self._newest is not None and not stream.keeps(self._newest):
                raise StreamEndLost(self._stream.name, self._newest.seq)
            self._next = max(self._next, stream.first_seq)
            found = stream.messages[self._next - 1 : min(arrived, self._next - 1 + count_max)]
            if slow and found:
                found = found[: link.net.pick.randint(1, len(found))]
            if found:
                self._newest = found[-1].stored.place
                self._next += len(found)
                return found

    async def _fall_behind(self) -> None:
        net = self._link.net
        until_s = net.loop.now_s + net.pick.random() * net.pick.choice(SLOW_S_MAX)
        while net.faults.on and net.loop.now_s < until_s:
            await self._link.process.sleep(min(AGAIN_S, until_s - net.loop.now_s))


def _outgoing(message: inbox.AnyMessage, msg_id: str, reply: str) -> Outgoing:
    headers = {REPLY: reply} if reply else {}
    return Outgoing(kind_of(message), inbox.encode_message(message), msg_id, headers)
