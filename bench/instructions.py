"""Instructions of the coordinator's core for a claim and an end: the same number however noisy the machine is.

Messages are decided and folded in memory, and their events encoded; the bus is not in it. valgrind counts
(`apt install valgrind`), which takes half a minute. The shortest of two runs is taken from the longest, so that what
starts a process is not in the figure.
"""

import argparse
import os
import re
import subprocess
import sys

from bombus.hive import inbox
from bombus.hive.events import Collection, Weights, encode_event
from bombus.hive.state import Phase
from bombus_coordinator.core import Core

ENGINE = "main"
FEW, MANY = 100, 1_100  # episodes
STEP_NS = 1_000_000
COUNTED = re.compile(r"I +refs: +([\d,]+)")


class Run:
    """A core and its inbox, in memory."""

    def __init__(self) -> None:
        self._core = Core()
        self._seq, self._now_ns = 0, 10**12
        self._answers: dict[str, object] = {}
        self._core.open_epoch("leader")

    def send(self, message: inbox.AnyMessage) -> object:
        """Decide a message, and return its answer, if it has one."""
        self._seq, self._now_ns = self._seq + 1, self._now_ns + STEP_NS
        for each in [*self._core.receive(message, self._seq, self._now_ns), *self._core.flush()]:
            for event in each.decision.events:
                encode_event(event)
            for reply in each.decision.replies:
                self._answers[reply.command] = reply.answer
        return self._answers.pop(message.id, None)

    def boot(self) -> None:
        """Let an engine roll whose batches are never complete."""
        rules = Collection(batch_size=1_000, num_repeat=32, max_open_claims=100_000, max_pool_episodes=30_000)
        self.send(inbox.Configure(id="c", engine=ENGINE, config="{}", config_digest="d", collection=rules, model="m"))
        self.send(inbox.Start(id="s", engine=ENGINE))
        self.send(inbox.ReplicaAlive(id="a", engine=ENGINE, replica="r", url="http://r"))
        opened = self.send(inbox.TrainerOpens(id="o", engine=ENGINE, run=1, trainer="t"))
        assert isinstance(opened, inbox.Done)
        weights = Weights(where="/w")
        self.send(inbox.WeightsSaved(id="w", engine=ENGINE, run=1, step=0, trainer_epoch=opened.epoch, weights=weights))
        self.send(inbox.WeightsLoadedFact(id="l", engine=ENGINE, run=1, version=0, replica="r"))
        assert self._core.hive.engine(ENGINE).phase == Phase.ROLLING

    def play(self, name: int) -> None:
        """Claim an episode, and end it."""
        granted = self.send(inbox.Claim(id=f"k{name}", engine=ENGINE, claim=f"k{name}", client="c"))
        assert isinstance(granted, inbox.Granted)
        result = inbox.EpisodeResult(episode=granted.episodes[0], task=f"t{name}", reward=1.0)
        self.send(inbox.End(id=f"e{name}", engine=ENGINE, client="c", results=(result,)))


def counted(episodes: int) -> int:
    """Return the instructions of a process that plays so many episodes."""
    command = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]
    command += [sys.executable, "-m", "bench.instructions", "--play", str(episodes)]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}  # dicts of the same layout
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise SystemExit("valgrind is not installed: apt install valgrind") from None
    found = COUNTED.search(done.stderr)
    assert found, done.stderr
    return int(found[1].replace(",", ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--play", type=int, default=0, metavar="N", help="only play so many episodes")
    episodes = parser.parse_args().play
    if not episodes:
        counted(1)  # compiles what is not compiled yet
        print(f"a claim and an end   {(counted(MANY) - counted(FEW)) / (MANY - FEW) / 1e3:.1f} k instructions")
        return
    run = Run()
    run.boot()
    for name in range(episodes):
        run.play(name)


if __name__ == "__main__":
    main()
