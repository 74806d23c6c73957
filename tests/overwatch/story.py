"""A made-up run of a hive from one seed, with the events that tests of the screen fold and draw."""

import math
import random
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

from bombus.bus import BlobMissing, Stored
from bombus.hive import events as ev
from bombus.hive.events import (
    AbortReason,
    AnyEvent,
    BatchEpisode,
    BatchGroup,
    Collection,
    EpisodeType,
    Event,
    NotedCall,
    Outcome,
    encode_event,
    kind_of,
)
from bombus.hive.records import BodyRef, CallRef
from bombus.hive.state import Hive
from bombus.hive.trajectories.queue import QueuedGroup
from bombus.insight.record import Record
from bombus.insight.watch import LogWatch
from bombus.replay.source import LogEnd, Source
from bombus_overwatch.model import HiveView

SECOND = 1_000_000_000
START_NS = 1_767_268_800 * SECOND  # 12:00:00 UTC
ENGINE = "main"
CLIENTS = ("maze-runner", "math-harness", "ann-laptop", "swe-agent-07")
TASKS = ("maze 7x7", "gcd chain", "word ladder", "sudoku 4x4", "brackets", "knights")
ADAPTER = ev.AdapterShape(rank=32, alpha=32.0)
RULES = Collection(batch_size=8, num_repeat=4)


