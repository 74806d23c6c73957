"""What a client of training operations is told about the queue."""

from bombus.hive import inbox
from bombus.hive.tenants.waiting import why_waiting
from tests.coordinator.core_in_memory import ENGINE
from tests.coordinator.tenants_in_memory import MODEL, TenantHarness
from tests.coordinator.test_suspending import suspend

OTHER = "s:train:1"


def why(harness: TenantHarness, key: str, model: str = MODEL) -> str:
    return why_waiting(harness.engine, f"{model}:{key}", harness.now_ns)


def test_an_operation_is_told_what_is_before_it() -> None:
    harness = TenantHarness().serving()
    harness.operate("1")
    assert why(harness, "1") == "it is being executed"
    harness.operate("2")
    assert why(harness, "2") == "1 operation of this model before it"
    harness.create(OTHER)
    harness.operate("3")
    assert why(harness, "3") == "2 operations of this model before it; 1 operation of other models that came earlier"
    assert why(harness, "0", OTHER) == "2 operations of other models that came earlier"
    harness.done("1")
    harness.done("2")
    assert why(harness, "0", OTHER) == "it is being executed"


def test_what_does_not_wait_or_is_not_known_has_no_reason() -> None:
    harness = TenantHarness().serving()
    assert why(harness, "0") == ""
    assert why(harness, "9") == ""
    assert why(harness, "0", "nobody") == ""


def test_an_engine_that_boots_is_suspended_or_has_lost_its_trainer_says_so() -> None:
    harness = TenantHarness()
    harness.open_session()
    harness.create()
    assert why(harness, "0") == "the engine is booting: waiting for a trainer"
    harness.serve()
    hangs = inbox.TrainerHangs(
        id=harness.id(), engine=ENGINE, run=1, trainer_epoch=1, doing="an operation", still_s=600.0
    )
    harness.send(hangs)
    assert why(harness, "0") == (
        "serving 1 model, 1 operation waiting; no trainer for 0.0 s: t1 made no progress at an operation for 10 m 00 s"
    )
    harness.serve()
    suspend(harness)
    assert why(harness, "0") == "suspended: OutOfMemoryError: CUDA out of memory"
