"""Gateways that have not read yet what another one has just put on the log: nothing is called unknown before they have.

The second gateway of a test reads nothing at all until it asks what the newest event is.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from bombus.bus import Bus
from bombus.bus.follow import Follower
from bombus.operations import CreateModel, EndModel, ForwardBackward, OptimStep
from bombus_gateway.operations_wire.messages import FORWARD_BACKWARD_OUTPUT
from tests.gateway.openai_hive import gateway_of
from tests.gateway.operations.scripted_trainer import OperationHive
from tests.gateway.operations.test_routes import BASE, ask, forward_backward, open_model, result, step, xorl_result


class LateFollower(Follower):
    """Follows the log from the moment that it is asked for news."""

    def __init__(self, bus: Bus) -> None:
        super().__init__(bus)
        self._asked = asyncio.Event()

    async def run(self) -> None:
        await self._asked.wait()
        await super().run()

    async def caught_up(self, timeout_s: float | None = 60.0) -> None:
        self._asked.set()
        await super().caught_up(timeout_s)


@asynccontextmanager
async def late_client(bus: Bus) -> AsyncIterator[httpx.AsyncClient]:
    """Give a client of another gateway, which is behind."""
    async with (
        gateway_of(bus, late=LateFollower(bus)) as (_, url),
        httpx.AsyncClient(base_url=f"{url}/api/v1", timeout=60.0) as client,
    ):
        yield client


async def test_an_operation_that_comes_to_a_gateway_before_its_model_does_is_executed(
    hive: OperationHive, client: httpx.AsyncClient, bus: Bus
) -> None:
    model = await open_model(client)
    async with late_client(bus) as late:
        answer = await result(late, await forward_backward(late, model, 1))
        assert FORWARD_BACKWARD_OUTPUT.FromString(answer.content).metrics["loss:sum"] == 2.0
    assert "metrics" in (await result(client, await step(client, model, 2))).json()
    assert [type(each) for _, each in hive.executed] == [CreateModel, ForwardBackward, OptimStep]


async def test_a_gateway_that_is_behind_knows_what_was_accepted_before_it_was_asked(
    hive: OperationHive, client: httpx.AsyncClient, bus: Bus
) -> None:
    model = await open_model(client)
    session = model.removesuffix(":train:0")
    stepped = await step(client, model, 1)
    saved = await ask(client, "save_weights", model_id=model, seq_id=2, path="one")
    path = (await result(client, saved)).json()["path"]
    async with late_client(bus) as late:
        assert "metrics" in (await result(late, stepped)).json()
    async with late_client(bus) as late:
        assert (await ask(late, "session_heartbeat", session_id=session))["type"] == "session_heartbeat"
    async with late_client(bus) as late:
        assert (await ask(late, "get_info", model_id=model))["model_name"] == BASE
    async with late_client(bus) as late:
        assert (await ask(late, "weights_info", tinker_path=path))["lora_rank"] == 8
    async with late_client(bus) as late:
        begun = await ask(
            late, "create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model=BASE
        )
        assert begun["sampling_session_id"].startswith(f"{session}:sample:0:base-")
    async with late_client(bus) as late:
        assert (await late.get(f"training_runs/{model}")).json()["base_model"] == BASE
    async with late_client(bus) as late:
        assert (await late.get(f"sessions/{session}")).status_code == 200


async def test_a_session_of_xorls_is_killed_at_a_gateway_that_is_behind(
    hive: OperationHive, client: httpx.AsyncClient, bus: Bus
) -> None:
    made = await ask(client, "create_model", model_id="mine", base_model=BASE, lora_config={"rank": 4})
    await xorl_result(client, made)
    async with late_client(bus) as late:
        assert (await ask(late, "kill_session", model_id="mine"))["success"]
    ended = hive.executed[-1][1]
    assert isinstance(ended, EndModel)
    assert ended.save_as.startswith("ended-")


async def test_a_number_that_was_refused_before_its_model_was_there_can_be_used_when_it_is(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    session = (await ask(client, "create_session", sdk_version="0.38.0", tags=[]))["session_id"]
    model = f"{session}:train:0"
    early = await step(client, model, 1)
    assert "create it first" in (await result(client, early)).json()["error"]
    await open_model(client, session=session)
    again = await step(client, model, 1)
    assert "metrics" in (await result(client, again)).json()
    assert "create it first" in (await result(client, early)).json()["error"]