class Story:
    """Events in order, with a clock that advances as they are told."""

    def __init__(self, seed: int = 7, engine: str = ENGINE) -> None:
        self.random = random.Random(seed)
        self.engine = engine
        self.now_ns = START_NS
        self.events: list[Event] = []
        self.run = 1
        self.episodes = 0
        self.calls = 0
        self.sampled: Counter[str] = Counter()  # tokens, by episode

    def tell(self, event: Event) -> None:
        self.events.append(event)

    def wait(self, seconds: float) -> None:
        self.now_ns += int(seconds * SECOND)

    @property
    def at(self) -> dict[str, Any]:
        return {"at_ns": self.now_ns, "engine": self.engine}

    def configure(self) -> None:
        self.tell(ev.EpochOpened(at_ns=self.now_ns, epoch=1, leader="coordinator-a"))
        self.wait(1)
        self.tell(
            ev.EngineConfigured(
                **self.at, config="{}", config_digest="9f2c41d07b", collection=RULES, model="Qwen2.5-0.5B-Instruct"
            )
        )

    def boot(self, replicas: int = 2) -> None:
        self.configure()
        self.wait(0.4)
        self.tell(ev.EngineStarted(**self.at, run=self.run, config_digest="9f2c41d07b"))
        for number in range(replicas):
            self.wait(0.3)
            name = f"replica-{'abcdef'[number]}"
            self.tell(ev.ReplicaJoined(**self.at, replica=name, url=f"http://10.0.0.{number + 4}:8000"))
        self.tell(ev.TrainerOpened(**self.at, run=self.run, trainer="trainer-0", trainer_epoch=1))
        for stage, seconds in (("reading the model", 6.2), ("writing version 0", 3.1), ("replicas load", 2.4)):
            self.tell(ev.EngineProgressed(**self.at, run=self.run, stage=stage))
            self.wait(seconds)

    def publish(self, version: int, replicas: int = 2) -> None:
        weights = ev.Weights(where=f"weights/{version}", bytes=988_000_000, sha256="ab" * 32)
        self.tell(ev.WeightsReady(**self.at, run=self.run, version=version, weights=weights))
        for number in range(replicas):
            self.wait(0.4)
            name = f"replica-{'abcdef'[number]}"
            self.tell(ev.WeightsLoaded(**self.at, run=self.run, version=version, replica=name))
        if version == 0:
            self.tell(ev.EngineBooted(**self.at, run=self.run))
        self.tell(ev.RollingStarted(**self.at, run=self.run, version=version))

    def claim(self, version: int, task: str, kind: EpisodeType = EpisodeType.TRAIN, limit_s: float = 240.0) -> str:
        self.episodes += 1
        episode = f"{self.engine}-{self.run}-{self.episodes}"
        self.wait(self.random.uniform(0.01, 0.06))
        self.tell(
            ev.EpisodeClaimed(
                **self.at,
                run=self.run,
                claim=f"c{self.episodes}",
                client=CLIENTS[self.episodes % len(CLIENTS)],
                episodes=(episode,),
                type=kind,
                discard_timeout_s=limit_s,
                version=version,
                task_hint=task,
            )
        )
        return episode

    def call(self, version: int, *episodes: str) -> None:
        noted = []
        for episode in episodes:
            self.calls += 1
            ref = CallRef(self.calls, f"call{self.calls}", b"0" * 16)
            tokens = self.random.randint(40, 180)
            merged = self.random.random() < 0.9
            noted.append(NotedCall(episode, ref, 3 * tokens, tokens, version, version, merged=merged))
            self.sampled[episode] += tokens
        self.wait(self.random.uniform(0.02, 0.09))
        self.tell(ev.CallsNoted(**self.at, run=self.run, calls=tuple(noted)))

    def end(
        self,
        version: int,
        episode: str,
        task: str,
        reward: float,
        kind: EpisodeType = EpisodeType.TRAIN,
        data_set: str = "",
    ) -> None:
        number = int(episode.rpartition("-")[2])
        outcome = Outcome(
            episode=episode,
            task=task,
            reward=reward,
            digest=b"d" * 16,
            completion_tokens=self.sampled[episode],
            is_success=reward > 0.9,
            data_set=data_set,
        )
        self.wait(self.random.uniform(0.01, 0.05))
        self.tell(
            ev.EpisodeEnded(
                **self.at,
                run=self.run,
                client=CLIENTS[number % len(CLIENTS)],
                type=kind,
                version=version,
                outcomes=(outcome,),
            )
        )

    def abort(self, reason: AbortReason, *episodes: str, detail: str = "") -> None:
        self.tell(ev.EpisodeAborted(**self.at, run=self.run, episodes=episodes, reason=reason, detail=detail))

    def skill(self, version: int) -> float:
        return 0.12 + 0.7 / (1 + math.exp(-(version - 16) / 5)) + self.random.uniform(-0.05, 0.05)

    def groups(self, version: int, count: int) -> Iterator[BatchGroup]:
        """Yield groups of finished episodes, as the batch will name them."""
        for number in range(count):
            task = TASKS[(version + number) % len(TASKS)] + f" #{version * count + number}"
            episodes = [self.claim(version, task) for _ in range(RULES.num_repeat)]
            for _ in range(2):
                self.call(version, *episodes)
            members = []
            for episode in episodes:
                reward = min(1.0, max(0.0, self.random.gauss(self.skill(version), 0.2)))
                self.end(version, episode, task, reward)
                members.append(BatchEpisode(episode=episode, reward=reward, calls=()))
            yield BatchGroup(task=task, episodes=tuple(members))

    def train(self, version: int) -> None:
        """Tell one batch of `version`, and its step."""
        groups = tuple(self.groups(version, RULES.batch_size))
        step = version + 1
        self.tell(ev.RollingClosed(**self.at, run=self.run))
        self.tell(ev.BatchReady(**self.at, run=self.run, step=step, groups=groups, config_digest="9f2c41d07b"))
        self.tell(ev.SyncingStarted(**self.at, run=self.run))
        self.wait(3.2)
        metrics = {
            "loss": 0.4 * math.exp(-step / 12) + self.random.uniform(-0.02, 0.02),
            "grad_norm": 0.9 + self.random.uniform(-0.2, 0.3),
            "staleness_mean": 0.0,
            "merged_share": 0.93,
            "clip_fraction": 0.012,
            "sampler_kl": 0.0008,
            "sequences": 34.0,
            "tokens": 7312.0,
        }
        self.tell(
            ev.StepCompleted(
                **self.at,
                run=self.run,
                step=step,
                trainer_epoch=1,
                checkpoint=f"step-{step}",
                checkpoint_digest="cd" * 16,
                metrics=metrics,
            )
        )
        self.publish(step)

    def evaluate(self, version: int, count: int = 6) -> None:
        for number in range(count):
            episode = self.claim(version, f"held-out {number}", EpisodeType.EVAL)
            self.call(version, episode)
            self.end(version, episode, f"held-out {number}", self.skill(version) - 0.04, EpisodeType.EVAL)


def rolling(steps: int = 32) -> Story:
    """Return a run that has trained for a while and is collecting the next batch."""
    story = Story()
    story.boot()
    story.publish(0)
    for version in range(steps):
        if version % 4 == 0:
            story.evaluate(version)
        story.train(version)
        if version == 9:
            story.abort(AbortReason.INFRA, story.claim(version, "gcd chain"), detail="tool server unreachable")
    list(story.groups(steps, 5))
    old = [story.claim(steps, "word ladder #260", limit_s=60.0) for _ in range(3)]
    story.call(steps, *old)
    story.wait(31)
    young = [story.claim(steps, f"{task} #261") for task in TASKS]
    story.call(steps, *young[:4])
    story.evaluate(steps, count=2)
    lost = [story.claim(steps, "brackets #262") for _ in range(2)]
    story.abort(AbortReason.IDLE, *lost)
    dropped = ("t1", "t2")
    story.tell(
        ev.GroupDropped(
            **story.at, run=1, reason=ev.DropReason.NO_SIGNAL, tasks=dropped, episodes=tuple(f"x{n}" for n in range(8))
        )
    )
    story.call(steps, *young[:3])
    story.wait(14)
    story.call(steps, *young[2:])
    return story


