"""Sends the same random requests to two servers of the trajectory API, and compares each answer.

    python -m tests.atropos.differential THEIRS [OURS] --sequences 2000

THEIRS and OURS are base URLs; without the second, ours is `tests.atropos.adapter`. Requests are those that clients
make: a trainer registers, environments join and leave, push groups of one size or of several, ask for their standing,
and the trainer takes batches until there is none. An answer may differ only for a reason of
`tests.atropos.differences` whose condition has come up.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations
from random import Random
from typing import Any

import httpx

from bombus.terminal import say
from tests.atropos import adapter
from tests.atropos.differences import BATCH, DIFFERENCES, PUSH, STANDING, STATUS, Why

Batch = tuple[int, ...]  # the groups of a batch, by what tells them apart
BATCHES_MAX = 1_000


@dataclass
class Joined:
    """An environment, as its client knows it."""

    group_size: int
    weight: float
    minimum: float | None
    connected: bool = True
    held: list[tuple[int, int]] = field(default_factory=list)  # groups and their sizes


@dataclass
class Found:
    """What a sequence of requests came to: how often each reason explained an answer, and what nothing explains."""

    explained: Counter[Why] = field(default_factory=Counter)
    unexplained: list[str] = field(default_factory=list)
    answers: int = 0


class Sequence:
    """One random sequence of requests, the same for both servers."""

    def __init__(self, ours: httpx.Client, theirs: httpx.Client, seed: int) -> None:
        self.random = Random(seed)
        self.ours, self.theirs, self.seed = ours, theirs, seed
        self.found = Found()
        self.raised: list[Why] = []
        self.joined: dict[int, Joined] = {}
        self.queued: dict[int, tuple[int | None, int]] = {}
        self.pushed = 0
        self.is_over = False
        self.batch_size = self.random.choice([4, 6, 8, 12, 16])
        divisors = [size for size in range(1, self.batch_size + 1) if self.batch_size % size == 0]
        powers = [size for size in (1, 2, 4, 8, 16) if size <= self.batch_size]
        one = [self.random.choice(divisors)]
        self.sizes = self.random.choice([one, powers, divisors, [*range(1, self.batch_size + 1)]])
        self.environments_max = self.random.choice([1, 1, 3, 5])
        minimums: list[list[float | None]] = [[None], [None], [None, 0.25, 0.5, 0.8]]
        self.minimums = self.random.choice(minimums)
        self.splits = self.random.choice([0.0, 0.0, 0.5])
        self.anonymous = self.random.choice([0.0, 0.2])

    def run(self) -> Found:
        self.both("GET", "/reset_data")
        self.both("POST", "/register-env", self._environment())
        register = {"wandb_group": "g", "wandb_project": "p", "batch_size": self.batch_size, "max_token_len": 64}
        steps = {"checkpoint_dir": "", "save_checkpoint_interval": 5, "starting_step": 3, "num_steps": 100}
        for client in (self.ours, self.theirs):
            assert "uuid" in client.post("/register", json=register | steps).json()
        self.both("POST", "/register-env", self._environment())
        self.drain()
        for _ in range(self.random.randint(0, self.environments_max)):
            self.join()
        for _ in range(self.random.randint(1, 4)):
            for _ in range(self.random.randint(2, 12)):
                act = self.random.choices([self.join, self.leave, self.push, self.ask], [1.5, 0.3, 6, 1.5])[0]
                act()
            self.drain()
            if self.is_over:
                break
        return self.found

    # ---- what clients do --------------------------------------------------------------------------------------

    def _environment(self) -> dict[str, Any]:
        weight = self.random.choice([0.0, 0.5, 1.0, 1.0, 1.0, 2.0, 4.0])
        return {
            "max_token_length": self.random.choice([16, 64]),
            "desired_name": self.random.choice(["math", "code"]),
            "weight": weight,
            "group_size": self.random.choice(self.sizes),
            "min_batch_allocation": self.random.choice(self.minimums),
        }

    def join(self) -> None:
        if len(self.joined) >= self.environments_max:
            return
        body = self._environment()
        answer = self.both("POST", "/register-env", body)
        self.joined[answer["env_id"]] = Joined(body["group_size"], body["weight"], body["min_batch_allocation"])

    def leave(self) -> None:
        if not self._connected():
            return
        id = self.random.choice(self._connected())
        self.joined[id].connected = False
        if self.joined[id].held:
            self.raised.append(Why.LEFT)
            self.queued.update((group, (id, size)) for group, size in self.joined[id].held)
        self.both("POST", "/disconnect-env", {"env_id": id})

    def push(self) -> None:
        bodies = [self._group() for _ in range(self.random.choice([1, 1, 1, 2, 4]))]
        if len(bodies) == 1:
            self.both("POST", "/scored_data", bodies[0])
        else:
            self.both("POST", "/scored_data_list", bodies)

    def ask(self) -> None:
        self.both("GET", "/status")
        if self._connected():
            if not any(self.joined[id].weight for id in self._connected()):
                self.raised.append(Why.NO_WEIGHT)
            self.both("GET", "/status-env", {"env_id": self.random.choice(self._connected())})
            self.raised = [why for why in self.raised if why != Why.NO_WEIGHT]

    def _connected(self) -> list[int]:
        return [id for id, each in self.joined.items() if each.connected]

    def _group(self) -> dict[str, Any]:
        """Return a rollout group, all of whose tokens are its number."""
        self.pushed += 1
        senders = self._connected()
        sender = None if not senders or self.random.random() < self.anonymous else self.random.choice(senders)
        size = self.random.choice(self.sizes)
        if sender is not None:
            whole = self.joined[sender].group_size
            chance = self.random.random()
            size = whole if chance >= self.splits else size if chance < 0.03 else self.random.randint(1, whole)
        self._note(sender, self.pushed, size)
        rows = [[self.pushed]] * size
        return {"tokens": rows, "masks": rows, "scores": [0.5] * size, "env_id": sender}

    def _note(self, sender: int | None, group: int, size: int) -> None:
        """Keep account of a group as ours does, and of the conditions under which theirs does otherwise."""
        self.queued[group] = (sender, size)
        if sender is None or size == self.joined[sender].group_size:
            return
        each = self.joined[sender]
        if size > each.group_size:
            self.raised.append(Why.LARGER)
            return
        del self.queued[group]
        each.held.append((group, size))
        oldest = first_of(each.held, each.group_size)
        if oldest:
            self.raised.append(Why.COMBINED)
            if not adds_up_in_order(each.held, each.group_size):
                self.raised.append(Why.COMBINED_OLDEST)
            self.queued.update((group, (sender, size)) for group, size in oldest)
            each.held = [held for held in each.held if held not in oldest]

    # ---- comparing --------------------------------------------------------------------------------------------

    def both(self, method: str, path: str, body: object = None) -> Any:
        """Send a request to both servers, compare their answers, and return ours."""
        # Environments ask for their standing on a connection of its own, and a server that fails closes it.
        headers = {"Connection": "close"} if path == STANDING else None
        both = (client.request(method, path, json=body, headers=headers) for client in (self.ours, self.theirs))
        ours, theirs = map(answer_of, both)
        route = PUSH if path.startswith(PUSH) else path
        self._compare(f"{method} {path} {body}", route, ours, theirs, self.raised)
        return ours

    def _compare(self, what: str, route: str, ours: object, theirs: object, possible: list[Why]) -> None:
        self.found.answers += 1
        if ours == theirs:
            return
        why = next((why for why in possible if route in DIFFERENCES[why].covers), None)
        if why is None:
            self.found.unexplained.append(f"seed {self.seed}: {what}\n  ours   {ours}\n  theirs {theirs}")
            self.is_over = True
        else:
            self.found.explained[why] += 1

    def drain(self) -> None:
        """Take batches until there is none, as trainers do, and compare them and what is left."""
        before = dict(self.queued)
        ours, our_status = self._taken(self.ours)
        theirs, their_status = self._taken(self.theirs)
        self._check_ours(ours)
        ahead = [Why.FORMED_AHEAD] if len(theirs) > 1 else []
        differing = self._conditions(before, more=len(ours) > len(theirs))
        if ours != theirs and ours == theirs[::-1]:
            self._compare(f"the order of {before}", BATCH, ours, theirs, ahead)
        else:
            self._compare(f"batches of {before}, {self.joined}", BATCH, ours, theirs, differing)
        in_number = differing if len(ours) > len(theirs) else self._with_fewer(before, differing)
        self._compare(
            "the number of batches", BATCH, len(ours), len(theirs), [why for why in in_number if why != Why.FAIR]
        )
        if sorted(ours) == sorted(theirs):
            self._compare(
                "status after the first of several batches", STATUS, our_status, their_status, ahead + self.raised
            )
            self.both("GET", "/status")
        else:
            self.is_over = True  # from here on the two have other groups

    def _conditions(self, queued: dict[int, tuple[int | None, int]], more: bool) -> list[Why]:
        """Return the reasons for which a queue can make other batches, or `more` of them."""
        sizes = {size for _, size in queued.values()}
        owners = {owner for owner, _ in queued.values()}
        minimums = [each for each in self.joined.values() if each.minimum is not None]
        found = [*self.raised]
        if minimums and None in owners:
            found.append(Why.ANONYMOUS)
        if any(each.connected for each in minimums):
            found.append(Why.MINIMUM)
        if len(sizes) > 1:
            found.append(Why.EXACT if more else Why.OLDEST)
        if len(owners) > 1:
            found.append(Why.FAIR)
        return found

    def _with_fewer(self, queued: dict[int, tuple[int | None, int]], differing: list[Why]) -> list[Why]:
        """Return the reasons for which ours can have fewer batches than theirs.

        Taking the oldest group first leaves a remainder only where there are sizes that do not divide each other.
        """
        sizes = sorted({size for _, size in queued.values()})
        even = all(larger % smaller == 0 for smaller, larger in zip(sizes, [*sizes[1:], self.batch_size]))
        possible = {Why.MINIMUM, Why.COMBINED, Why.COMBINED_OLDEST, *([] if even else [Why.OLDEST])}
        return [why for why in differing if why in possible]

    def _taken(self, client: httpx.Client) -> tuple[list[Batch], object]:
        """Return all batches that a server has now, and its status after the first."""
        batches: list[Batch] = []
        status: object = None
        for _ in range(BATCHES_MAX):
            batch = client.get("/batch").json()["batch"]
            if batch is None:
                return batches, status
            batches.append(tuple(sorted(group["tokens"][0][0] for group in batch)))
            status = status or client.get("/status").json()
        raise AssertionError("a server that always has another batch")

    def _check_ours(self, batches: list[Batch]) -> None:
        """Check our batches by themselves: exact, each group once, and none is left that could be formed."""
        for batch in batches:
            sizes = [self.queued.pop(group)[1] for group in batch]
            assert sum(sizes) == self.batch_size, (self.seed, batch, sizes)
        if Why.COMBINED in self.raised or any(each.minimum for each in self.joined.values() if each.connected):
            return  # what was combined is one group, and a minimum can be waited for
        sums = {0}
        for _, size in self.queued.values():
            sums |= {each + size for each in sums}
        assert self.batch_size not in sums, (self.seed, self.queued)


def first_of(held: list[tuple[int, int]], total: int) -> tuple[tuple[int, int], ...]:
    """Return the first of all selections, oldest groups first, that add up to a total."""
    every = (chosen for count in range(1, len(held) + 1) for chosen in combinations(held, count))
    return min((chosen for chosen in every if sum(size for _, size in chosen) == total), default=())


def adds_up_in_order(held: list[tuple[int, int]], total: int) -> bool:
    """Return whether taking each group that still fits, the oldest first, comes to exactly a total."""
    for _, size in held:
        total -= size if size <= total else 0
    return total == 0


def answer_of(response: httpx.Response) -> object:
    if response.status_code != 200:
        return response.status_code
    return response.json() if "json" in response.headers["content-type"] else response.text


def compare(
    ours: httpx.Client, theirs: httpx.Client, seeds: range, tell: Callable[[str], None] = lambda _: None
) -> Found:
    """Run sequences from these seeds and return all that was found."""
    found = Found()
    for number, seed in enumerate(seeds, start=1):
        one = Sequence(ours, theirs, seed).run()
        found.explained += one.explained
        found.unexplained += one.unexplained
        found.answers += one.answers
        if number % 100 == 0:
            tell(f"{number} sequences, {found.answers:,} answers, {len(found.unexplained)} unexplained")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("theirs")
    parser.add_argument("ours", nargs="?")
    parser.add_argument("--sequences", type=int, default=2_000)
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    asked = parser.parse_args()
    seeds = range(asked.first, asked.first + asked.sequences)
    ours = httpx.Client(base_url=asked.ours) if asked.ours else adapter.client()
    with httpx.Client(base_url=asked.theirs) as theirs, ours:
        found = compare(ours, theirs, seeds, say)
    for why, count in found.explained.most_common():
        say(f"{count:>6}  {why}: Atropos {DIFFERENCES[why].theirs}; ours {DIFFERENCES[why].ours}")
    for each in found.unexplained:
        say(each)
    return 1 if found.unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
