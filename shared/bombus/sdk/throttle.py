"""Limits one client's share of a batch when several clients with different tasks feed one engine. Pure."""

from collections.abc import Collection

from bombus.sdk.types import PoolInformation, ThrottlePolicy


def should_throttle(policy: ThrottlePolicy, stat: PoolInformation, client_uuid: str, started: Collection[str]) -> bool:
    """Return whether this client must wait before it starts the policy's task.

    A task already started by any client may always continue. Another task may start while this client by itself is
    working on fewer than `ratio` x `expected_batch_size` tasks. `started` contains the tasks that this client began
    recently. While nothing is running and the batch is not full, no client waits, because otherwise the batch would
    never fill.
    """
    running = stat.running_episode_details or {}
    holders: dict[str, set[str]] = {task: set(clients) for task, clients in stat.completed_tasks_client_uuids.items()}
    for episode in running.values():
        task = episode.get("optional_task_id", "")
        if task:
            holders.setdefault(task, set()).add(episode.get("client_uuid", ""))
    if policy.current_task_id in holders or policy.current_task_id in started:
        return False
    finished = sum(len(clients) >= policy.expected_num_repeat for clients in stat.completed_tasks_client_uuids.values())
    if not running and finished < policy.expected_batch_size:
        return False
    mine = sum(clients == {client_uuid} for clients in holders.values())
    return mine >= policy.expected_batch_size * policy.ratio
