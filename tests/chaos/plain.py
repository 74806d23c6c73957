"""The end of an episode as a client without our SDK sends it: JSON by Python's own encoder, which writes NaN."""

import asyncio
import json
import random
import uuid

import httpx

from bombus.sdk.errors import ServerBusy, ServerUnreachable, SwarmError, error_for

ATTEMPTS = 14
PAUSE_S, PAUSE_S_MAX = 0.25, 8.0


async def end_plainly(
    http: httpx.AsyncClient, engine_url: str, client: str, episode_uuid: str, task: str, reward: float
) -> None:
    """End an episode, trying again while the hive is away or busy. Raises `SwarmError` as the SDK does."""
    body = {
        "client_uuid": client,
        "episode_uuid": episode_uuid,
        "task_id": task,
        "workflow_output": {"reward": reward},
    }
    headers = {"Content-Type": "application/json", "Idempotency-Key": uuid.uuid4().hex}
    why: SwarmError = ServerUnreachable("/end_episode was not tried")
    for attempt in range(ATTEMPTS):
        try:
            reply = await http.post(f"{engine_url}/end_episode", content=json.dumps(body), headers=headers)
            if reply.status_code < 400:
                return
            answer = reply.json()
            why = error_for(reply.status_code, str(answer.get("code", "")), str(answer.get("detail", answer)))
        except httpx.TransportError as error:
            why = ServerUnreachable(f"/end_episode: {type(error).__name__}: {error}")
        if not isinstance(why, ServerBusy | ServerUnreachable):
            break
        await asyncio.sleep(min(PAUSE_S * 2**attempt, PAUSE_S_MAX) * (1 + random.random() / 2))
    raise why
