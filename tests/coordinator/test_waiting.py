"""The queue of waiting claims, beside a plain one that looks at all of them."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bombus.errors import Refused
from bombus.hive.events import EpisodeType
from bombus.hive.inbox import Claim
from bombus_coordinator.rules import waiting
from bombus_coordinator.rules.waiting import Queue, Share, Waiting, share_of

CLIENTS = st.sampled_from("abc")
OWNERS = st.sampled_from(["", "", "k", "l"])
KINDS = st.sampled_from([None, EpisodeType.EVAL, EpisodeType.TRAIN])


@dataclass
class Plain:
    """Does what `Queue` does, by looking at every claim."""

    claims: dict[str, Waiting] = field(default_factory=dict)
    open: dict[Share, int] = field(default_factory=dict)

    def add(self, claim: Claim, now_ns: int, until_ns: int) -> None:
        found = self.claims.get(claim.claim)
        if found is not None:
            found.commands.append(claim.id)
            found.until_ns = max(found.until_ns, until_ns) if until_ns > now_ns else now_ns
            return
        asked = min(claim.first_asked_ns or now_ns, now_ns)
        self.claims[claim.claim] = Waiting(
            claim=claim, share=share_of(claim), commands=[claim.id], first_asked_ns=asked, until_ns=until_ns
        )

    def first(self, kind: EpisodeType | None) -> Waiting | None:
        key = lambda each: (self.open.get(share_of(each.claim), 0), each.first_asked_ns, each.claim.claim)  # noqa: E731
        first: dict[tuple[Share, EpisodeType], Waiting] = {}
        for each in sorted((each for each in self.claims.values() if kind in (None, each.claim.type)), key=key):
            first.setdefault((share_of(each.claim), each.claim.type), each)
        free = (each for each in first.values() if not self.is_over_cap(each.claim))
        return min(free, key=key, default=None)

    def is_over_cap(self, claim: Claim) -> bool:
        return bool(claim.open_max) and self.open.get(share_of(claim), 0) + claim.count > claim.open_max

    def over(self, now_ns: int) -> list[str]:
        found = [name for name, each in self.claims.items() if each.until_ns <= now_ns]
        for name in found:
            del self.claims[name]
        return found


def claim(name: str, client: str = "a", kind: EpisodeType = EpisodeType.TRAIN, asked_ns: int = 0, **more: Any) -> Claim:
    return Claim(id=f"id-{name}", claim=name, client=client, type=kind, first_asked_ns=asked_ns, **more)


@given(st.data())
def test_it_does_what_a_plain_queue_does(data: st.DataObject) -> None:
    queue, plain, now_ns = Queue(), Plain(), 100
    for _ in range(data.draw(st.integers(1, 40))):
        match data.draw(st.sampled_from(["add", "add", "open", "grant", "time"])):
            case "add":
                name = data.draw(st.sampled_from("pqrstuvw"))
                known = plain.claims.get(name)
                client = known.claim.client if known else data.draw(CLIENTS)
                kind = known.claim.type if known else data.draw(st.sampled_from(EpisodeType))
                owner = known.claim.owner if known else data.draw(OWNERS)
                caps: dict[str, int] = {"count": data.draw(st.integers(1, 3)), "open_max": 4 if owner == "k" else 0}
                sent = claim(name, client, kind, data.draw(st.integers(0, 150)), owner=owner, **caps)
                until_ns = now_ns + data.draw(st.integers(0, 20))
                queue.add(sent, now_ns, until_ns)
                plain.add(sent, now_ns, until_ns)
            case "open":
                share = share_of(claim("any", data.draw(CLIENTS), owner=data.draw(OWNERS)))
                more = data.draw(st.integers(-plain.open.get(share, 0), 3))
                queue.opened(share, more)
                plain.open[share] = plain.open.get(share, 0) + more
            case "grant":
                found = queue.first(data.draw(KINDS))
                if found is not None:
                    queue.remove(found)
                    del plain.claims[found.claim.claim]
            case "time":
                now_ns += data.draw(st.integers(0, 15))
                assert {each.claim.claim for each in queue.over(now_ns)} == set(plain.over(now_ns))
        assert len(queue) == len(plain.claims)
        kind = data.draw(KINDS)
        assert queue.first(kind) == plain.first(kind)
    assert {each.claim.claim for each in queue.clear()} == set(plain.claims)
    assert queue.first() is None


def test_one_claim_too_many_is_refused_and_one_that_waits_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "WAITING_MAX", 2)
    queue = Queue()
    queue.add(claim("p"), 0, 10)
    queue.add(claim("q"), 0, 10)
    with pytest.raises(Refused, match="2 claims are already waiting"):
        queue.add(claim("r"), 0, 10)
    queue.add(claim("p"), 5, 15)
    assert [each.claim.claim for each in queue.over(10)] == ["q"]


def test_a_client_that_takes_many_ids_has_one_share_by_its_key() -> None:
    queue = Queue()
    for number in range(3):
        queue.opened(share_of(claim("held", f"id-{number}", owner="greedy")), 1)
    queue.add(claim("p", "id-3", asked_ns=1, owner="greedy"), 10, 20)
    queue.add(claim("q", "id-4", asked_ns=2, owner="modest"), 10, 20)
    first = queue.first()
    assert first is not None
    assert first.claim.claim == "q"


def test_a_key_has_a_cap_on_its_waiting_claims_whatever_the_ids_of_its_clients() -> None:
    queue = Queue()
    queue.add(claim("p", "a", owner="k", waiting_max=2), 0, 10)
    queue.add(claim("q", "b", EpisodeType.EVAL, owner="k", waiting_max=2), 0, 10)
    with pytest.raises(Refused, match=r"No available episodes to claim\. Key k has 2 of at most 2 claims waiting"):
        queue.add(claim("r", "c", owner="k", waiting_max=2), 0, 10)
    queue.add(claim("p", "a", owner="k", waiting_max=2), 5, 15)
    queue.add(claim("s", "c", owner="l", waiting_max=2), 0, 10)
    assert len(queue) == 3


def test_a_name_of_a_key_is_not_that_of_a_client() -> None:
    assert share_of(claim("p", "a", owner="b")) != share_of(claim("p", "b"))
