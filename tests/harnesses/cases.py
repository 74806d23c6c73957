"""The cases of the tests that need an environment: skipped unless `make test-harnesses` runs them and made it."""

import os
from typing import Any

import pytest

from tests.harnesses.catalogue import Harness
from tests.harnesses.install import is_installed

ASKED_FOR = bool(os.environ.get("BOMBUS_HARNESSES"))


def case(harness: Harness, way: str) -> Any:
    """Return the parameters of a test, which is expected to fail where the catalogue says why."""
    runs = ASKED_FOR and is_installed(harness.environment)
    marks = [pytest.mark.skipif(not runs, reason=f"`make test-harnesses` makes {harness.environment}")]
    if harness.fails:
        marks.append(pytest.mark.xfail(reason=harness.fails, strict=True))
    return pytest.param(harness, way, id=f"{harness.id}, {way}", marks=marks)
