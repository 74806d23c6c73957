"""One simulated hive: its processes, the faults that strike it, and what must hold after them."""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from bombus.bus.headers import EPOCH, INBOX
from tests.sim.client import Client, Mood, Operator
from tests.sim.coordinator import Coordinator
from tests.sim.faults import SCHEDULED, Fault, Faults
from tests.sim.gateway import Gateway
from tests.sim.grouped import GroupedClient, GroupedEngine
from tests.sim.grouped_ledger import GroupedLedger
from tests.sim.link import Net
from tests.sim.loop import Loop, Process
from tests.sim.mortal import FREED_S, MortalClient, SilenceLedger
from tests.sim.multi_model import MultiModelClient, SideEngine
from tests.sim.multi_model_ledger import MultiModelLedger
from tests.sim.operations import Ledger, OperationTrainer, TrainingClient
from tests.sim.referee import ENGINE, Referee
from tests.sim.replica import Replica
from tests.sim.rollout_groups import AtroposEnvironment, AtroposTrainer, PushedLedger
from tests.sim.server import EVENTS_STREAM, INBOX_STREAM, OPS_STREAM, SECOND, SIZE, TRAJECTORIES_STREAM, Message, Server
from tests.sim.trainer import Trainer
from tests.sim.variants import Variant

FAULTS_S = 25.0
LOSSES = 0.15  # per second, of the end of an inbox
LOST_MAX = 30
LEADER_S = 10.0  # until a coordinator leads: the lease, the time that a clock was set back, a late message
STEP_S = 150.0  # until another step is completed
QUIET_S = 60.0  # until every command is answered
REPORTING = 8  # in one of so many hives gateways report how they read the model
OPERATING = 10  # one of so many hives serves training operations too
SCORING = 4  # of so many hives as OPERATING says, the one that takes rollout groups
LOSING = 2  # of so many hives as OPERATING says, the one whose inbox loses its end now and then
GROUPED = 5  # of so many hives as OPERATING says, the one whose second engine makes rollout groups of episodes
MULTI_MODEL = 7  # of so many hives as OPERATING says, the one with a second engine and multi-model episodes
MORTAL = 6  # of so many hives as OPERATING says, the one with clients that show that they live, and die
OVER_S = 240.0  # an end that failed is tried again after a minute, twice
COMPACTING = 6  # of so many seeds, some compact their logs
EVENTS_MAX = {1: 60, 4: 150}  # by the rest of the seed: the size of a log that is compacted, in events


