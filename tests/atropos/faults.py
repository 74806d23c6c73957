"""The faults of Atropos's server that ours must not have, and the tests that show it.

python -m tests.atropos.faults
"""

from dataclasses import dataclass

from bombus.terminal import say


@dataclass(frozen=True)
class Fault:
    there: str
    tests: tuple[str, ...]  # paths below tests/, and names


_QUEUE, _FORMING = "hive/trajectories/test_queue.py", "hive/trajectories/test_forming.py"
_RULES, _ROUTES = "coordinator/test_trajectories.py", "gateway/rollout_groups/test_routes.py"
_READING, _GZIP = "gateway/atropos/test_scored_data.py", "gateway/atropos/test_compression.py"

FAULTS = (
    Fault(
        "everything is in memory, and lost at a restart",
        (
            "atropos/test_commands.py::test_groups_outlive_a_restart_of_the_server",
            "atropos/test_kills.py::test_r16_every_acknowledged_group_is_served_whatever_is_killed_under_load",
        ),
    ),
    Fault(
        "a second register is ignored, and data that comes before register wedges the server",
        (
            f"{_RULES}::test_a_second_trainer_begins_a_new_run_without_the_groups_of_the_first_and_with_its_environments",
            f"{_RULES}::test_r16_groups_that_come_before_any_trainer_wait_for_it",
        ),
    ),
    Fault(
        "batches are formed ahead, served last-in first-out, and counted when formed",
        (
            f"{_FORMING}::test_the_oldest_group_is_taken_first_even_where_it_needs_an_awkward_selection",
            f"{_ROUTES}::test_an_environment_and_a_trainer_go_through_a_step",
        ),
    ),
    Fault(
        "a client that hangs up loses its batch",
        (f"{_ROUTES}::test_r16_a_batch_whose_client_hangs_up_is_served_again",),
    ),
    Fault(
        "NaN is accepted, and the data is gone at /batch",
        (f"{_READING}::test_what_is_wrong_with_a_group_is_refused_with_its_place",),
    ),
    Fault(
        "tokens, masks and logprobs may have other lengths",
        (f"{_READING}::test_what_is_wrong_with_a_group_is_refused_with_its_place",),
    ),
    Fault(
        "a group larger than the batch, or 3, 3, 3, 3, 4 with batches of 8, blocks or strands for ever",
        (
            f"{_QUEUE}::test_a_group_larger_than_a_batch_is_refused_on_arrival",
            f"{_FORMING}::test_sizes_that_do_not_divide_each_other_fill_a_batch_where_some_selection_does",
            "hive/test_status.py::test_rollout_groups_are_shown_with_their_environments_and_what_no_batch_can_take",
        ),
    ),
    Fault(
        "the ghost of an environment blocks batches with minimums for ever",
        (f"{_RULES}::test_r16_an_environment_that_is_silent_for_long_is_taken_for_gone_and_blocks_nobody",),
    ),
    Fault(
        "data without an environment is never used when minimums are set",
        (f"{_FORMING}::test_data_without_an_environment_is_used_for_the_rest_where_minimums_are_set",),
    ),
    Fault("weights play no part in forming a batch", (f"{_FORMING}::test_weights_share_out_every_batch",)),
    Fault(
        "a batch takes work for the whole queue",
        (f"{_FORMING}::test_a_batch_costs_no_more_in_a_queue_of_100_000_groups_than_in_a_short_one",),
    ),
    Fault(
        "gzip has no limit, and corrupt data gives 500",
        (
            f"{_GZIP}::test_a_bomb_is_refused_without_being_unpacked",
            f"{_GZIP}::test_what_is_not_gzip_to_its_end_is_refused_with_a_400",
        ),
    ),
    Fault(
        "a POST that is sent again duplicates its data",
        (
            f"{_ROUTES}::test_r16_a_post_that_is_sent_again_counts_once",
            f"{_RULES}::test_r16_a_push_that_is_sent_again_counts_once_and_after_the_window_it_is_another_one",
        ),
    ),
)

if __name__ == "__main__":
    for fault in FAULTS:
        say(f"in Atropos, {fault.there}; not here:")
        say(*(f"  .venv/bin/python -m pytest tests/{each}" for each in fault.tests))
