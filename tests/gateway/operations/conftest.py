"""A hive with a scripted trainer, and a client of its training routes.

Tests of other settings, or of another trainer, have a fixture `gateway_settings` or `answering` of their own.
"""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from bombus.bus import Bus
from tests.gateway.operations.scripted_trainer import Answering, OperationHive, operation_hive, plain_results


@pytest.fixture
def gateway_settings() -> dict[str, Any]:
    return {}


@pytest.fixture
def answering() -> Answering:
    """How the trainer answers operations."""
    return plain_results


@pytest.fixture
async def hive(bus: Bus, gateway_settings: dict[str, Any], answering: Answering) -> AsyncIterator[OperationHive]:
    async with operation_hive(bus, **gateway_settings) as hive:
        hive.answering = answering
        yield hive


@pytest.fixture
async def client(hive: OperationHive) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"{hive.url}/api/v1", timeout=60.0) as client:
        yield client