class World:
    """A hive made from `seed`. `rates` replaces the fault rates that it draws."""

    def __init__(
        self,
        seed: int,
        variant: Variant | None = None,
        trace: Callable[[str], None] | None = None,
        rates: Mapping[Fault, float] | None = None,
    ) -> None:
        pick = self.pick = random.Random(seed)
        self.loop = Loop()
        self.faults = Faults(pick)
        if rates is not None:
            self.faults.rates = {fault: rates.get(fault, 0.0) for fault in Fault}
        self.referee = Referee()
        operates = seed % OPERATING == OPERATING - 1
        scores = seed % OPERATING == SCORING
        groups = seed % OPERATING == GROUPED
        without = [*([] if operates else [OPS_STREAM]), *([] if scores or groups else [TRAJECTORIES_STREAM])]
        self.server = Server(
            self.loop, fence_first=pick.random() < 0.5, replicas=pick.choice((1, 1, 3)), without=without
        )
        self.server.events_max = EVENTS_MAX.get(seed % COMPACTING, 0)
        self.server.loses_ends = seed % OPERATING == LOSING
        self.server.streams[EVENTS_STREAM].watchers.append(self.referee.stored)
        self.server.streams[INBOX_STREAM].watchers.append(self.referee.received)
        self.mood = Mood(self.faults)
        self.net = Net(self.loop, self.server, self.faults, pick)
        self._trace = trace
        net, referee = self.net, self.referee
        self.coordinators = [Coordinator(f"c{n}", net, referee, variant) for n in range(pick.randint(2, 3))]
        self.gateways = [Gateway(f"g{n}", net, variant, reports=seed % REPORTING == 0) for n in range(2)]
        self.trainers = [Trainer(f"t{n}", net, referee, variant) for n in range(2)]
        keeps_name = pick.random() < 0.5
        self.replicas = [Replica(f"r{n}", net, referee, keeps_name, variant) for n in range(pick.randint(1, 2))]
        self.mortals: list[MortalClient] = []
        self.clients: list[Client | GroupedClient | MultiModelClient | MortalClient] = [
            Client(name, self.gateways, referee, self.mood, pick) for name in ("ann", "bob", "eve")
        ]
        self.operator = Operator(self.gateways, self.mood, pick)
        self._kinds: list[list[Process]] = [
            [*self.coordinators],
            [*self.gateways],
            [*self.trainers],
            [*self.replicas],
        ]
        self.training_clients: list[TrainingClient] = []
        self.executors: list[OperationTrainer] = []
        if operates:
            self._add_clients()
        if scores:
            self._add_pushed(variant)
        if groups:
            self._add_grouped()
        if seed % OPERATING == MULTI_MODEL:
            self._add_multi_model()
        if seed % OPERATING == MORTAL:
            self._add_mortals()
        if trace is not None:
            self.server.streams[EVENTS_STREAM].watchers.append(self._tell)

    def _add_clients(self) -> None:
        """Add clients of training operations, on an engine of their own, and its trainer."""
        ledger = Ledger(self.server, lambda: self.referee.hive, self.referee.seen)
        self.referee.ledger = ledger
        names = ("kim", "zoe")
        self.training_clients = [TrainingClient(name, self.net, ledger, lambda: self.mood.playing) for name in names]
        self.executors = [OperationTrainer(name, self.net, ledger) for name in ("o0", "o1")]
        self._kinds += [[*self.training_clients], [*self.executors]]

    def _add_pushed(self, variant: Variant | None) -> None:
        """Add environments and a trainer of rollout groups, on an engine of their own."""
        ledger = PushedLedger(self.server, lambda: self.referee.hive, self.referee.seen)
        self.referee.pushed = ledger
        environments = [AtroposEnvironment(name, self.net, ledger, lambda: self.mood.playing) for name in ("e0", "e1")]
        self._kinds += [[*environments], [AtroposTrainer("s0", self.net, ledger, lambda: self.mood.playing, variant)]]

    def _add_grouped(self) -> None:
        """Add an engine whose episodes become rollout groups, and clients that play on it."""
        ledger = GroupedLedger(self.server, lambda: self.referee.hive, self.referee.seen)
        self.referee.grouped = ledger
        self._kinds.append([GroupedEngine("grouped", self.net, self.mood)])
        self.clients += [GroupedClient(name, self.gateways, ledger, self.mood, self.pick) for name in ("pat", "sam")]

    def _add_multi_model(self) -> None:
        """Add a second engine, and clients that play on both at once."""
        ledger = MultiModelLedger(lambda: self.referee.hive, self.referee.seen)
        self.referee.multi_model = ledger
        self._kinds.append([SideEngine("side", self.net, self.mood)])
        multi = [MultiModelClient(name, self.gateways, ledger, self.mood, self.pick) for name in ("lou", "max")]
        self.clients += multi

    def _add_mortals(self) -> None:
        """Add clients that show that they live, and die."""
        referee = self.referee
        for gateway in self.gateways:
            gateway.hears_clients = True
        self.mortals = [MortalClient(name, self.gateways, self.mood, self.pick) for name in ("ida", "ned")]
        self.clients += self.mortals
        is_set = self.faults.rates[Fault.CLOCK] > 0
        ledger = SilenceLedger(lambda: referee.hive.engine(ENGINE), referee.count, is_set)
        self.server.streams[INBOX_STREAM].watchers.append(ledger.heard)
        self.server.streams[EVENTS_STREAM].watchers.append(ledger.decided)

    def _are_dead_freed(self) -> bool:
        """Return whether no episode is open that a client which has died holds."""
        living = {client.id for client in self.mortals}
        held = self.referee.hive.engine(ENGINE).open.values()
        return all(episode.client in living for episode in held if episode.touches)

    def _tell(self, messages: Sequence[Message]) -> None:
        for each in messages:
            self.say(f"#{each.seq} epoch {each.headers[EPOCH]} answers {each.headers[INBOX]}: {each.event}")

    def say(self, line: str) -> None:
        if self._trace is not None:
            self._trace(f"{self.loop.now_s:8.3f} {line}")

    @property
    def processes(self) -> list[Process]:
        return [process for kind in self._kinds for process in kind]

    def run(self) -> None:
        """Run a time with faults, one without, and one without new work. Raises `AssertionError`."""
        self._begin()
        self.loop.run(FAULTS_S)
        self.calm()
        self._expect_to_go_on()
        self.mood.playing = False
        self._expect(QUIET_S, lambda: not any(caller.pending for caller in self.clients), "every command is answered")
        ledger = self.referee.ledger
        if ledger is not None:
            self._expect(OVER_S, lambda: ledger.is_over, "every session of training operations is over")
            ledger.finish()
        pushed = self.referee.pushed
        if pushed is not None:
            self._expect(OVER_S, lambda: pushed.is_over, "every batch of rollout groups is delivered")
        self.loop.run(self.loop.now_s + 5.0)
        self._expect(QUIET_S, self._all_agree, "every service has folded the log")
        self.referee.finish()
        if pushed is not None:
            pushed.finish()
        for apart in (self.referee.grouped, self.referee.multi_model):
            if apart is not None:
                apart.finish()
        self.referee.refold(self.server.streams[EVENTS_STREAM].messages)

    def _begin(self) -> None:
        """Start all processes but the second trainers, and what strikes them."""
        for process in self.processes:
            if process is not self.trainers[1] and process not in self.executors[1:]:
                process.start()
        for caller in (*self.clients, self.operator):
            caller.start()
        for fault in SCHEDULED:
            self._schedule(fault)
        if self.server.loses_ends:
            self.loop.after(self.pick.expovariate(LOSSES), self._lose_end)

    def _expect_to_go_on(self) -> None:
        """Expect that a coordinator leads, and that it makes another step, and more batches of groups of episodes."""
        self._expect(LEADER_S, lambda: any(each.leads for each in self.coordinators), "a coordinator leads")
        self._expect(FREED_S, self._are_dead_freed, "the episodes of clients that have died are freed")
        steps = self.referee.seen["step.completed"]
        self._expect(STEP_S, lambda: self.referee.seen["step.completed"] > steps, "the engine makes another step")
        grouped = self.referee.grouped
        if grouped is not None:
            taken = grouped.taken
            self._expect(STEP_S, lambda: grouped.taken > taken + 1, "two more batches are made of groups of episodes")

    def _all_agree(self) -> bool:
        """Return whether every service has the referee's state, whichever snapshot it began at."""
        services: list[Gateway | Trainer | Replica] = [*self.gateways, *self.trainers, *self.replicas]
        folds = [service.follower for service in services if service.alive]
        if any(fold.position != self.referee.position for fold in folds):
            return False
        assert all(fold.hive == self.referee.hive for fold in folds), "a service's fold is not that of the log"
        return True

    def calm(self) -> None:
        """Stop all faults: start dead processes, resume stopped ones, reconnect the others."""
        self.say("calm")
        self.faults.on = False
        self.mood.meddling = False
        self.net.outage = False
        for link in self.net.links.values():
            link.cut = False
        for stream in self.server.streams.values():
            stream.used = 0
        for replica in self.replicas:
            replica.mounted = True
        for process in (*self.processes, *self.clients):
            if process.stopped:
                process.resume()
            if process.lives or (process is not self.trainers[1] and process not in self.executors[1:]):
                process.start()

    def _expect(self, within_s: float, holds: Callable[[], bool], what: str) -> None:
        met = self.loop.run(self.loop.now_s + within_s, holds)
        assert met, f"within {within_s:.0f} s of calm: {what} (phase {self.referee.hive.engine(ENGINE).phase})"

    # ---- faults ----

    def _schedule(self, fault: Fault) -> None:
        rate = self.faults.rates[fault]
        if rate:
            self.loop.after(self.pick.expovariate(rate), self._strike, fault)

    def _strike(self, fault: Fault) -> None:
        if not self.faults.on:
            return
        if whom := self._inject(fault):
            self.faults.counts[fault] += 1
            self.say(f"{fault}: {whom}")
        self._schedule(fault)

    def _inject(self, fault: Fault) -> str:
        """Inject a fault. Return what it struck, "" when there was nothing to strike."""
        pick = self.pick
        victim = pick.choice(pick.choice(self._kinds))
        seconds = pick.choice((0.3, 2.0, 6.0)) * pick.random()
        match fault:
            case Fault.KILL if victim.alive:
                victim.kill()
                self.loop.after(seconds, victim.start)
            case Fault.STOP if victim.alive:
                victim.stop()
                self.loop.after(2 * seconds, victim.resume)
            case Fault.PARTITION if victim.name in self.net.links:
                self.net.links[victim.name].cut = True
                self.loop.after(seconds, self._heal, victim.name)
            case Fault.VANISH:
                client = pick.choice(self.clients)
                client.kill()
                client.start()
                return client.name
            case Fault.ZOMBIE:
                # It opens the run while the other trainer, which does not know, continues.
                current = self.referee.hive.engine(ENGINE).trainer
                second = next(each for each in self.trainers if not current.startswith(each.name))
                second.kill()
                second.start()
                for executor in self.executors[1:]:
                    executor.kill()
                    executor.start()
                return second.name
            case Fault.LOST_CHECKPOINT:
                return self.referee.damage_checkpoint()
            case Fault.NO_MOUNT:
                return self._unmount()
            case _:
                return self._inject_into_server(fault, seconds)
        return f"{victim.name}, {seconds:.1f} s"

    def _inject_into_server(self, fault: Fault, seconds: float) -> str:
        pick, server = self.pick, self.server
        match fault:
            case Fault.OUTAGE:
                self.net.outage = True
                self.loop.after(seconds, self._end_outage)
                return f"for {seconds:.1f} s"
            case Fault.LEASE:
                server.lease = None
                return "now"
            case Fault.CLOCK:
                jump_s = pick.choice((-3600, -1, 3, 30, 300))
                server.jump_ns += jump_s * SECOND
                return f"by {jump_s} s"
            case Fault.FULL:
                stream = pick.choice(list(server.streams.values()))
                stream.used = pick.choice((SIZE - 5, SIZE, SIZE))
                self.loop.after(seconds, setattr, stream, "used", 0)
                return f"{stream.name} to {stream.used} %, {seconds:.1f} s"
            case Fault.DAMAGE:
                return server.damage_snapshot()
            case _:
                return ""

    def _lose_end(self) -> None:
        """Restart the server in a power cut, which its inbox does not survive as a whole."""
        if not self.faults.on:
            return
        lost = self.server.streams[INBOX_STREAM].lose(self.pick.randint(1, LOST_MAX))
        self.referee.lost(lost)
        self.say(f"the inbox loses its last {len(lost)} messages")
        self.net.outage = True
        self.net.restarts += 1
        self.loop.after(self.pick.random(), self._end_outage)
        self.loop.after(self.pick.expovariate(LOSSES), self._lose_end)

    def _unmount(self) -> str:
        """Take the weights' folder from a replica: for a while, or until the faults are over."""
        replica = self.pick.choice(self.replicas)
        replica.mounted = False
        seconds = self.pick.choice((2.0, 8.0, FAULTS_S))
        self.loop.after(seconds, setattr, replica, "mounted", True)
        return f"{replica.name}, {seconds:.0f} s"

    def _heal(self, name: str) -> None:
        self.net.links[name].cut = False

    def _end_outage(self) -> None:
        self.net.outage = False


def simulate(
    seed: int,
    variant: Variant | None = None,
    trace: Callable[[str], None] | None = None,
    rates: Mapping[Fault, float] | None = None,
) -> World:
    """Run one seed to its end. Raises `AssertionError` with the command that replays it."""
    world = World(seed, variant, trace, rates)
    try:
        world.run()
    except Exception as error:
        command = f"python -m tests.sim --seed {seed}"
        if variant is not None:
            command += f" --variant {variant.name}"
        if rates is not None:
            command += " --faults " + ",".join(f"{fault.name}={rate}" for fault, rate in rates.items())
        raise AssertionError(f"replay with: {command}: {error}") from error
    return world


def tally(world: World) -> Counter[str]:
    """Count the events and faults of a run."""
    return world.referee.seen + Counter({fault.name: count for fault, count in world.faults.counts.items()})
