"""The queue of waiting claims, beside a plain one that looks at all of them."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bombus.errors import Refused
from bombus.hive.events import EpisodeType
from bombus.hive.inbox import Claim
from bombus_coordinator.rules import waiting
from bombus_coordinator.rules.waiting import Queue, Waiting

CLIENTS = st.sampled_from("abc")
KINDS = st.sampled_from([None, EpisodeType.EVAL, EpisodeType.TRAIN])


@dataclass
class Plain:
    """Does what `Queue` does, by looking at every claim."""

    claims: dict[str, Waiting] = field(default_factory=dict)
    open: dict[str, int] = field(default_factory=dict)

    def add(self, claim: Claim, now_ns: int, until_ns: int) -> None:
        found = self.claims.get(claim.claim)
        if found is not None:
            found.commands.append(claim.id)
            found.until_ns = max(found.until_ns, until_ns)
            return
        asked = min(claim.first_asked_ns or now_ns, now_ns)
        self.claims[claim.claim] = Waiting(claim=claim, commands=[claim.id], first_asked_ns=asked, until_ns=until_ns)

    def first(self, kind: EpisodeType | None) -> Waiting | None:
        of_kind = [each for each in self.claims.values() if kind in (None, each.claim.type)]
        key = lambda each: (self.open.get(each.claim.client, 0), each.first_asked_ns, each.claim.claim)  # noqa: E731
        return min(of_kind, key=key, default=None)

    def over(self, now_ns: int) -> list[str]:
        found = [name for name, each in self.claims.items() if each.until_ns <= now_ns]
        for name in found:
            del self.claims[name]
        return found


def claim(name: str, client: str = "a", kind: EpisodeType = EpisodeType.TRAIN, asked_ns: int = 0) -> Claim:
    return Claim(id=f"id-{name}", claim=name, client=client, type=kind, first_asked_ns=asked_ns)


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
                sent = claim(name, client, kind, data.draw(st.integers(0, 150)))
                until_ns = now_ns + data.draw(st.integers(0, 20))
                queue.add(sent, now_ns, until_ns)
                plain.add(sent, now_ns, until_ns)
            case "open":
                client = data.draw(CLIENTS)
                more = data.draw(st.integers(-plain.open.get(client, 0), 3))
                queue.opened(client, more)
                plain.open[client] = plain.open.get(client, 0) + more
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
    with pytest.raises(Refused, match="2 claims are waiting already"):
        queue.add(claim("r"), 0, 10)
    queue.add(claim("p"), 5, 15)
    assert [each.claim.claim for each in queue.over(10)] == ["q"]
