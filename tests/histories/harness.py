"""A simulated harness: its conversations, and how it asks, loses answers and asks again."""

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bombus.errors import BusUnavailable
from bombus_gateway.app import GatewayApp
from tests.histories import answers, entries
from tests.histories.dialect import Ask, AuxiliaryCall, Dialect
from tests.histories.engine import CODE, Mind
from tests.histories.entries import VERBATIM, Entry, Said, Style, any_style
from tests.histories.hive import Reply, post
from tests.histories.truth import Asked, Truth

TOOLS = ("run", "read", "write")
RETRIED = {b"x-stainless-retry-count": b"1"}


@dataclass
class Line:
    """One conversation of a harness: the main agent's, or a sub-agent's. `chance` decides all that it does."""

    name: str
    chance: random.Random
    entries: tuple[Entry, ...]
    tools: tuple[str, ...]
    stops: bool = False

    @property
    def answers(self) -> list[int]:
        """The places of its answers."""
        return [at for at, entry in enumerate(self.entries) if entry.said is not None]

    @property
    def waits_for_results(self) -> bool:
        last = self.entries[-1].said
        return last is not None and bool(last.calls)

    def words(self, least: int = 2, most: int = 6) -> str:
        return answers.words(self.chance, least, most)

    def go_on(self) -> None:
        """Add what is asked next: the results of calls, or a question, sometimes after words of the harness's own."""
        if self.waits_for_results:
            last = self.entries[-1]
            assert last.said is not None
            self.entries += (entries.results(last, [self.words() for _ in last.said.calls]),)
            if self.chance.random() < 0.2:
                self.entries += (entries.user(f"<system-reminder>{self.words()}</system-reminder>"),)
            return
        if self.chance.random() < 0.1:
            self.entries += (entries.user(self.words()), entries.own("Ok."))
        self.entries += (entries.user(self.words()),)


