"""How much the tests do: what there is time for whenever something lands, or all of it (`make test-long`)."""

import os

import pytest

# Read when tests are collected, and by the processes that run them.
LONG = os.environ.get("BOMBUS_TEST_LONG", "") == "1"

# Marks a test that `make test` leaves out: it takes long, and what it finds others find as well, or rarely breaks.
long_only = pytest.mark.long


def effort(usual: int, long: int) -> int:
    """Return how often something random is tried: `usual` times, or `long` times where there is time for it."""
    return long if LONG else usual
