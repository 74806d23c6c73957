"""Steady clients, a trainer and a replica around the coordinator's core in virtual time, to see what pacing does."""

import heapq
import random
from collections.abc import Callable
from itertools import count

from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.events import DropReason
from bombus.hive.inbox import Granted
from tests.coordinator.core_in_memory import ENGINE, SECOND, CoreHarness

LOAD_S = 0.5


class Steady:
    """Each of `clients` plays one episode after another, of `episode_s` seconds (from, to).

    Any free client plays the next member of a group. It is sampled with the version served when it begins.
    """

    def __init__(self, seed: int, clients: int, episode_s: tuple[float, float], step_s: float, **rules: object) -> None:
        self.harness = CoreHarness()
        self.harness.boot(max_open_claims=10_000, **rules)  # type: ignore[arg-type]
        self.pick = random.Random(seed)
        self.episode_s, self.step_s = episode_s, step_s
        self.trained = self.dropped = 0  # episodes
        self.busy_s = 0.0  # of the trainer
        self._now_s = 0.0
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._waiting: dict[str, str] = {}  # by the id of the claim's message
        self._task = count()
        self._seen = len(self.harness.log)
        self._training = False
        for number in range(clients):
            self._after(self.pick.random() * episode_s[1], lambda number=number: self._claim(f"c{number}"))  # type: ignore[misc]

    def run(self, seconds: float) -> None:
        self._after(1.0, self._tick)
        while self._later and self._later[0][0] <= seconds:
            self._now_s, _, act = heapq.heappop(self._later)
            self.harness.now_ns = 1_000 * SECOND + int(self._now_s * SECOND)
            act()
            self._react()

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._later, (self._now_s + seconds, next(self._numbers), act))

    def _tick(self) -> None:
        run, version = self.harness.engine.run, self.harness.engine.replicas["r1"].version
        beat = inbox.ReplicaAlive(
            id=self.harness.id(), engine=ENGINE, replica="r1", url="http://r1", run=run, version=version
        )
        self.harness.send(beat)
        self.harness.send(inbox.Tick(id=self.harness.id()))
        self._after(1.0, self._tick)

    def _claim(self, client: str) -> None:
        message = self.harness.claim_message(client, wait_s=60.0, discard_timeout_s=1e5)
        self._waiting[message.id] = client
        self.harness.send(message)

    def _begin(self, client: str, granted: Granted) -> None:
        (episode,) = granted.episodes
        task = f"t{next(self._task) // self.harness.engine.collection.num_repeat}"
        self.harness.call(episode, self.harness.engine.replicas["r1"].version)
        self.harness.send(inbox.Touch(id=self.harness.id(), engine=ENGINE, episodes=(episode,), confirmed=()))

        def end() -> None:
            self.harness.end(episode, task, self.pick.random(), client)
            self._claim(client)

        self._after(self.pick.uniform(*self.episode_s), end)

    def _react(self) -> None:
        """React to the decisions since the last call."""
        harness = self.harness
        for message, client in list(self._waiting.items()):
            answer = harness.answers.get(message)
            if answer is None:
                continue
            del self._waiting[message]
            if isinstance(answer, Granted):
                self._begin(client, answer)
            else:
                self._claim(client)
        for event in harness.log[self._seen :]:
            if isinstance(event, ev.GroupDropped) and event.reason == DropReason.STALE:
                self.dropped += len(event.episodes)
        self._seen = len(harness.log)
        if harness.engine.batch is not None and not self._training:
            self._train(harness.engine.batch)

    def _train(self, batch: ev.BatchReady) -> None:
        self._training = True
        self.busy_s += self.step_s
        self.trained += sum(len(group.episodes) for group in batch.groups)

        def done() -> None:
            self.harness.step_done(batch.step)
            self._training = False
            self.harness.save_weights(batch.step)
            self._after(LOAD_S, lambda: self._load(batch.step))

        self._after(self.step_s, done)

    def _load(self, version: int) -> None:
        self.harness.load(version)
