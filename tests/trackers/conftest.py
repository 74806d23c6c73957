"""Tests with the packages of trackers, in an environment of their own (`make test-trackers`)."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave these out unless they are named: their packages are in no other environment."""
    named = [
        Path(config.invocation_params.dir, word.split("::")[0]).resolve() for word in config.invocation_params.args
    ]
    return None if any(path == HERE or HERE in path.parents for path in named) else True
