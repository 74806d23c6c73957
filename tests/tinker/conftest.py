"""Tests with the packages of Tinker and xorl, in an environment of their own (`make test-tinker`)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tinker.whole_hive import Hive, running

HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave these out unless they are named: their packages are in no other environment."""
    named = [
        Path(config.invocation_params.dir, word.split("::")[0]).resolve() for word in config.invocation_params.args
    ]
    return None if any(path == HERE or HERE in path.parents for path in named) else True


@pytest.fixture(scope="module")
def hive_options() -> tuple[str, ...]:
    """What else `bombus up` is given, besides its port and folder."""
    return ()


@pytest.fixture(scope="module")
def hive(tmp_path_factory: pytest.TempPathFactory, hive_options: tuple[str, ...]) -> Iterator[Hive]:
    with running(tmp_path_factory.mktemp("hive"), *hive_options) as hive:
        yield hive


@pytest.fixture
def service(hive: Hive, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Tinker's client of the hive."""
    import tinker  # which the environment of all other tests does not have

    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    return tinker.ServiceClient(base_url=hive.url, api_key="tml-key")


@pytest.fixture
def url(hive: Hive) -> str:
    return hive.url