def operating(steps: int = 12) -> Story:
    """Return a run of training operations: one model learns from episodes of what it saves, and another one waits."""
    story = Story(engine=ENGINE)
    body = BodyRef(seqs=(1,), size=40_000, digest=b"d" * 16)
    names = ("s-5f2c:train:0", "reference")
    numbers = dict.fromkeys(names, 0)

    def tell(kind: Callable[..., Event], **fields: Any) -> None:
        story.wait(0.05)
        story.tell(kind(**story.at, run=1, **fields))

    def accept(model: str, op: str) -> str:
        numbers[model] += 1
        key = str(numbers[model])
        tell(ev.OperationAccepted, model=model, number=numbers[model], key=key, op=op, body=body)
        return key

    def operate(model: str, op: str, **more: Any) -> None:
        key = accept(model, op)
        story.wait(0.6)
        given = {"number": numbers[model], "key": key, "op": op, "trainer_epoch": 1, "result": body}
        tell(ev.OperationCompleted, model=model, **given, **more)

    def snapshot(name: str, step: int) -> str:
        saved = ev.SavedWeights(use="sampler", name=name, folder=f"/w/{name}", address="ad", size_bytes=4_200_000)
        operate(names[0], "save_weights", step=step)
        tell(ev.WeightsKept, model=names[0], session="s-5f2c", base="tiny", saved=saved, adapter=ADAPTER)
        return f"{names[0]}/sampler/{name}"

    def play(sampler: str, count: int) -> list[str]:
        story.episodes += count
        first = story.episodes - count + 1
        claimed = tuple(f"{ENGINE}-1-{number}" for number in range(first, first + count))
        weights = ev.SamplerWeights(checkpoint=sampler, address="ad", folder="/w")
        tell(ev.EpisodeClaimed, claim=f"c{first}", client="ann-laptop", episodes=claimed, sampler=weights)
        for _ in range(2):
            story.call(0, *claimed)
        return list(claimed)

    story.configure()
    started = {"config_digest": "9f2c41d07b", "base": "tiny"}
    tell(ev.EngineStarted, **started)
    story.tell(ev.ReplicaJoined(**story.at, replica="replica-a", url="http://10.0.0.4:8000"))
    tell(ev.TrainerOpened, trainer="trainer-0", trainer_epoch=1)
    tell(ev.EngineBooted)
    tell(ev.RollingStarted, version=-1)
    for name, shape in zip(names, (ADAPTER, None)):
        tell(ev.ModelOpened, model=name, session="s-5f2c", base="tiny")
        operate(name, "create_model", made=ev.ModelShape(adapter=shape, parameters=9000))
    for step in range(1, steps + 1):
        episodes = play(snapshot(f"step-{step}", step - 1), 8)
        for episode in episodes:
            story.end(0, episode, "gcd chain", 0.1 + 0.06 * step + 0.01 * (int(episode[-1]) % 3))
        tell(ev.EpisodesTaken, client="ann-laptop", episodes=tuple(episodes))
        loss = 900.0 - 50.0 * step
        operate(names[0], "forward_backward", step=step - 1, metrics={"loss": loss, "tokens": 600.0})
        operate(names[0], "optim_step", step=step, metrics={"grad_norm": 2.0 - 0.1 * step, "divisor": 1.0})
    play(snapshot("last", steps), 4)
    accept(names[1], "forward_backward")
    return story


def failed() -> Story:
    """Return a run that could not boot."""
    story = Story()
    story.boot(replicas=1)
    story.tell(
        ev.EngineFailed(
            **story.at,
            run=1,
            reason="replica-a could not load version 0: the safetensors file is 988,000,000 bytes long and its header "
            "names 988,097,824; copy it again, or check that the shared folder is not full",
        )
    )
    return story


