"""Steady clients, a trainer and a replica around the coordinator's core in virtual time: what pacing makes of them."""

import heapq
import random
from collections.abc import Callable
from itertools import count

from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.events import DropReason
from bombus.hive.inbox import Granted
from tests.coordinator.core_in_memory import ENGINE, SECOND, Desk

LOAD_S = 0.5


class Steady:
    """Each of `clients` plays one episode after the other, of `episode_s` seconds (from, to).

    The members of a group are played by whoever is free. They are sampled with what is served when they begin.
    """

    def __init__(self, seed: int, clients: int, episode_s: tuple[float, float], step_s: float, **rules: object) -> None:
        self.desk = Desk()
        self.desk.boot(max_open_claims=10_000, **rules)  # type: ignore[arg-type]
        self.pick = random.Random(seed)
        self.episode_s, self.step_s = episode_s, step_s
        self.trained = self.dropped = 0  # episodes
        self.busy_s = 0.0  # of the trainer
        self._now_s = 0.0
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._waiting: dict[str, str] = {}  # the claim's message: its task
        self._task = count()
        self._seen = len(self.desk.log)
        self._training = False
        for number in range(clients):
            self._after(self.pick.random() * episode_s[1], lambda number=number: self._claim(f"c{number}"))  # type: ignore[misc]

    def run(self, seconds: float) -> None:
        self._after(1.0, self._tick)
        while self._later and self._later[0][0] <= seconds:
            self._now_s, _, act = heapq.heappop(self._later)
            self.desk.now_ns = 1_000 * SECOND + int(self._now_s * SECOND)
            act()
            self._notice()

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._later, (self._now_s + seconds, next(self._numbers), act))

    def _tick(self) -> None:
        self.desk.say(inbox.ReplicaAlive(id=self.desk.id(), engine=ENGINE, replica="r1", url="http://r1"))
        self.desk.say(inbox.Tick(id=self.desk.id()))
        self._after(1.0, self._tick)

    def _claim(self, client: str) -> None:
        message = self.desk.claim_message(client, wait_s=60.0, discard_timeout_s=1e5)
        self._waiting[message.id] = client
        self.desk.say(message)

    def _begin(self, client: str, granted: Granted) -> None:
        (episode,) = granted.episodes
        task = f"t{next(self._task) // self.desk.engine.collection.num_repeat}"
        self.desk.call(episode, self.desk.engine.replicas["r1"].version)
        self.desk.say(inbox.Touch(id=self.desk.id(), engine=ENGINE, episodes=(episode,), confirmed=()))

        def end() -> None:
            self.desk.end(episode, task, self.pick.random(), client)
            self._claim(client)

        self._after(self.pick.uniform(*self.episode_s), end)

    def _notice(self) -> None:
        """What the decisions since have brought about."""
        desk = self.desk
        for message, client in list(self._waiting.items()):
            answer = desk.answers.get(message)
            if answer is None:
                continue
            del self._waiting[message]
            if isinstance(answer, Granted):
                self._begin(client, answer)
            else:
                self._claim(client)
        for event in desk.log[self._seen :]:
            if isinstance(event, ev.GroupDropped) and event.reason == DropReason.STALE:
                self.dropped += len(event.episodes)
        self._seen = len(desk.log)
        if desk.engine.batch is not None and not self._training:
            self._train(desk.engine.batch)

    def _train(self, batch: ev.BatchReady) -> None:
        self._training = True
        self.busy_s += self.step_s
        self.trained += sum(len(group.episodes) for group in batch.groups)

        def done() -> None:
            self.desk.step_done(batch.step)
            self._training = False
            self.desk.save_weights(batch.step)
            self._after(LOAD_S, lambda: self._load(batch.step))

        self._after(self.step_s, done)

    def _load(self, version: int) -> None:
        self.desk.load(version)
