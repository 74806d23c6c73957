"""Inference servers elsewhere, in the core: they are added and removed, and outlive runs and leaders."""

import pytest

from bombus.errors import Code
from bombus.hive import inbox
from tests.coordinator.core_in_memory import ENGINE
from tests.coordinator.operations_in_memory import OperationHarness
from tests.coordinator.test_suspending import refused


def added(harness: OperationHarness, host: str = "gpu-1", port: int = 30000, world_size: int = 1) -> inbox.AnyAnswer:
    message = inbox.AddEndpoint(id=harness.id(), engine=ENGINE, host=host, port=port, world_size=world_size)
    return harness.request(message)


def removed(harness: OperationHarness, host: str = "gpu-1", port: int = 30000) -> inbox.AnyAnswer:
    return harness.request(inbox.RemoveEndpoint(id=harness.id(), engine=ENGINE, host=host, port=port))


def test_an_endpoint_is_there_until_it_is_removed_whatever_becomes_of_runs() -> None:
    harness = OperationHarness().serving()
    assert isinstance(added(harness, world_size=2), inbox.Done)
    assert isinstance(added(harness, world_size=2), inbox.Done), "a repeat"
    assert harness.kinds().count("endpoint.added") == 1
    harness.request(inbox.Stop(id=harness.id(), engine=ENGINE))
    assert [(each.host, each.port, each.world_size) for each in harness.clients.endpoints.values()] == [
        ("gpu-1", 30000, 2)
    ]
    assert isinstance(removed(harness), inbox.Done)
    assert isinstance(removed(harness), inbox.Done), "a repeat"
    assert harness.kinds().count("endpoint.removed") == 1
    assert harness.clients.endpoints == {}


def test_an_endpoint_that_is_added_again_has_the_size_that_was_given_last() -> None:
    harness = OperationHarness()
    added(harness)
    added(harness, world_size=8)
    assert [each.world_size for each in harness.clients.endpoints.values()] == [8]


def test_an_endpoint_stays_its_owners_whoever_adds_it_again() -> None:
    harness = OperationHarness()

    def add(owner: str, world_size: int) -> inbox.AnyAnswer:
        given = {"host": "gpu-1", "port": 30000, "world_size": world_size, "owner": owner}
        return harness.request(inbox.AddEndpoint(id=harness.id(), engine=ENGINE, **given))  # type: ignore[arg-type]

    assert isinstance(add("ann", 1), inbox.Done)
    assert "gpu-1:30000 was registered by another client" in refused(add("eve", 1), Code.UNSUPPORTED)
    assert isinstance(add("", 2), inbox.Done), "a key without a name opens everything"
    assert [(each.owner, each.world_size) for each in harness.clients.endpoints.values()] == [("ann", 2)]


@pytest.mark.parametrize(
    ("host", "port", "size"), [("", 1, 1), ("a b", 1, 1), ("a", 0, 1), ("a", 65_536, 1), ("a", 1, 0)]
)
def test_what_is_no_address_is_refused(host: str, port: int, size: int) -> None:
    assert refused(added(OperationHarness(), host, port, size), Code.MALFORMED)


def test_r20_endpoints_have_a_limit() -> None:
    harness = OperationHarness()
    for port in range(1, 65):
        assert isinstance(added(harness, port=port), inbox.Done)
    assert refused(added(harness, port=65), Code.QUOTA)
    assert isinstance(added(harness, port=64, world_size=2), inbox.Done), "one that is there is changed"
    removed(harness, port=1)
    assert isinstance(added(harness, port=65), inbox.Done)
