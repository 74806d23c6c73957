"""Fixtures of the harnesses' tests, which need the environments that `make test-harnesses` makes."""

from collections.abc import AsyncIterator

import pytest

from bombus.bus import Bus
from tests.harnesses.arena import Arena, arena_of


@pytest.fixture
async def arena(bus: Bus) -> AsyncIterator[Arena]:
    async with arena_of(bus) as arena:
        yield arena