def chaos(seed: int, count: int = 150) -> list[Event]:
    """Return events of every kind in random order, since a fold must accept any events that are on a log."""
    story = Story(seed)
    draw = story.random
    episodes: list[str] = []

    def some() -> str:
        return draw.choice(episodes) if episodes else "main-1-0"

    def tell(kind: Callable[..., Event], **fields: Any) -> None:
        story.tell(kind(**story.at, run=story.run, **fields))

    def boot() -> None:
        story.run += 1  # no log has two runs of a number
        story.boot(1)

    def restart() -> None:
        story.run += 1
        story.tell(ev.EngineStarted(**story.at, run=story.run, config_digest="d"))

    def read(template: str) -> None:
        found = ev.ConversationFormat(template=template, tool_calls="hermes", reasoning="text")
        tell(ev.ModelRead, gateway="gateway-a", format=found)

    replica, model = "replica-a", "s:train:0"
    body = BodyRef(seqs=(1,), size=9, digest=b"d" * 16)
    kept = ev.SavedWeights(use="training", name="w", folder="/w", address="aa")

    def operate() -> None:
        tell(ev.ModelOpened, model=model, session="s", base="tiny")
        tell(ev.OperationAccepted, model=model, number=1, key="1", op="optim_step", body=body)

    actions: list[Callable[[], object]] = [
        *4 * [lambda: episodes.append(story.claim(0, "t"))],
        *4 * [lambda: story.call(draw.randint(0, 3), some(), some())],
        *4 * [lambda: story.end(draw.randint(0, 3), some(), draw.choice(TASKS), draw.random())],
        lambda: story.end(1, some(), "t", draw.random(), EpisodeType.EVAL),
        lambda: story.abort(draw.choice(list(AbortReason)), some(), detail="why"),
        lambda: tell(ev.GroupDropped, reason=ev.DropReason.STALE, tasks=("t",), episodes=(some(), some())),
        lambda: tell(ev.EpisodesTaken, client="ann", episodes=(some(), some())),
        lambda: story.tell(ev.LeadingPaused(at_ns=story.now_ns, since_ns=story.now_ns - 7 * SECOND)),
        lambda: story.tell(ev.StorageFilled(what="calls", used=95, size=100, why="nearly full")),
        lambda: story.tell(ev.StorageFreed(what="calls", used=5, size=100)),
        lambda: story.tell(ev.CompactionFailed(why="the archive cannot be written")),
        lambda: story.tell(ev.LogCompacted(below=7)),
        lambda: story.tell(ev.StreamWentBack(what="calls", known=90, kept=60, needed=2)),
        lambda: story.tell(ev.MessageDeadLettered(message="end", about="main", id="m", why="ValueError")),
        lambda: tell(ev.PoolCleared, reason=ev.DropReason.OVERFLOW, episodes=3, bytes=99),
        lambda: story.train(draw.randint(0, 3)),
        lambda: tell(ev.StepFailed, step=1, trainer_epoch=1, reason="out of memory", failures=1),
        lambda: tell(ev.TrainerStalled, trainer="trainer-0", trainer_epoch=1, doing="step 1", still_s=600.0),
        lambda: story.publish(draw.randint(0, 5)),
        boot,
        lambda: story.tell(ev.ReplicaLeft(**story.at, replica=replica, reason="silent")),
        lambda: tell(ev.ReplicaQuarantined, replica=replica, version=0, reason="no such folder"),
        lambda: tell(ev.SyncAgreed, client="ann"),
        lambda: read(draw.choice("abc")),
        lambda: tell(ev.EngineStopped),
        lambda: tell(ev.CommandAnswered, command="c", why="it is started already"),
        lambda: tell(ev.EngineFailed, reason="a reason"),
        lambda: tell(ev.EngineSuspended, reason="out of memory"),
        lambda: tell(ev.EngineResumed, command="r"),
        restart,
        lambda: story.tell(ev.SessionOpened(**story.at, session="s", idle_s=60.0, owner="ann")),
        lambda: story.tell(ev.SessionEnded(**story.at, session="s", reason=ev.SessionEnd.IDLE)),
        lambda: story.tell(ev.SessionForgotten(**story.at, session="s")),
        lambda: tell(ev.SamplingBegun, session="s"),
        operate,
        lambda: tell(
            ev.OperationCompleted, model=model, number=1, key="1", op="optim_step", trainer_epoch=1, result=body
        ),
        lambda: tell(ev.OperationBegun, model=model, number=1, key="1", trainer_epoch=1),
        lambda: tell(ev.ModelSuspended, model=model, why="its recovery checkpoint is away"),
        lambda: tell(ev.ModelRebuilding, model=model, trainer_epoch=1, number=draw.randint(0, 3)),
        lambda: tell(ev.ModelCheckpointed, model=model, number=1, trainer_epoch=1, folder="/c", digest="d"),
        lambda: tell(ev.ModelClosed, model=model, reason=ev.ModelEnd.ENDED),
        lambda: tell(ev.WeightsKept, model=model, session="s", base="tiny", saved=kept),
        lambda: story.tell(ev.WeightsRemoved(**story.at, model=model, use="training", name="w")),
        lambda: story.tell(ev.EndpointAdded(**story.at, host="gpu-1", port=30000)),
        lambda: story.tell(ev.EndpointRemoved(**story.at, host="gpu-1", port=30000)),
        lambda: tell(ev.RestAsked, asleep=True),
        lambda: tell(ev.RestReached, trainer_epoch=1, asleep=True),
        lambda: story.tell(ev.OperationsReleased(below=2, models=(ev.ModelFloor("main", model, 2),))),
        *scored(story),
    ]
    while len(story.events) < count:
        story.wait(draw.random())
        draw.choice(actions)()
    return story.events[:count]