@dataclass
class Harness:
    """A harness that plays one episode. `told` are its moves, in words, and `rewrites` how many more sequences than one
    they may cost."""

    dialect: Dialect
    apis: Sequence[GatewayApp]
    key: str
    mind: Mind
    chance: random.Random
    roams: bool
    streams: float
    truth: Truth = field(init=False)
    told: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    rewrites: int = 0
    at_once: bool = False  # several conversations go on at the same time
    _lines_made: int = 0

    def __post_init__(self) -> None:
        self.truth = Truth(self.dialect.names)

    def tell(self, line: Line, what: str, rewrites: int = 0) -> None:
        self.told.append(f"{line.name}: {what}")
        self.rewrites += rewrites

    def new_line(self, name: str, like: Line | None = None) -> Line:
        """Return a new conversation; `like` another one, it begins with the same words."""
        self._lines_made += 1
        chance = random.Random(f"{self.chance.random()}/{self._lines_made}")
        if like is not None:
            return Line(name, chance, like.entries, like.tools, like.stops)
        stops = self.dialect.path != "/v1/responses" and chance.random() < 0.12
        tools = () if stops else TOOLS[: chance.choice((0, 1, 2, 3, 3))]
        line = Line(name, chance, (), tools, stops)
        head = f"{CODE} {line.words()}" if stops else line.words()
        if stops or chance.random() < 0.7:
            line.entries += (entries.system(head),)
        line.entries += (entries.user(line.words()),)
        return line

    # ---- asking ----

    async def ask(self, line: Line, shown: tuple[Entry, ...] | None = None) -> Said | None:
        """Ask for the next answer, and add it to the conversation. `shown` is sent in place of the conversation.

        Some answers are lost on their way, and asked for again, with the mark of a retry or without one.
        """
        conversation = shown or line.entries
        lost = line.chance.random()
        if lost < 0.06:
            said = await self._twice(line, conversation, marked=True, at_once=lost < 0.03 and not self.at_once)
        elif lost < 0.1:
            self.tell(line, "an answer is lost and asked for again, without a mark", rewrites=1)
            said = await self._twice(line, conversation, marked=False)
        else:
            if lost < 0.13:
                self.tell(line, "hangs up and asks again", rewrites=1)
                await self.send(line, conversation, hang_up=True)
            said = await self.send(line, conversation)
        if said is not None:
            self.keep(line, said)
        return said

    def keep(self, line: Line, said: Said) -> None:
        """Add an answer to the conversation, in the harness's own spelling. Some drop an answer of nothing."""
        if said.is_nothing and line.chance.random() < 0.5:
            self.tell(line, "drops an answer of nothing", rewrites=1)
            return
        stopped = line.stops and said.finish in ("stop", "stop_sequence")
        line.entries += (entries.answer(said, self.style(line, said, stopped)),)

    def style(self, line: Line, said: Said, stopped: bool = False, own_ids: bool | None = None) -> Style:
        """Return how an answer is written back. What is named by its id is always the answer itself."""
        return VERBATIM if self.dialect.continues else any_style(line.chance, said, stopped, own_ids)

    async def aside(self, line: Line, side: AuxiliaryCall) -> Said | None:
        """Make an auxiliary call, which leaves the conversation as it is."""
        ask = [entries.user(f"{side.user}\n{line.words()}")]
        if side.appended:
            return await self.send(line, (*line.entries, *ask), side=side)
        head = [entries.system(f"{side.system}\n{line.words()}")]
        return await self.send(line, (*head, *ask), side=side)

    async def send(
        self, line: Line, conversation: tuple[Entry, ...], side: AuxiliaryCall | None = None, hang_up: bool = False
    ) -> Said | None:
        """Send a request, and note what it is and what comes back."""
        ask, asked = self._prepared(line, conversation, side, hang_up)
        headers = side.headers if side is not None else {}
        self.mind.slow = self.mind.slow or hang_up
        reply = await self._post(self._api(line), asked, headers, hang_up)
        if hang_up:
            return None
        return self._read(ask, asked, reply)

    def _prepared(
        self, line: Line, conversation: tuple[Entry, ...], side: AuxiliaryCall | None = None, stream: bool = False
    ) -> tuple[Ask, Asked]:
        found = self.truth.continues(conversation) if self.dialect.continues else None
        sent, named = conversation, ""
        if found is not None:
            said, count = found
            head = conversation[:1] if conversation[0].kind == "system" else ()
            sent, named = (*head, *conversation[count:]), said.call
        ask = Ask(
            sent,
            () if side is not None and not side.appended else line.tools,
            line.stops and (side is None or side.appended),
            stream or line.chance.random() < self.streams,
            named,
            side.fields if side is not None else {},
        )
        body = json.dumps(self.dialect.body(ask, line.chance), ensure_ascii=line.chance.random() < 0.5).encode()
        return ask, self.truth.ask(ask, conversation, body, side.purpose if side else "")

    def _api(self, line: Line) -> GatewayApp:
        return line.chance.choice(self.apis) if self.roams else self.apis[0]

    async def _post(
        self, api: GatewayApp, asked: Asked, headers: Mapping[bytes, bytes] = {}, hang_up: bool = False
    ) -> Reply:
        sent = {b"authorization": f"Bearer {self.key}".encode(), **headers}
        return await post(api, self.dialect.path, sent, asked.body, hang_up)

    def _read(self, ask: Ask, asked: Asked, reply: Reply) -> Said | None:
        """Return the answer in a reply; none of the two where it is refused."""
        said = self._said(ask, reply)
        if said is not None:
            self.truth.answer(asked, said)
        return said

    def _said(self, ask: Ask, reply: Reply) -> Said | None:
        if reply.status == 503:
            raise BusUnavailable(f"the gateway is not served by its hive: {reply.body.decode()[:300]}")
        if reply.status != 200:
            self.wrong.append(f"a request was answered {reply.status}: {reply.body.decode()[:500]}")
            return None
        try:
            said = self.dialect.streamed(reply.body) if ask.stream else self.dialect.whole(reply.body)
        except (AssertionError, KeyError, ValueError) as error:
            self.wrong.append(f"an answer cannot be read: {error!r}")
            return None
        named = reply.headers.get(b"x-request-id") or reply.headers.get(b"request-id") or b""
        if named.decode() != said.call:
            self.wrong.append(f"the answer of call {named.decode()} has the id of {said.call}")
        return said

    async def _twice(
        self, line: Line, conversation: tuple[Entry, ...], marked: bool, at_once: bool = False
    ) -> Said | None:
        """Ask, lose the answer, and send the same bytes again, after it or (`at_once`) while it is on its way."""
        ask, asked = self._prepared(line, conversation)
        if not marked:
            self._read(ask, asked, await self._post(self._api(line), asked))
            again = self.truth.ask(ask, conversation, asked.body, "")
            return self._read(ask, again, await self._post(self._api(line), again))
        self.tell(line, f"an answer is asked for twice, with a mark{' and at once' if at_once else ''}")
        if at_once:
            self.mind.slow = True
            api = self._api(line)
            first, second = await asyncio.gather(self._post(api, asked), self._once_sampling(api, asked))
        else:
            first = await self._post(self._api(line), asked)
            second = await self._post(self._api(line), asked, RETRIED)
        said, replayed = self._read(ask, asked, first), self._said(ask, second)
        if replayed is not None:
            self.truth.retried.append((asked, replayed))
        return said

    async def _once_sampling(self, api: GatewayApp, asked: Asked) -> Reply:
        """Send a retry when the model is at work on the first request."""
        before = len(self.mind.generations)
        while len(self.mind.generations) == before:
            await asyncio.sleep(0.001)
        return await self._post(api, asked, RETRIED)
