"""The collection methods, each declared once."""

import pytest

from bombus.hive.collection import BATCH_METHODS
from bombus.hive.events import Collection, Method


def test_every_method_is_declared() -> None:
    assert set(BATCH_METHODS) == set(Method)


@pytest.mark.parametrize("method", Method)
def test_the_swarm_contract_is_shown_the_sizes_of_the_job_whatever_the_method(method: Method) -> None:
    targets = BATCH_METHODS[method].targets(Collection(method=method, batch_size=8, num_repeat=4))
    assert (targets.episodes, targets.tasks, targets.non_dummy_tasks) == (32, 8, 8)