def scored(story: Story) -> list[Callable[[], None]]:
    """Return what can happen to rollout groups, in any order."""
    draw = story.random

    def tell(kind: type[Event], **given: Any) -> None:
        story.tell(kind(**story.at, **given))

    def push() -> None:
        group = QueuedGroup(environment=draw.choice((None, 0, 1)), sequences=draw.randint(1, 4), tokens=9)
        tell(ev.GroupsPushed, groups=(group,), key=str(draw.randint(0, 3)))

    def join() -> None:
        number = draw.randint(0, 1)
        size = {"max_tokens": 9, "weight": 1.0, "group_size": draw.randint(1, 4), "minimum": draw.choice((None, 0.5))}
        tell(ev.EnvironmentJoined, environment=number, desired_name="gsm", name=f"gsm_{number}", **size)

    trainer = {"trainer": "7", "max_token_len": 9, "checkpoint_dir": "/c", "save_checkpoint_interval": 1}
    steps = {"starting_step": 0, "num_steps": 3}
    return [
        lambda: tell(ev.TrainerRegistered, run=story.run, batch_size=draw.randint(1, 4), **trainer, **steps),
        lambda: tell(ev.BatchesBegun, run=story.run),
        join,
        lambda: tell(ev.EnvironmentLeft, environment=draw.randint(0, 1), reason=ev.EnvironmentEnd.SILENT),
        push,
        lambda: tell(ev.BatchHandedOut, run=story.run, number=1, groups=(draw.randint(1, 9),)),
        lambda: tell(ev.BatchDelivered, run=story.run, number=1),
        lambda: tell(ev.GroupsReset),
        lambda: tell(ev.GroupsGivenUp, run=story.run, number=draw.randint(0, 1), groups=(1,), why="lost"),
        lambda: tell(ev.BodiesMoved, moved=(ev.MovedBody(1, BodyRef(seqs=(5,), size=1, digest=b"d" * 16)),)),
        lambda: story.tell(ev.TrajectoriesReleased(below=2)),
    ]


class Folded(Record):
    """The record of a log of these events."""

    live: HiveView

    def __init__(self, events: Iterable[Event] = ()) -> None:
        super().__init__(Hive(), 0, HiveView)
        for position, event in enumerate(events, 1):
            self.fold(position, cast(AnyEvent, event), event.at_ns)


class ToldSource(Source):
    """A log in memory."""

    running = True
    title, hive = "a story", "demo"

    def __init__(self) -> None:
        self.told: list[Stored] = []

    async def base(self) -> tuple[Hive, int]:
        return Hive(), 0

    async def end(self) -> LogEnd:
        return LogEnd(len(self.told), 0)

    async def stored(self, after: int = 0, until: int | None = None) -> AsyncGenerator[Stored, None]:
        for stored in self.told[after:until]:
            yield stored

    async def messages(self, stream: str, seqs: Sequence[int]) -> list[bytes | None]:
        return [None for _ in seqs]

    async def blob(self, name: str) -> bytes:
        raise BlobMissing(f"{self.title} has no object {name}")


class ToldWatch(LogWatch):
    """A log that a test tells event by event."""

    source: ToldSource

    def __init__(self, events: Iterable[Event] = ()) -> None:
        super().__init__(self._opened, moment=HiveView)
        self.source, self.is_ready = ToldSource(), True
        self.begin(Hive(), 0)
        self.tell(*events)

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[Source]:
        yield self.source

    def tell(self, *events: Event) -> None:
        for event in events:
            stored = Stored(self.position + 1, kind_of(event), encode_event(event), {}, event.at_ns)
            self.source.told.append(stored)
            self.take(stored)
        self._notify()
