"""Gateways: commands go through the inbox, calls are recorded before they are acknowledged (call/, swarm/claims.py)."""

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec

from bombus.bus.append import Outgoing
from bombus.errors import BusUnavailable, Code, Refused
from bombus.hive import inbox
from bombus.hive.events import ConversationFormat, NotedCall
from bombus.hive.inbox import AnyAnswer, Found, Granted
from bombus.hive.pacing import fitting
from bombus.hive.records import CallRef, CallStatus, digest
from bombus.hive.state import EngineState, Phase
from tests.sim.faults import Fault
from tests.sim.fold import Follower
from tests.sim.link import Link, Net
from tests.sim.loop import Future, Process
from tests.sim.referee import ENGINE
from tests.sim.server import CALLS_STREAM
from tests.sim.variants import Variant

CLAIM_SLICE_S = 2.0
CLAIM_ANSWER_S = 10.0
COMMAND_S = 15.0
POSITION_S = 5.0
UNSEEN_S = 2.0
RECORD_S = 5.0
TOUCH_S = 1.0
CONFIRM_S = 0.2
RESPONSE_S = 20.0
READ_S = 1.0

T = TypeVar("T")
GatewayFault = (Code.BUS_DOWN, Code.OVERLOADED, Code.NO_REPLICA)  # 503: the client tries again


class Hangup(Exception):
    """The client's connection to its gateway broke."""


class Record(msgspec.Struct, frozen=True):
    """The relevant parts of a call record."""

    id: str
    episode: str
    run: int
    request: str
    oldest: int  # the policy versions of its tokens
    newest: int
    status: CallStatus


