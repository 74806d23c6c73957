"""What is listed of saved models, from the folded state."""

import msgspec
import pytest

from bombus.hive import events as ev
from bombus.hive.events import SavedWeights
from bombus.hive.operations.state import FOR_SYNC, KeptWeights, TrainingClients, kept_id
from bombus.operations import CheckpointKind
from bombus_gateway.operations.listings import synced_weights

SAVED_NS = 1_795_435_200 * 10**9  # 2026-11-23 12:00:00 UTC
NOW = "synced-20261123-120000-123"


def kept(name: str, use: str = "sampler", until_ns: int = 0, **more: object) -> KeptWeights:
    saved = SavedWeights(use=use, name=name, folder="/w", address="a")
    noted = ev.WeightsKept(at_ns=SAVED_NS, engine="main", run=1, model="default", session="s", base="tiny", saved=saved)
    noted = msgspec.structs.replace(noted, **more)
    return KeptWeights(noted=noted, until_ns=until_ns)


def is_listed(weights: KeptWeights) -> bool:
    saved = weights.noted.saved
    clients = TrainingClients(kept={kept_id("default", saved.use, saved.name): weights})
    return synced_weights(clients, CheckpointKind(saved.use), "default") == [weights]


@pytest.mark.parametrize("use", ["sampler", "external"])
@pytest.mark.parametrize("name", [NOW, "synced-20261123-110000-000", "synced-20261123-120059-999"])
def test_saves_for_a_sync_from_before_the_mark_are_known_by_the_time_in_their_names(use: str, name: str) -> None:
    assert is_listed(kept(name, use))
    assert is_listed(kept("any", use, 7, metadata=FOR_SYNC)), "and others by the mark, which have a lifetime"


@pytest.mark.parametrize(
    "weights",
    [
        kept("synced-20261123-105959-999"),
        kept("synced-20261123-120101-000"),
        kept("synced-now"),
        kept(f"{NOW}0"),
        kept(NOW, "training"),
        kept(NOW, until_ns=SAVED_NS + 1),
        kept(NOW, metadata={"of": "its client"}),
        kept(NOW, public=True),
    ],
)
def test_what_a_client_has_saved_under_such_a_name_or_said_something_of_is_its_own(weights: KeptWeights) -> None:
    assert not is_listed(weights)
