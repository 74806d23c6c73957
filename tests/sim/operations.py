"""Training operations in the simulator: clients that send them, a trainer that executes them, and what must hold.

A model is a chain of digests, one for each operation that changes it. So a result says which operations were executed
before it, in which order and how often.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial

import msgspec

from bombus.bus.append import Outgoing
from bombus.errors import BusUnavailable, Code, LogCorrupted, Refused
from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.events import Collection, OperationLimits, SavedWeights
from bombus.hive.operations.order import why_out_of_order
from bombus.hive.operations.state import ClientModel, Queued, kept_id
from bombus.hive.records import BodyRef, digest
from bombus.hive.state import EngineState, Hive, Phase
from bombus_coordinator.rules.operations.queue import CREATE, END, SAVE
from tests.sim.faults import Fault
from tests.sim.fold import RETRY_S, Follower
from tests.sim.link import ANSWER_S, Link, Net
from tests.sim.loop import Process
from tests.sim.server import OPS_STREAM, Server

OPS_ENGINE = "ops"
BASE = "tiny"
LOAD = "load_weights"
BEAT_S = 2.0
SUPERSEDED_S = 5.0
AGAIN = (Code.QUOTA, Code.STORAGE_FULL, Code.BODY_GONE)
ADAPTER = ev.ModelShape(adapter=ev.AdapterShape(rank=8, alpha=16.0))
RULES = Collection(
    max_pool_episodes=8,
    operations=OperationLimits(
        models_max=3,
        waiting_max=4,
        bodies_bytes_max=2_000,
        results_bytes_max=1_000,
        results_s=4.0,
        session_idle_s=10.0,
        run_idle_s=5.0,
        executions_max=2,
        episodes_s=20.0,
    ),
)


async def store(link: Link, body: bytes, stream: str = OPS_STREAM) -> BodyRef:
    """Store a body in one or two parts, as parts.py does. Raises `BusUnavailable`."""
    token = link.net.fresh("body")
    cut = len(body) // 2 if link.net.pick.random() < 0.3 else len(body)
    parts = [part for part in (body[:cut], body[cut:]) if part]
    acks = [
        await link.publish(stream, Outgoing("op", part, f"{token}.{number}", {})) for number, part in enumerate(parts)
    ]
    return BodyRef(seqs=tuple(ack.seq for ack in acks), size=len(body), digest=digest(body))


def fetch(server: Server, ref: BodyRef, stream: str = OPS_STREAM) -> bytes:
    """Return a body. Raises `LogCorrupted` when it is gone, or is another."""
    body = b"".join(server.streams[stream].get(seq).body for seq in ref.seqs)
    if digest(body) != ref.digest:
        raise LogCorrupted(f"another body is at {ref.first}")
    return body


def after(state: bytes, op: str, body: bytes) -> bytes:
    """Return what stands for a model after an operation on it."""
    return digest(state + op.encode() + body)


class Ledger:
    """Sees every event about training operations and every answer to their clients."""

    def __init__(self, server: Server, hive: Callable[[], Hive], seen: Counter[str]) -> None:
        """`hive` is the fold of the log."""
        self.hive = hive
        self.disk: dict[str, tuple[int, bytes]] = {}  # recovery checkpoints: the last operation, and the model
        self.seen = seen
        self._server = server
        self._numbers: dict[str, int] = {}
        self._bodies: dict[str, dict[int, bytes]] = {}  # by model and number: of what is not executed yet
        self._models: dict[str, bytes] = {}  # after the operations that were executed
        self._executed: set[str] = set()
        self._over: set[str] = set()
        self._begun: defaultdict[str, set[int]] = defaultdict(set)  # by operation: epochs of trainers
        self._unsurvived: defaultdict[str, dict[int, int]] = defaultdict(dict)  # by model and number: trainers
        self._accepted: dict[str, int] = {}  # operation: its number
        self._acknowledged: dict[str, int] = {}
        self._ended: set[str] = set()  # episodes
        self._lacking: set[str] = set()  # operations whose checkpoints were removed while they waited

    def acknowledged(self, answer: inbox.Accepted) -> None:
        """Note an answer to a client: the same operation always has the same number."""
        before = self._acknowledged.setdefault(answer.operation, answer.number)
        assert before == answer.number, f"{answer.operation} was the {before}th and is the {answer.number}th"
        assert self._accepted[answer.operation] == answer.number, "an answered operation is on the log"
        self.seen["operations acknowledged"] += 1

    def ended(self, episodes: Iterable[str]) -> None:
        """Note that an end was acknowledged to its client."""
        assert set(episodes) <= self._ended, "an acknowledged end is on the log"
        self.seen["ends of sampled episodes acknowledged"] += 1

    def check(self, event: ev.Event, engine: EngineState) -> None:
        why = why_out_of_order(self.hive(), event)
        assert not why, why
        rests = engine.suspended or engine.rest_wanted or engine.asleep
        is_tried = engine.serves_operations and engine.trainer != "" and not rests
        assert bool(engine.clients.trying.since_ns) == is_tried, "time counts while models could be made again"
        assert not isinstance(event, ev.BatchReady | ev.RollingClosed), "a run of operations makes no batch"
        match event:
            case ev.EngineStarted():
                assert engine.phase == Phase.OFFLINE
                assert event.base
            case ev.EpisodeEnded():
                self._check_ended(event)
            case ev.OperationAccepted():
                self._check_accepted(event, engine)
            case ev.OperationBegun():
                self._check_begun(event, engine)
            case ev.ModelRebuilding() | ev.EngineResumed():
                self._check_rebuilding(event, engine)
            case ev.OperationCompleted():
                self._check_completed(event, engine)
            case ev.ModelCheckpointed():
                assert self.disk[event.folder][0] == event.number, (
                    "a recovery checkpoint is durable before it is on the log"
                )
            case ev.WeightsRemoved():
                self._check_removed(event, engine)
            case ev.ModelClosed() | ev.EngineStopped() | ev.EngineFailed():
                self._check_closed(event, engine)

    def _fetch(self, ref: BodyRef) -> bytes:
        """Return a body that must be there. Within a message's storing, another error would be its sender's."""
        try:
            return fetch(self._server, ref)
        except LogCorrupted as error:
            raise AssertionError(f"a body that is needed is gone: {error}") from error

    def _check_accepted(self, event: ev.OperationAccepted, engine: EngineState) -> None:
        assert event.operation not in self._accepted, f"{event.operation} is accepted twice"
        assert event.number == self._numbers.get(event.model, 0) + 1, "numbers follow each other"
        self._numbers[event.model] = self._accepted[event.operation] = event.number
        body = b"" if event.body is None else self._fetch(event.body)
        self._bodies.setdefault(event.model, {})[event.number] = body
        assert engine.clients.models[event.model].waiting <= RULES.operations.waiting_max + 1, "and one that ends it"

    def _check_ended(self, event: ev.EpisodeEnded) -> None:
        names = {outcome.episode for outcome in event.outcomes}
        assert not names & self._ended, "an episode ends once"
        self._ended |= names

    def _check_begun(self, event: ev.OperationBegun, engine: EngineState) -> None:
        begun = self._begun[f"{event.model}:{event.key}"]
        assert event.trainer_epoch == engine.trainer_epoch
        assert event.trainer_epoch not in begun, "a trainer begins an operation once"
        begun.add(event.trainer_epoch)
        assert event.number == min(self._bodies[event.model]), "what comes before it is executed"
        assert len(begun) <= RULES.operations.executions_max, "it fails instead of being begun again"

    def _check_rebuilding(self, event: ev.ModelRebuilding | ev.EngineResumed, engine: EngineState) -> None:
        if isinstance(event, ev.EngineResumed):
            for model in [each.name for each in engine.clients.open_models if each.suspended]:
                self._unsurvived.pop(model, None)
            return
        assert event.trainer_epoch == engine.trainer_epoch
        tried = self._unsurvived[event.model]
        if event.over:
            tried.clear()
        elif event.number:
            assert event.number not in self._bodies.get(event.model, {}), "only what was executed is executed again"
            for number in [each for each in tried if each < event.number]:
                del tried[number]
            tried[event.number] = tried.get(event.number, 0) + 1
            assert tried[event.number] <= RULES.operations.executions_max, "no other trainer tries it"
            self.seen["operations executed again in doubt"] += 1

    def _check_removed(self, event: ev.WeightsRemoved, engine: EngineState) -> None:
        """What is about to be loaded stays, and what waits for a suspended model keeps it from expiring."""
        readers = list(engine.clients.readers(kept_id(event.model, event.use, event.name)))
        assert all(model.suspended for model, _ in readers)
        assert not (event.expired and readers)
        self._lacking |= {f"{model.name}:{queued.key}" for model, queued in readers}

    def _check_completed(self, event: ev.OperationCompleted, engine: EngineState) -> None:
        operation = f"{event.model}:{event.key}"
        assert operation not in self._executed | self._over, f"{operation} is completed twice"
        self._executed.add(operation)
        assert event.trainer_epoch == engine.trainer_epoch
        bodies = self._bodies[event.model]
        assert event.number == min(bodies), f"{operation} is executed before operation {min(bodies)}"
        model, body = self._models.get(event.model, b""), bodies.pop(event.number)
        expected = after(b"" if event.op == CREATE else model, event.op, body)
        found = self._fetch(event.result)
        assert found == (b"failed" if event.failed else expected), f"{operation} was executed on another model"
        queued = engine.clients.models[event.model].operations[event.key]
        assert event.failed or operation not in self._lacking, f"{operation} has loaded what was removed"
        self.seen["loads of what was removed"] += operation in self._lacking
        if not (event.failed or queued.passive):
            self._models[event.model] = expected
        self.seen["operations executed"] += 1
        self.seen["operations that failed"] += event.failed

    def _check_closed(self, event: ev.Event, engine: EngineState) -> None:
        clients = engine.clients
        for model in [clients.models[event.model]] if isinstance(event, ev.ModelClosed) else clients.open_models:
            self._close(model)

    def _close(self, model: ClientModel) -> None:
        """Note that what waits for a model is over."""
        self._over |= {f"{model.name}:{each.key}" for each in model.operations.values() if each.waits}
        self._bodies.pop(model.name, None)
        self.seen["models that ended with operations waiting"] += model.waiting > 0

    def purged(self) -> None:
        """Check that what is needed is still there, whatever was purged."""
        for model in self.hive().engine(OPS_ENGINE).clients.models.values():
            for body in model.needed():
                self._fetch(body)
        self.seen["operations purged"] += self._server.streams[OPS_STREAM].first_seq > 1

    @property
    def is_over(self) -> bool:
        """Return whether nothing is left to do."""
        engine = self.hive().engine(OPS_ENGINE)
        return engine.phase == Phase.OFFLINE and not engine.clients.sessions

    def finish(self) -> None:
        engine = self.hive().engine(OPS_ENGINE)
        assert engine.phase == Phase.OFFLINE, "the run has ended by itself"
        assert not engine.clients.sessions, "every session is over and forgotten"
        assert not engine.clients.models
        assert engine.clients.held_bytes == engine.clients.result_bytes == 0
        missing = set(self._accepted) - self._executed - self._over
        assert not missing, f"operations {sorted(missing)} were never completed"
        assert set(self._acknowledged) <= set(self._accepted)


class TrainingClient(Process):
    """A client with its API: it opens sessions, creates models, and sends operations without waiting for each."""

    def __init__(self, name: str, net: Net, ledger: Ledger, playing: Callable[[], bool]) -> None:
        super().__init__(net.loop, name)
        self._net = net
        self._ledger = ledger
        self._playing = playing

    async def main(self) -> None:
        self.link = Link(self, self._net)
        self.follower = Follower(self.link)
        self.spawn(self.follower.run())
        await self._configure()
        while True:
            await self.sleep(self._net.pick.random())
            if self._engine.rest_wanted:  # somebody has gone without waking the trainer up
                await self._ask_rest(False)
            if self._playing():
                await self._play()

    async def _configure(self) -> None:
        """Give the engine its limits, unless it is configured or at work already."""
        configured = inbox.Configure(
            id=self._net.fresh("limits"),
            engine=OPS_ENGINE,
            config="{}",
            config_digest="d",
            collection=RULES,
            model=BASE,
        )
        while self._engine.configured is None:
            if await self.link.ask(configured) is not None:
                return

    @property
    def _engine(self) -> EngineState:
        return self.follower.hive.engine(OPS_ENGINE)

    async def _play(self) -> None:
        """Play one session: with a few models, one after another, and an end that may be forgotten."""
        pick = self._net.pick
        session = self._net.fresh(f"{self.name}-s")
        opens = inbox.OpenSession(id=self._net.fresh("open"), engine=OPS_ENGINE, session=session)
        opened = await self.link.ask(opens)
        if not isinstance(opened, inbox.Done):
            return
        chance = pick.random()
        if chance < 0.1:
            await self._register()
        beating = self.spawn(self._beat(session))
        if chance > 0.95:
            await self.link.ask(
                inbox.BeginSampling(id=self._net.fresh("sample"), engine=OPS_ENGINE, session=session, base=BASE)
            )
        for number in range(pick.choice((1, 1, 2))):
            if not await self._train(session, f"{session}:train:{number}"):
                break
        beating.close()
        self.tasks.pop(beating, None)
        if pick.random() < 0.5:  # otherwise it is forgotten and becomes idle
            await self.link.ask(inbox.CloseSession(id=self._net.fresh("close"), engine=OPS_ENGINE, session=session))

    async def _put_to_sleep(self) -> None:
        """Have the trainer free its memory, and take it again."""
        if isinstance(await self._ask_rest(True), inbox.Done):
            await self.sleep(2 * self._net.pick.random())
            await self._ask_rest(False)

    async def _ask_rest(self, asleep: bool) -> inbox.AnyAnswer | Refused | None:
        return await self.link.ask(inbox.AskRest(id=self._net.fresh("rest"), engine=OPS_ENGINE, asleep=asleep))

    async def _register(self) -> None:
        """Register an inference server elsewhere, and sometimes remove it."""
        host, port = "elsewhere", 30_000 + self._net.pick.randrange(2)
        await self.link.ask(inbox.AddEndpoint(id=self._net.fresh("add"), engine=OPS_ENGINE, host=host, port=port))
        if self._net.pick.random() < 0.5:
            await self.link.ask(inbox.RemoveEndpoint(id=self._net.fresh("rm"), engine=OPS_ENGINE, host=host, port=port))

    async def _beat(self, session: str) -> None:
        while True:
            await self.sleep(BEAT_S)
            touch = inbox.Touch(id=self._net.fresh("touch"), engine=OPS_ENGINE, sessions=(session,))
            try:
                await self.link.send(touch)
            except BusUnavailable:
                pass  # the next one will do

    async def _train(self, session: str, model: str) -> bool:
        """Create a model and send it operations. Return False when it was refused."""
        pick = self._net.pick
        if not await self._operate(session, model, "0", CREATE):
            return False
        keys = list(range(1, pick.choice((2, 5, 12))))
        if pick.random() < 0.2:
            pick.shuffle(keys)
        for key in keys:
            op = pick.choice(("forward", "forward_backward", "forward_backward", "optim_step", SAVE, SAVE, LOAD))
            if not await self._operate(session, model, str(key), op):
                return False
            if pick.random() < 0.3:
                await self._remove_weights()
            if pick.random() < 0.3:
                await self._read(model, str(key))
            elif pick.random() < 0.03:
                await self._put_to_sleep()
        if pick.random() < 0.4:
            await self._play_episodes()
        return pick.random() < 0.5 or await self._operate(session, model, "end", END)

    async def _remove_weights(self) -> None:
        kept = self._engine.clients.kept
        names = [name for name in kept if any(self._engine.clients.readers(name))] or list(kept)
        if not names:
            return
        noted = kept[self._net.pick.choice(names)].noted
        remove = inbox.RemoveWeights(
            id=self._net.fresh("remove"), engine=OPS_ENGINE, model=noted.model, use=noted.saved.use,
            name=noted.saved.name,
        )  # fmt: skip
        answer = await self.link.ask(remove)
        self._ledger.seen["removals refused"] += isinstance(answer, Refused)

    async def _play_episodes(self) -> None:
        """Play episodes with what was saved, or the base, and take them; whatever is not answered is left behind."""
        pick, name = self._net.pick, self._net.fresh("claim")
        sampler = pick.choice([inbox.BASE_SAMPLER, *self._engine.clients.kept])
        claim = inbox.Claim(
            id=name, engine=OPS_ENGINE, claim=name, client=self.name, count=2, sampler=sampler, discard_timeout_s=5.0
        )
        granted = await self.link.ask(claim)
        if not isinstance(granted, inbox.Granted):
            return
        episodes = granted.episodes
        with suppress(BusUnavailable):  # then they are taken back, and their end is refused
            await self.link.send(inbox.Touch(id=f"{name}-touch", engine=OPS_ENGINE, confirmed=(name,)))
        results = tuple(inbox.EpisodeResult(episode=each, task="t", reward=1.0) for each in episodes)
        end = inbox.End(id=f"{name}-end", engine=OPS_ENGINE, client=self.name, results=results)
        if not isinstance(await self._ask_again(end), inbox.Done):
            return
        self._ledger.ended(episodes)
        if pick.random() < 0.8:
            take = inbox.Take(id=f"{name}-take", engine=OPS_ENGINE, client=self.name, episodes=episodes)
            if isinstance(await self._ask_again(take), inbox.Done):
                left = self._ledger.hive().engine(OPS_ENGINE).pool
                assert not set(episodes) & set(left), "what was taken is not in the pool"

    async def _ask_again(self, message: inbox.AnyMessage) -> inbox.AnyAnswer | Refused | None:
        """Send a command up to three times."""
        for _ in range(3):
            if (answer := await self.link.ask(message)) is not None:
                return answer
        return None

    async def _operate(self, session: str, model: str, key: str, op: str) -> bool:
        """Send an operation until it is answered, and sometimes again. Return False when it is refused for good."""
        pick = self._net.pick
        text = self._net.fresh(f"{model}/{key}/").encode() * pick.choice((1, 5))
        kept = list(self._engine.clients.kept)
        reads = pick.choice(kept) if op == LOAD and kept else ""
        answered: inbox.Accepted | None = None
        while True:
            try:
                body = await store(self.link, text)
            except BusUnavailable:
                continue
            if pick.random() < 0.05:
                await self.sleep(pick.random() * 20)  # an API that hangs between the two
            message = inbox.Operate(
                id=self._net.fresh("operate"), engine=OPS_ENGINE, session=session, model=model, key=key, op=op,
                body=body, passive=op == "forward", base=BASE, reads=reads,
            )  # fmt: skip
            answer = await self.link.ask(message)
            if isinstance(answer, inbox.Accepted):
                self._ledger.acknowledged(answer)
                answered = answer
                if not self._net.faults.strikes(Fault.REPEAT):
                    return True
            elif isinstance(answer, Refused):
                self._ledger.seen[f"operations refused: {answer.code}"] += 1
                assert answer.code != Code.OTHER_BODY
                if answered is not None or answer.code not in AGAIN:
                    return answered is not None
                await self.sleep(pick.random())

    async def _read(self, model: str, key: str) -> None:
        """Wait for a result, which is there unless it was dropped."""

        def over() -> bool:
            found = self._engine.clients.operation(f"{model}:{key}")
            return found is None or not found.waits

        try:
            await self.follower.wait_for(over, ANSWER_S)
        except TimeoutError:
            return
        queued = self._engine.clients.operation(f"{model}:{key}")
        if queued is not None and queued.result is not None:
            self._ledger.seen["results read"] += 1


class OperationTrainer(Process):
    """Executes what waits, in the order of the log, and writes recovery checkpoints. It may be killed anywhere."""

    def __init__(self, name: str, net: Net, ledger: Ledger) -> None:
        super().__init__(net.loop, name)
        self._net = net
        self._ledger = ledger

    async def main(self) -> None:
        self.link = Link(self, self._net)
        self.follower = Follower(self.link)
        self.spawn(self.follower.run())
        await self.follower.caught_up()
        while True:
            await self.follower.wait_for(lambda: self._engine.serves_operations)
            try:
                await self._serve(self._engine.run)
                if self._engine.serves_operations:  # another has opened the run; it may be gone again
                    await self.sleep(SUPERSEDED_S * (1 + self._net.pick.random()))
            except BusUnavailable:
                await self.sleep(RETRY_S)

    @property
    def _engine(self) -> EngineState:
        return self.follower.hive.engine(OPS_ENGINE)

    async def _serve(self, run: int) -> None:
        opens = inbox.TrainerOpens(id=self._net.fresh("open"), engine=OPS_ENGINE, run=run, trainer=self.link.token)
        try:
            answer = await self.link.request(opens, ANSWER_S)
        except Refused:
            await self.sleep(RETRY_S)
            return
        assert isinstance(answer, inbox.Done)
        self._run, self._epoch = run, answer.epoch
        self._begun: set[str] = set()  # models of which an operation was begun
        self._doubted: dict[str, bool] = {}  # models that a trainer before may not have survived making again
        self._models: dict[str, tuple[int, int, bytes]] = {}  # its beginning, the last operation in it, and the model
        await self.follower.wait_for(lambda: self.follower.position >= answer.position)
        serves = inbox.TrainerServes(
            id=self._net.fresh("serves"), engine=OPS_ENGINE, run=run, trainer_epoch=self._epoch
        )
        await self.link.send(serves)
        for model in [each.name for each in self._engine.clients.open_models if each.suspended]:
            await self._say_away(model, "")
        while self._is_ours():
            if self._engine.rest_wanted or self._engine.asleep:
                await self._rest()
            found = next(self._next(), None)
            if found is None:
                await self.follower.wait_for(self._has_work)
            else:
                await self._execute(*found)

    def _has_work(self) -> bool:
        rests = self._engine.rest_wanted or self._engine.asleep
        return not self._is_ours() or rests or any(self._next())

    async def _rest(self) -> None:
        """Forget all models until somebody wants them, and make them again from their recovery checkpoints and what
        came after."""
        for asleep in (True, False):
            rests = inbox.TrainerRests(
                id=self._net.fresh("rests"), engine=OPS_ENGINE, run=self._run, trainer_epoch=self._epoch, asleep=asleep
            )
            await self.link.send(rests)
            self._models.clear()
            await self.follower.wait_for(partial(self._is_at, asleep))
            await self.follower.wait_for(lambda: not self._is_ours() or not self._engine.rest_wanted)

    def _is_at(self, asleep: bool) -> bool:
        return not self._is_ours() or self._engine.asleep == asleep

    def _is_ours(self) -> bool:
        engine = self._engine
        return engine.serves_operations and (engine.run, engine.trainer_epoch) == (self._run, self._epoch)

    def _next(self) -> Iterator[tuple[ClientModel, Queued]]:
        """Yield the next operation of each model, those that came first before the others."""
        found = []
        for model in self._engine.clients.open_models:
            here = self._here(model)
            last = self._checkpointed(model) if here is None else here[0]
            ahead = [each for each in model.again() if each.number > last]
            if ahead:
                found.append((model, ahead[0]))
        yield from sorted(found, key=lambda each: each[1].arrival)

    def _checkpointed(self, model: ClientModel) -> int:
        return model.begun - 1 if model.checkpoint is None else self._ledger.disk[model.checkpoint.folder][0]

    def _here(self, model: ClientModel) -> tuple[int, bytes] | None:
        """Return the last operation in the model that is in memory, and the model, unless a recovery checkpoint has
        come by later."""
        begun, last, state = self._models.get(model.name, (0, 0, b""))
        return (last, state) if begun == model.begun and last >= self._checkpointed(model) else None

    def _restored(self, model: ClientModel) -> bytes:
        if (here := self._here(model)) is not None:
            return here[1]
        return b"" if model.checkpoint is None else self._ledger.disk[model.checkpoint.folder][1]

    async def _execute(self, model: ClientModel, queued: Queued) -> None:
        is_to_load = any(each.waits and each.reads for each in model.operations.values())
        is_new = model.checkpoint is not None and model.name not in self._models
        if (is_new or is_to_load) and self._net.pick.random() < 0.3:
            await self._be_away(model.name)
            return  # what comes next may be another operation by now
        before, again, begun = self._restored(model), not queued.waits, model.begun
        if again and not await self._rebuild_model(model, queued):
            return
        body = b""
        if queued.body is not None:
            try:
                ref = queued.body
                body = await self.link.call(lambda: fetch(self.link.server, ref))
            except LogCorrupted:
                assert self._is_late(model, queued), f"the body of {model.name}:{queued.key} is gone"
                await self.sleep(0.1)
                return
        given_up = not again and not await self._begin(model, queued)
        await self.sleep(self._net.pick.random() * 0.5)
        if again:  # a failure that is on the log is not made good
            failed = queued.failed
            self._ledger.seen["operations executed again"] += 1
        else:
            strikes = queued.body is not None and self._net.faults.strikes(Fault.BROKEN_STEP)
            failed = given_up or queued.reads_removed or strikes
        state = after(b"" if queued.op == CREATE else before, queued.op, body)
        kept = before if failed or queued.passive else state
        if not again and not await self._tell(model, queued, b"failed" if failed else state, failed):
            return
        self._models[model.name] = (begun, queued.number, kept)
        if again and not any(each.number > queued.number and not each.waits for each in model.again()):
            await self._say_rebuilding(model.name, 0, over=True)
        if self._net.pick.random() < 0.3:
            await self._write_checkpoint(model.name, queued.number, kept)

    async def _rebuild_model(self, model: ClientModel, queued: Queued) -> bool:
        """Say what is executed again. Where no trainer survives that, wait for an operator, and return False."""
        if model.deadly(RULES.operations.executions_max, self._epoch):
            self._ledger.seen["models that no trainer makes again"] += 1
            await self._say_away(model.name, "no trainer survives it")
            await self.link.ask(inbox.Resume(id=self._net.fresh("resume"), engine=OPS_ENGINE))
            await self.sleep(self._net.pick.random())
            await self._say_away(model.name, "")
            return False
        if model.name not in self._models:
            self._doubted[model.name] = model.rebuilding_by not in (0, self._epoch)
            await self._say_rebuilding(model.name, 0)
        if self._doubted[model.name]:
            await self._say_rebuilding(model.name, queued.number)
        return True

    async def _say_rebuilding(self, model: str, number: int, over: bool = False) -> None:
        rebuilds = inbox.RebuildsModel(
            id=self._net.fresh("rebuilds"), engine=OPS_ENGINE, run=self._run, trainer_epoch=self._epoch, model=model,
            number=number, over=over,
        )  # fmt: skip
        await self.link.send(rebuilds)

    async def _be_away(self, model: str) -> None:
        """Say that a model cannot be made again for a while."""
        for why in ("its recovery checkpoint is away", ""):
            await self._say_away(model, why)
            await self.sleep(self._net.pick.random() * (5 if why else 1))

    async def _say_away(self, model: str, why: str) -> None:
        away = inbox.ModelAway(
            id=self._net.fresh("away"), engine=OPS_ENGINE, run=self._run, trainer_epoch=self._epoch, model=model,
            why=why,
        )  # fmt: skip
        await self.link.send(away)
        if not why:  # what was removed while it waited is known then
            await self.follower.wait_for(lambda: not self._is_ours() or not self._waits(model))

    def _waits(self, model: str) -> bool:
        found = self._engine.clients.models.get(model)
        return found is not None and found.closed is None and found.suspended != ""

    async def _begin(self, model: ClientModel, queued: Queued) -> bool:
        """Say that the first operation of a model is begun. Return False for one that too many trainers have begun."""
        if queued.begun_before(self._epoch) >= RULES.operations.executions_max:
            self._ledger.seen["operations given up"] += 1
            return False
        if model.name not in self._begun:
            self._begun.add(model.name)
            begins = inbox.OperationBegins(
                id=self._net.fresh("begins"), engine=OPS_ENGINE, run=self._run, trainer_epoch=self._epoch,
                model=model.name, number=queued.number, key=queued.key,
            )  # fmt: skip
            await self.link.send(begins)
        return True

    def _is_late(self, model: ClientModel, queued: Queued) -> bool:
        """Return whether the log has gone on, so that this body is not needed any more."""
        now = self._ledger.hive().engine(OPS_ENGINE)
        found = now.clients.models.get(model.name)
        ours = (now.run, now.trainer_epoch) == (self._run, self._epoch) and now.serves_operations
        return not ours or found is None or queued.number not in [each.number for each in found.again()]

    async def _tell(self, model: ClientModel, queued: Queued, result: bytes, failed: bool) -> bool:
        """Tell the coordinator a result. Return False when the run is another trainer's."""
        run, epoch, number, key = self._run, self._epoch, queued.number, queued.key
        saved = None
        if queued.op == SAVE or queued.save_as:
            ttl_s = self._net.pick.choice((0.0, 5.0))
            saved = SavedWeights(use="training", name=queued.save_as or key, folder="/w", address="a", ttl_s=ttl_s)
        while True:
            ref = await store(self.link, result)
            if self._net.pick.random() < 0.03:
                await self.sleep(self._net.pick.random() * 20)
            done = inbox.OperationDone(
                id=self._net.fresh("done"), engine=OPS_ENGINE, run=run, trainer_epoch=epoch, model=model.name,
                number=number, key=key, result=ref, failed=failed, closes=queued.op == END, saved=saved,
                made=ADAPTER if queued.op == CREATE else None,
            )  # fmt: skip
            try:
                await self.link.request(done, ANSWER_S)
            except Refused as refused:
                if refused.code != Code.BODY_GONE:
                    return False
                self._ledger.seen["results stored again"] += 1
                continue
            if self._net.pick.random() < 0.2:
                await self.link.send(msgspec.structs.replace(done, id=self._net.fresh("done")))
            return True

    async def _write_checkpoint(self, model: str, number: int, state: bytes) -> None:
        """Write a recovery checkpoint and report it once the log has the results of what is in it."""
        folder = self._net.fresh(f"recovery/{model}/")
        self._ledger.disk[folder] = (number, state)
        written = inbox.CheckpointWritten(
            id=self._net.fresh("checkpoint"), engine=OPS_ENGINE, run=self._run, trainer_epoch=self._epoch, model=model,
            number=number, folder=folder, digest="d",
        )  # fmt: skip
        await self.link.send(written)
