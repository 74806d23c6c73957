"""The state of an engine in the swarm contract's format, as pure functions of the folded log.

All clients may read these views, so the views number episodes and clients. No view contains an id, except the reader's
own.
"""

import json
from pathlib import PurePath
from typing import Any

from bombus.config.job import in_todays_fields
from bombus.figures import seconds_between
from bombus.hive.collection import BATCH_METHODS, progress
from bombus.hive.pacing import fitting
from bombus.hive.records import CallRef
from bombus.hive.state import EngineState, Episode, Phase
from bombus.hive.status.detail import detail_of, noting

JsonObject = dict[str, Any]  # a JSON object


def engine_status(engine: EngineState, now_ns: int, refusing: str = "") -> JsonObject:
    return {
        "engine_status": engine.phase,
        "engine_status_detail": noting(engine.failure if _failed(engine) else detail_of(engine, now_ns), refusing),
        "global_step": engine.global_step,
        "policy_version": engine.version,
        "run": engine.run,
        "failure": engine.failure,
        "suspended": engine.suspended,
        "model": model_of(engine),
        "serving_replicas": len(fitting(engine)),
        "pool_episodes": len(engine.pool),
    }


def _failed(engine: EngineState) -> bool:
    return engine.phase == Phase.OFFLINE and bool(engine.failure)


def model_of(engine: EngineState) -> str:
    source = engine.active or engine.configured
    return source.model if source is not None else ""


def used(episode: Episode) -> JsonObject:
    """Return the usage of an open episode's recorded calls so far, including those that were cut off."""
    return {
        "calls": len(episode.calls),
        "prompt_tokens": sum(call.prompt_tokens for call in episode.calls),
        "completion_tokens": sum(call.completion_tokens for call in episode.calls),
    }


def job_differences(running: str, wanted: str) -> JsonObject:
    """Return the settings that differ between the running job and the wanted one, with both values.

    Both jobs are given as the JSON of a `RunConfig`. A job from an older log may lack settings; these are not compared.
    """
    running_job, wanted_job = json.loads(in_todays_fields(running)), json.loads(wanted)
    return {
        f"{group}.{field}": {"running": value, "wanted": wanted_job[group][field]}
        for group, fields in running_job.items()
        for field, value in fields.items()
        if field in wanted_job.get(group, {}) and value != wanted_job[group][field]
    }


def episode_buffer(engine: EngineState, base_url: str) -> JsonObject:
    """Return every open episode, without its id, its client's id and its key."""
    return {
        "buffer": [
            {
                "episode_uuid": _numbered(number),
                "episode_status": "claimed",
                "episode_type": episode.type,
                "openai_base_url": base_url,
                "openai_api_key": "",
                "client_uuid": "",
                "zmq_listen_result_addr": "",
                "latest_activity_timestamp": episode.active_ns / 1e9,
                "discard_episode_timeout": episode.discard_timeout_s,
                "llm_call_count": len(episode.calls),
                "debug_log": [],
                "optional_task_id": episode.task_hint,
            }
            for number, episode in enumerate(engine.open.values(), 1)
        ]
    }


def _numbered(number: int) -> str:
    return f"episode {number}"


def _clients(engine: EngineState, reader: str) -> dict[str, str]:
    """Return a label for each client with an open or completed episode: a number or, for the reader, its own id."""
    completed = (episode.client for episode in engine.pool.values())
    clients = dict.fromkeys([*completed, *(episode.client for episode in engine.open.values())])
    return {client: client if client == reader else f"client {number}" for number, client in enumerate(clients, 1)}


def pool_information(engine: EngineState, now_ns: int, reader: str = "") -> JsonObject:
    """Return the progress of the next batch. `reader` is the id of the requesting client, if it sent one."""
    rules = engine.collection
    clients = _clients(engine, reader)
    now = progress(engine, now_ns)
    targets = BATCH_METHODS[rules.method].targets(rules)
    pool = {task: [engine.pool[episode] for episode in ids] for task, ids in engine.by_task.items()}
    running = {
        _numbered(number): {
            "episode_status": "claimed",
            "time_since_last_activity": f"{seconds_between(episode.active_ns, now_ns):.1f}s",
            "discard_episode_timeout": str(episode.discard_timeout_s),
            "llm_call_count": str(len(episode.calls)),
            "client_uuid": clients[episode.client],
            "optional_task_id": episode.task_hint,
        }
        for number, episode in enumerate(engine.open.values(), 1)
    }
    return {
        "sample_collection_method": rules.method,
        "completed_episodes": now.episodes,
        "completed_episode_target": targets.episodes,
        "completed_tasks": now.tasks,
        "completed_task_target": targets.tasks,
        "completed_non_dummy_tasks": now.non_dummy_tasks,
        "completed_non_dummy_task_target": targets.non_dummy_tasks,
        "task_expected_num_repeat": rules.num_repeat,
        "completed_tasks_details": {
            task: [_numbered(number) for number, _ in enumerate(group, 1)] for task, group in pool.items()
        },
        "completed_tasks_rewards": {task: [done.reward for done in group] for task, group in pool.items()},
        "completed_tasks_client_uuids": {
            task: [clients[done.client] for done in group] for task, group in pool.items()
        },
        "running_episode_details": running or None,
        "engine_status": engine.phase,
        "global_step": engine.global_step,
        "booting_start_time": engine.phase_since_ns / 1e9 if engine.phase == Phase.BOOTING else None,
    }


def experiment_dir(engine: EngineState) -> str | None:
    """Return the folder of the run's weights, as a path on the trainer's machine, or None if there is none."""
    weights = None if engine.weights is None else engine.weights.weights
    return None if weights is None or weights.objects else str(PurePath(weights.where).parent)


def latest_call(engine: EngineState, episode_id: str = "") -> CallRef | None:
    """Return the newest complete call of an episode or, without an id, of all episodes that the state still holds."""
    refs: list[CallRef] = []
    for episode in engine.open.values():
        if episode_id in ("", episode.id):
            refs += [call.ref for call in episode.complete_calls()[-1:]]
    for completed in engine.pool.values():
        if episode_id in ("", completed.episode):
            refs += completed.calls[-1:]
    for group in engine.batch.groups if engine.batch is not None else ():
        for sealed in group.episodes:
            if episode_id in ("", sealed.episode):
                refs += sealed.calls[-1:]
    return max(refs, key=lambda ref: ref.seq, default=None)  # sequence numbers only grow