class Gateway(Process):
    link: Link
    follower: Follower

    def __init__(self, name: str, net: Net, variant: Variant | None, reports: bool = False) -> None:
        """With `reports` it reports how it reads the model: in each of its lives as another version would."""
        super().__init__(net.loop, name)
        self._reports = reports
        self.hears_clients = False  # whether it tells, in each second, which clients live
        self._net = net
        self._variant = variant
        self._responses: dict[Future[Any], None] = {}

    async def main(self) -> None:
        self.link = Link(self, self._net)
        self.follower = Follower(self.link)
        self._open: dict[str, int] = {}  # episodes with an open call
        self._seen: set[str] = set()
        self._clients: set[str] = set()
        self._confirmed: list[str] = []
        self._unreported: dict[tuple[str, str], tuple[CallRef, Record]] = {}  # stored, but not yet reported
        self.spawn(self.follower.run())
        await self.follower.caught_up()
        if self._reports:
            self.spawn(self._report_format())
        if self.hears_clients:
            self.spawn(self._tell_clients())
        await self._send_touches()

    def kill(self) -> None:
        super().kill()
        for response in self._responses:
            response.fail(Hangup())
        self._responses.clear()

    @property
    def engine(self) -> EngineState:
        return self.follower.hive.engine(ENGINE)

    async def request(self, client: Process, handle: Callable[["Gateway"], Coroutine[Any, Any, T]]) -> T:
        """Serve a client's request. Raises `Hangup`, `Refused`, `BusUnavailable` (a 503)."""
        response: Future[T] = Future(self.loop)
        await client.sleep(self._net.pick.random() * 0.01)
        if not self.alive:
            raise Hangup
        if self._net.faults.strikes(Fault.LOST_RESPONSE):
            response.fail_after(self._net.pick.random() * 2, Hangup())
        response.fail_after(RESPONSE_S, Hangup())
        self._responses[response] = None
        self.spawn(handle(self), response)
        try:
            return await response
        finally:
            self._responses.pop(response, None)

    # ---- commands ----

    async def command(self, message: inbox.AnyMessage, timeout_s: float = COMMAND_S) -> AnyAnswer:
        answer = await self.link.request(message, timeout_s)
        try:
            await self.follower.wait_for(lambda: self.follower.position >= answer.position, POSITION_S)
        except TimeoutError:
            pass  # the event has not come back yet
        return answer

    async def claim(self, claim: inbox.Claim, wait_s: float) -> Granted:
        """Claim under one claim id until it is granted or the time is over (R13)."""
        request = self._net.fresh("asking")
        claim = msgspec.structs.replace(claim, first_asked_ns=self.link.server.now_ns)
        answer = await self.in_slices(claim, request, wait_s)
        assert isinstance(answer, Granted)
        if all(self.engine.is_over(episode) for episode in answer.episodes):
            raise Refused(Code.OTHER_CLAIM, "the episodes of this claim are over")
        self._confirmed.append(claim.claim)
        return answer

    async def in_slices(self, claim: inbox.Claim, request: str, wait_s: float) -> inbox.AnyAnswer:
        """Send a claim in slices, each by a command whose id begins with `request`, and return the answer."""
        deadline_s = self.loop.now_s + wait_s
        number = 0
        while True:
            sent_s = self.loop.now_s
            slice_s = max(0.0, min(CLAIM_SLICE_S, deadline_s - sent_s))
            message = msgspec.structs.replace(claim, id=f"{request}.{number}", wait_s=slice_s)
            number += 1
            try:
                return await self.command(message, slice_s + CLAIM_ANSWER_S)
            except Refused as refused:
                waited = self.loop.now_s - sent_s >= slice_s / 2
                if refused.code in (Code.NO_EPISODES, Code.WRONG_PHASE) and waited and self.loop.now_s < deadline_s:
                    continue
                raise

    # ---- calls ----

    async def call(self, episode: str, run: int, request: str, retried: bool, cut_off: bool) -> str:
        """Make one model call. Return its id once it is recorded and reported to the coordinator (R9)."""
        await self._check_open(episode, run)
        if retried and (found := await self._recorded(episode, request)):
            return found
        self._open[episode] = self._open.get(episode, 0) + 1
        self._seen.add(episode)
        try:
            oldest = self._version_of(episode)
            await self.sleep(self._net.pick.expovariate(8.0))
            newest = max(oldest, self.engine.version) if self._net.pick.random() < 0.5 else oldest
            status = CallStatus.CUT_OFF if cut_off else CallStatus.COMPLETE
            record = Record(self._net.fresh("call"), episode, run, request, oldest, newest, status)
            body = msgspec.msgpack.encode(record)
            stored = await self.link.publish(CALLS_STREAM, Outgoing("call", body, record.id, {}), RECORD_S)
            ref = CallRef(stored.seq, record.id, digest(body))
            if self._variant == Variant.TOLD_EARLY:
                self.spawn(self._report_later(ref, record))
            else:
                await self._report(ref, record)
            return record.id
        finally:
            self._open[episode] -= 1
            if not self._open[episode]:
                del self._open[episode]

    def _version_of(self, episode: str) -> int:
        """Return the version of the replica that answers. In a synchronous run all of them serve the same."""
        engine = self.engine
        if engine.collection.max_staleness == 0:
            return engine.version
        versions = sorted({replica.version for replica in fitting(engine, episode).values()})
        if not versions:
            raise Refused(Code.NO_REPLICA, f"no replica serves version {engine.version}")
        return self._net.pick.choice(versions)

    async def _check_open(self, episode: str, run: int) -> None:
        def is_on_the_log() -> bool:
            engine = self.engine
            return engine.run > run or (engine.run == run and engine.next_episode > int(episode.rpartition("-")[2]))

        try:
            await self.follower.wait_for(is_on_the_log, UNSEEN_S)
        except TimeoutError:
            raise Refused(Code.BUS_DOWN, f"{episode} is not on the log yet") from None
        if self.engine.run != run or self.engine.phase == Phase.OFFLINE or self.engine.is_over(episode):
            raise Refused(Code.EPISODE_OVER, f"{episode} is over")

    async def _report(self, ref: CallRef, record: Record) -> None:
        size = 1000 + ref.seq
        call = NotedCall(record.episode, ref, 5, 3, record.oldest, record.newest, record.status, bytes=size)
        noted = inbox.CallRecorded(id=record.id, engine=ENGINE, run=record.run, call=call)
        key = record.episode, record.request
        if record.status == CallStatus.COMPLETE:
            self._unreported[key] = ref, record
        await self.link.send(noted, RECORD_S)
        self._unreported.pop(key, None)

    async def _report_later(self, ref: CallRef, record: Record) -> None:
        try:
            await self._report(ref, record)
        except BusUnavailable:
            pass  # the mistake of this variant

    async def _recorded(self, episode: str, request: str) -> str:
        """Return the record of this request, when the harness sends it again."""
        unreported = self._unreported.get((episode, request))
        if unreported is not None:
            await self._report(*unreported)
            return unreported[1].id
        lookup = inbox.Lookup(id=self._net.fresh("lookup"), engine=ENGINE, episode=episode)
        found = await self.link.request(lookup, COMMAND_S)
        assert isinstance(found, Found)
        calls = self.link.server.streams[CALLS_STREAM]
        for call in found.calls:
            record = await self.link.call(lambda: read_record(calls.get(call.ref.seq).body, call.ref))  # noqa: B023
            if record.request == request and record.status == CallStatus.COMPLETE:
                return record.id
        return ""

    # ---- activity ----

    def confirm(self, claim: str) -> None:
        self._confirmed.append(claim)

    def touch(self, episode: str) -> None:
        self._seen.add(episode)

    def touch_client(self, client: str) -> None:
        self._clients.add(client)

    async def _tell_clients(self) -> None:
        while True:
            await self.sleep(TOUCH_S)
            clients, self._clients = tuple(sorted(self._clients)), set()
            try:
                await self.link.send(inbox.Touch(id=self._net.fresh("clients"), clients=clients), 3.0)
            except BusUnavailable:
                pass  # they touch again

    async def _send_touches(self) -> None:
        count = 0
        while True:
            await self.sleep(CONFIRM_S)
            count += 1
            if count % round(TOUCH_S / CONFIRM_S) and not self._confirmed:
                continue
            seen, self._seen = self._seen.union(self._open), set()
            confirmed, self._confirmed = tuple(self._confirmed), []
            if not seen and not confirmed:
                continue
            message = inbox.Touch(
                id=self._net.fresh("touch"), engine=ENGINE, episodes=tuple(sorted(seen)), confirmed=confirmed
            )
            try:
                await self.link.send(message, 3.0)
            except BusUnavailable:
                pass  # open calls are touched again; an unconfirmed claim is taken back

    async def _report_format(self) -> None:
        """Report how the model is read until it is on the log (formats.py)."""
        found = ConversationFormat(template=self.link.token, tool_calls="text", reasoning="text")
        while True:
            await self.sleep(READ_S)
            run = self.engine.run
            if self.engine.weights is None or not self.engine.lacks_format(run, found):
                continue
            message = inbox.ModelReadFact(
                id=f"{self.link.token}-read-{run}", engine=ENGINE, run=run, gateway=self.link.token, format=found
            )
            try:
                await self.link.send(message, 3.0)
            except BusUnavailable:
                pass  # it is sent again


def read_record(body: bytes, ref: CallRef) -> Record:
    assert digest(body) == ref.digest, f"call {ref.id} at {ref.seq} is not the one that was referenced"
    record = msgspec.msgpack.decode(body, type=Record)
    assert record.id == ref.id
    return record
