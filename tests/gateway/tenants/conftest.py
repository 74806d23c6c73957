"""A hive with a scripted trainer, and a client of its training routes.

Tests of other settings, or of another trainer, have a fixture `gateway_settings` or `answering` of their own.
"""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from bombus.bus import Bus
from tests.gateway.tenants.scripted_trainer import Answering, TenantHive, plain_results, tenant_hive


@pytest.fixture
def gateway_settings() -> dict[str, Any]:
    return {}


@pytest.fixture
def answering() -> Answering:
    """How the trainer answers operations."""
    return plain_results


@pytest.fixture
async def hive(bus: Bus, gateway_settings: dict[str, Any], answering: Answering) -> AsyncIterator[TenantHive]:
    async with tenant_hive(bus, **gateway_settings) as hive:
        hive.answering = answering
        yield hive


@pytest.fixture
async def client(hive: TenantHive) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"{hive.url}/api/v1", timeout=60.0) as client:
        yield client
