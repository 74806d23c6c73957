"""What becomes of operations that the coordinator does not accept, or that come again."""

import httpx

from bombus.hive.records import BODY_BYTES_MAX
from bombus.operations import AbortEpoch, CreateModel, ForwardBackward, OptimStep, Rejected
from bombus_gateway.operations.operation_log import OperationLog
from bombus_gateway.operations_wire.messages import FORWARD_BACKWARD_REQUEST
from bombus_gateway.operations_wire.submission import Submission
from tests.gateway.openai_hive import ENGINE
from tests.gateway.operations.scripted_trainer import OperationHive
from tests.gateway.operations.test_routes import BASE, ask, forward_backward, open_model, result, step, xorl_result

LABELS = {"labels": {"data": [5, 6], "dtype": "int64", "shape": [2]}}
BATCH = {"data": [{"model_input": {"input_ids": [5, 6]}, "loss_fn_inputs": LABELS}], "loss_fn": "causallm_loss"}


def too_large(model: str, seq: int) -> bytes:
    """Return a request with targets of 32 bits, which an operation has no room for as targets of 64."""
    request = FORWARD_BACKWARD_REQUEST(model_id=model, seq_id=seq, loss_fn="cross_entropy")
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = bytes(4)
    targets = datum.loss_fn_inputs["target_tokens"]
    targets.dtype, targets.dense = 3, bytes(BODY_BYTES_MAX // 2 + 4)
    body: bytes = request.SerializeToString()
    return body


async def test_an_operation_that_the_log_has_no_room_for_spoils_the_gradient_that_lacks_it(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    model = await open_model(client)
    await result(client, await forward_backward(client, model, 1))
    content = {"content-type": "application/x-protobuf"}
    first = (await client.post("forward_backward", content=too_large(model, 2), headers=content)).json()
    failure = (await result(client, first)).json()
    assert failure["category"] == "user"
    assert "send less data at once" in failure["error"]
    again = (await client.post("forward_backward", content=too_large(model, 2), headers=content)).json()
    assert again == first, "it has a place on the log"
    await result(client, await step(client, model, 3))
    assert [type(each) for _, each in hive.executed] == [CreateModel, ForwardBackward, Rejected, OptimStep]
    rejected = hive.executed[2][1]
    assert isinstance(rejected, Rejected)
    assert rejected.counts


async def test_each_of_three_objects_of_xorls_client_steps_once_on_a_model_that_they_share(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    await xorl_result(
        client, await ask(client, "create_model", model_id="default", base_model=BASE, lora_config={"rank": 4})
    )
    scoring = {"forward_backward_input": BATCH}
    for _ in range(3):
        await xorl_result(client, await ask(client, "forward_backward", model_id="default", seq_id=1, **scoring))
        stepping = {"model_id": "default", "seq_id": 2, "adam_params": {"learning_rate": 1e-4}}
        await xorl_result(client, await ask(client, "optim_step", **stepping))
    assert [type(each) for _, each in hive.executed] == [CreateModel, *[ForwardBackward, OptimStep] * 3]


async def test_two_objects_of_xorls_client_add_up_equal_batches_when_the_second_begins_after_the_firsts_result(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    await xorl_result(client, await ask(client, "create_model", base_model=BASE, lora_config={"rank": 4}))
    batch = {"model_id": "default", "seq_id": 1, "forward_backward_input": BATCH}
    sent = [await ask(client, "forward_backward", **batch) for _ in range(2)]
    assert sent[0] == sent[1], "the first answer may have been lost"
    await xorl_result(client, sent[0])
    other = await ask(client, "forward_backward", **batch)
    assert other["request_id"] != sent[0]["request_id"]
    await xorl_result(client, other)
    assert [type(each) for _, each in hive.executed] == [CreateModel, ForwardBackward, ForwardBackward]


async def test_a_request_of_xorls_that_comes_too_late_to_be_a_repeat_is_an_operation_of_its_own(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    await ask(client, "create_session", session_id="mine", base_model=BASE, lora_config={"rank": 4})
    session = hive.engine.clients.models["mine"].session
    submission = Submission(model="mine", seq=1, operation=AbortEpoch())
    hive.may_work.clear()
    assert hive.gateway is not None
    at_once = OperationLog(hive.gateway, ENGINE)
    assert [await at_once.submit(session, submission) for _ in range(2)] == ["mine:1.1", "mine:1.1"]
    too_late = OperationLog(hive.gateway, ENGINE, repeat_s=1e-9)
    assert [await too_late.submit(session, submission) for _ in range(2)] == ["mine:1.2", "mine:1.3"]
