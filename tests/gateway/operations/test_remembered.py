"""What logs remember is of operations, not of ids: the core decides in memory, and bodies are on a bus."""

from typing import cast

import pytest

from bombus.bus import Bus
from bombus.bus.follow import Follower
from bombus.bus.large.parts import Parts
from bombus.errors import Refused
from bombus.hive import inbox
from bombus.hive.events import ModelShape
from bombus.operations import (
    AdamParams,
    Category,
    CheckpointKind,
    CreateModel,
    EndModel,
    Failed,
    ForwardBackward,
    LossSpec,
    ModelEnded,
    ModelReady,
    Operation,
    OptimStep,
    Reduction,
    Result,
    SaveWeights,
    Scores,
    StepTaken,
    encode_result,
)
from bombus_gateway.context import Gateway
from bombus_gateway.keys import Keys
from bombus_gateway.operations.operation_log import OperationLog
from bombus_gateway.operations.results import OperationResults
from bombus_gateway.operations_wire.dialects import TrainingDialect
from bombus_gateway.operations_wire.futures import FutureRequest
from bombus_gateway.operations_wire.submission import DEFAULT_MODEL, Submission
from bombus_gateway.settings import GatewaySettings
from tests.coordinator.operations_in_memory import BASE, OperationHarness
from tests.gateway.openai_hive import ENGINE, SECRET
from tests.gateway.operations.scripted_trainer import OperationHive

STEP = OptimStep(adam=AdamParams(learning_rate=1e-4), reduction=Reduction.SUM)
BATCH = ForwardBackward(loss=LossSpec("cross_entropy"), data=())
STEPPED = StepTaken(step=1, divisor=1.0, grad_norm=1.0)
SCORES = Scores(outputs=(), loss=2.5, tokens=3)
A_DAY_S = 86_400.0


class CoreFollower(Follower):
    """Has folded what the core has decided, at once."""

    def __init__(self, bus: Bus, core: OperationHarness) -> None:
        super().__init__(bus)
        self.hive = core.core.hive

    async def caught_up(self, timeout_s: float | None = 60.0) -> None:
        return


class CoreGateway(Gateway):
    """A gateway whose commands a core in memory decides."""

    def __init__(self, bus: Bus, core: OperationHarness) -> None:
        super().__init__(GatewaySettings(hive=bus.subjects.hive), bus, CoreFollower(bus, core), Keys(SECRET))
        self._core = core

    async def carry_out(
        self, command: inbox.Message, limit_s: float | None = None, traceparent: str = ""
    ) -> inbox.AnyAnswer:
        answer = self._core.request(cast(inbox.AnyMessage, command))
        if isinstance(answer, inbox.Refusal):
            raise Refused(answer.code, answer.why)
        return answer


class TwoLogs(OperationHarness):
    """A core with two gateways that xorl's clients come to, and a trainer by hand."""

    def __init__(self, bus: Bus) -> None:
        super().__init__()
        self._parts = Parts(bus)
        self._subject = bus.subjects.operation(ENGINE, DEFAULT_MODEL)
        gateways = [CoreGateway(bus, self) for _ in range(2)]
        self.first, self.second = (OperationLog(gateway, ENGINE) for gateway in gateways)
        self._results = {
            log: OperationResults(gateway, log) for gateway, log in zip(gateways, (self.first, self.second))
        }

    async def execute(self, future: str, result: Result) -> None:
        """Let the trainer execute an operation of the model, with this result."""
        self.done(
            future.partition(":")[2],
            DEFAULT_MODEL,
            result=await self._parts.store(self._subject, encode_result(result)),
            made=ModelShape() if isinstance(result, ModelReady) else None,
            failed=isinstance(result, Failed),
            closes=isinstance(result, ModelEnded),
        )

    async def open_model(self, session: str) -> None:
        self.open_session(session)
        made = await self.submit(self.first, CreateModel(base=BASE), seq=0)
        if not self.engine.trainer:
            self.serve()
        await self.execute(made, ModelReady())

    async def forget_model(self) -> None:
        """End the model, and let its session be forgotten."""
        session = self.clients.models[DEFAULT_MODEL].session
        await self.execute(await self.submit(self.first, EndModel(), seq=9), ModelEnded())
        self.close_session(session)
        for _ in range(2):
            self.tick(after_s=A_DAY_S)
        assert DEFAULT_MODEL not in self.clients.models

    async def submit(self, operations: OperationLog, operation: Operation, seq: int = 1) -> str:
        session = list(self.clients.sessions)[-1]
        submission = Submission(model=DEFAULT_MODEL, seq=seq, operation=operation)
        return await operations.submit(session, submission, base=BASE if isinstance(operation, CreateModel) else "")

    async def read(self, operations: OperationLog, future: str) -> bytes:
        asked = FutureRequest(future, TrainingDialect.XORL, may_be_size=False)
        return (await self._results[operations].result(asked, "", hold_s=0.0)).body


