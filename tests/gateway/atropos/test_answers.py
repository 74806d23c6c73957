"""The exact answers of the small routes."""

import json

from bombus.hive.trajectories.queue_status import EnvironmentQueueStatus
from bombus_gateway.atropos import answers
from bombus_gateway.atropos.answers import JoinAnswer


def test_a_trainer_gets_a_number_of_128_bits() -> None:
    assert json.loads(answers.write_registered((1 << 128) - 1)) == {"uuid": 340282366920938463463374607431768211455}


def test_what_a_trainer_has_said_is_told_and_what_it_has_not() -> None:
    assert json.loads(answers.write_wandb_info()) == {"group": None, "project": None}
    assert json.loads(answers.write_wandb_info("g", "p")) == {"group": "g", "project": "p"}
    assert json.loads(answers.write_info()) == {"batch_size": -1, "max_token_len": -1}
    assert json.loads(answers.write_info(32, 2048)) == {"batch_size": 32, "max_token_len": 2048}
    assert json.loads(answers.write_status()) == {"current_step": 0, "queue_size": 0}
    assert json.loads(answers.write_status(4, 9)) == {"current_step": 4, "queue_size": 9}


def test_an_environment_waits_for_its_trainer_and_then_joins() -> None:
    assert json.loads(answers.WAIT_FOR_TRAINER) == {"status": "wait for trainer to start"}
    joined = JoinAnswer(
        env_id=1, wandb_name="math_0", checkpoint_dir="", starting_step=3, checkpoint_interval=5, num_steps=7
    )
    assert json.loads(answers.write_joined(joined)) == {
        "status": "success",
        "env_id": 1,
        "wandb_name": "math_0",
        "checkpoint_dir": "",
        "starting_step": 3,
        "checkpoint_interval": 5,
        "num_steps": 7,
    }


def test_the_status_of_an_environment_has_its_six_fields() -> None:
    status = EnvironmentQueueStatus(
        current_step=1, queue_size=2, unallocated_fraction=0.5, self_queue_size=3, max_group_size=4, env_weight=0.01
    )
    assert json.loads(answers.write_environment_status(status)) == {
        "current_step": 1,
        "queue_size": 2,
        "unallocated_fraction": 0.5,
        "self_queue_size": 3,
        "max_group_size": 4,
        "env_weight": 0.01,
    }


def test_leaving_succeeds_or_fails_in_words() -> None:
    assert json.loads(answers.DISCONNECTED) == {"status": "success"}
    assert json.loads(answers.write_disconnect_failed("There is no environment 7.")) == {
        "status": "failure",
        "error": "There is no environment 7.",
    }


def test_a_group_is_received_or_buffered() -> None:
    assert json.loads(answers.write_pushed(None)) == {"status": "received"}
    assert json.loads(answers.write_pushed(3)) == {"status": "buffered", "buffer_size": 3}


def test_groups_are_counted_and_buffered_ones_too_where_there_are_any() -> None:
    assert json.loads(answers.write_pushed_list([])) == {"status": "received", "groups_processed": 0}
    assert json.loads(answers.write_pushed_list([None])) == {"status": "received", "groups_processed": 1}
    several = [3, None, 0]
    assert json.loads(answers.write_pushed_list(several)) == {
        "status": "received",
        "groups_processed": 3,
        "buffered": 2,
        "last_buffer_size": 0,
    }


def test_a_trainer_that_has_not_registered_is_told_so() -> None:
    answer = json.loads(answers.NOT_REGISTERED)
    assert (answer["status"], answer["batch"]) == ("error", [])
    assert "/register" in answer["message"]
    assert json.loads(answers.write_welcome(False))["message"] == "AtroposLib API"
