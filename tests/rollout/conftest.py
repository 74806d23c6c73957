"""A hive whose model is scripted, with the job of these tests, and a client of it."""

from collections.abc import AsyncIterator

import pytest

from bombus import AsyncSwarmClient
from bombus.bus import Bus
from tests.gateway.openai_hive import GatewayHive, gateway_hive
from tests.rollout.hive import JOB


@pytest.fixture
async def served(bus: Bus) -> AsyncIterator[GatewayHive]:
    async with gateway_hive(bus, JOB) as served:
        yield served


@pytest.fixture
async def client(served: GatewayHive) -> AsyncIterator[AsyncSwarmClient]:
    async with AsyncSwarmClient(served.base_url, verbose=False) as client:
        yield client