@pytest.fixture
def logs(hive: OperationHive) -> TwoLogs:
    return TwoLogs(hive.bus)


async def test_the_first_step_of_a_model_that_has_the_name_of_a_forgotten_one_is_repeated_as_one(
    logs: TwoLogs,
) -> None:
    futures = []
    for session in ("s1", "s2"):
        await logs.open_model(session)
        futures += [await logs.submit(logs.first, STEP) for _ in range(2)]
        await logs.execute(futures[-1], STEPPED)
        assert b"grad_norm" in await logs.read(logs.first, futures[-1])
        await logs.forget_model()
    assert futures == ["default:1.1"] * 4


async def test_a_result_is_written_as_that_of_what_has_its_id_now(logs: TwoLogs) -> None:
    await logs.open_model("s1")
    step = await logs.submit(logs.first, STEP)
    await logs.execute(step, STEPPED)
    for operations in (logs.first, logs.second):
        assert b"grad_norm" in await logs.read(operations, step)
    await logs.forget_model()
    await logs.open_model("s2")
    batch = await logs.submit(logs.first, BATCH)
    assert batch == step
    await logs.execute(batch, SCORES)
    for operations in (logs.first, logs.second):
        assert b"loss_fn_outputs" in await logs.read(operations, batch)


async def test_a_failure_from_before_a_model_was_there_has_another_id_than_one_of_the_model(
    logs: TwoLogs,
) -> None:
    failure = Failed(error="not a list", category=Category.USER)
    logs.open_session("s1")
    early = await logs.first.submit("", Submission(model=DEFAULT_MODEL, seq=1, operation=failure))
    await logs.open_model("s2")
    later = await logs.first.submit("", Submission(model=DEFAULT_MODEL, seq=1, operation=failure))
    assert early != later


@pytest.mark.parametrize(
    "operation", [EndModel(save_as="x"), SaveWeights(checkpoint=CheckpointKind.TRAINING, name="x")]
)
async def test_an_end_or_a_save_that_failed_is_tried_again_and_one_that_waits_is_the_same(
    logs: TwoLogs, operation: Operation
) -> None:
    await logs.open_model("s1")
    futures = [await logs.submit(logs.first, operation) for _ in range(2)]
    assert futures[0] == futures[1]
    await logs.execute(futures[0], Failed(error="it is away", category=Category.SERVER))
    assert await logs.submit(logs.second, operation) not in futures


async def test_an_equal_batch_after_the_result_was_read_is_another_one_at_the_gateway_that_has_told_it_alone(
    logs: TwoLogs,
) -> None:
    await logs.open_model("s1")
    batch = await logs.submit(logs.first, BATCH)
    await logs.execute(batch, SCORES)
    await logs.read(logs.second, batch)
    assert await logs.submit(logs.first, BATCH) == batch, "as docs/training.md says"
    assert await logs.submit(logs.second, BATCH) != batch
