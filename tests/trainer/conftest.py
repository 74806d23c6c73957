"""The process from which the tests of a module fork their trainers."""

from collections.abc import Iterator

import pytest

from tests.trainer.forked_trainers import Forge


@pytest.fixture(scope="module")
def forges(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forge]:
    forge = Forge(tmp_path_factory.mktemp("trainers"))
    yield forge
    forge.close()


@pytest.fixture
def forge(forges: Forge) -> Iterator[Forge]:
    yield forges
    forges.kill_all()
