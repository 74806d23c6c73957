"""Our queue as an HTTP server that is never on a network: the routes that a differential run needs, and no more.

It stands where a gateway's base URL will: `client()` answers as an `httpx.Client` of one would.
"""

import json
from collections.abc import Callable
from typing import Any

import httpx

from bombus.hive.trajectories.forming import form
from bombus.hive.trajectories.queue import (
    Environment,
    QueuedGroup,
    TrajectoryQueue,
    held_after,
    join,
    leave,
    push,
    register,
    take,
    why_not_queued,
)
from bombus.hive.trajectories.queue_status import environment_status

Answer = dict[str, Any]


class QueueTransport(httpx.BaseTransport):
    """Answers requests from a queue in memory."""

    def __init__(self) -> None:
        self.routes: dict[tuple[str, str], Callable[[Any], Answer | str]] = {
            ("GET", "/reset_data"): self.reset,
            ("POST", "/register"): self.register,
            ("POST", "/register-env"): self.register_environment,
            ("POST", "/disconnect-env"): self.disconnect,
            ("GET", "/status"): self.status,
            ("GET", "/status-env"): self.status_of_environment,
            ("POST", "/scored_data"): self.push_one,
            ("POST", "/scored_data_list"): self.push_several,
            ("GET", "/batch"): self.batch,
        }
        self.reset(None)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        body = request.read()
        answer = self.routes[request.method, request.url.path](json.loads(body) if body else None)
        return httpx.Response(200, text=answer) if isinstance(answer, str) else httpx.Response(200, json=answer)

    def reset(self, _: object) -> str:
        self.queue = TrajectoryQueue()
        self.bodies: dict[int, Answer] = {}
        self.step = 0
        self.is_started = False
        self.registered: Answer = {}
        return "Reset successful"

    def register(self, body: Answer) -> Answer:
        register(self.queue, body["batch_size"])
        self.registered, self.step = body, body["starting_step"]
        return {"uuid": 1}

    def register_environment(self, body: Answer) -> Answer:
        if not self.is_started:
            return {"status": "wait for trainer to start"}
        desired = body["desired_name"]
        joined = Environment(
            id=self.queue.joined,
            name=self.queue.name_for(desired),
            max_tokens=body["max_token_length"],
            weight=body["weight"],
            group_size=body["group_size"],
            minimum=body["min_batch_allocation"],
        )
        join(self.queue, joined, desired)
        return {
            "status": "success",
            "env_id": joined.id,
            "wandb_name": joined.name,
            "checkpoint_dir": self.registered["checkpoint_dir"],
            "starting_step": self.step,
            "checkpoint_interval": self.registered["save_checkpoint_interval"],
            "num_steps": self.registered["num_steps"],
        }

    def disconnect(self, body: Answer) -> Answer:
        leave(self.queue, body["env_id"])
        return {"status": "success"}

    def status(self, _: object) -> Answer:
        return {"current_step": self.step, "queue_size": len(self.queue.groups) - self.queue.held_groups}

    def status_of_environment(self, body: Answer) -> Answer:
        told = environment_status(self.queue, self.queue.environments[body["env_id"]], self.step)
        return {name: getattr(told, name) for name in told.__struct_fields__}

    def push_one(self, body: Answer) -> Answer:
        (held,) = self._push([body])
        return {"status": "received"} if held is None else {"status": "buffered", "buffer_size": held}

    def push_several(self, body: list[Answer]) -> Answer:
        held = [each for each in self._push(body) if each is not None]
        counted = {"buffered": len(held), "last_buffer_size": held[-1]} if held else {}
        return {"status": "received", "groups_processed": len(body), **counted}

    def _push(self, bodies: list[Answer]) -> list[int | None]:
        groups = [QueuedGroup(body["env_id"], len(body["tokens"])) for body in bodies]
        refused = why_not_queued(self.queue, groups)
        assert not refused, refused
        answers = held_after(self.queue, groups)
        self.bodies.update(enumerate(bodies, start=self.queue.arrived + 1))
        push(self.queue, groups)
        return answers

    def batch(self, _: object) -> Answer:
        self.is_started = True
        numbers = form(self.queue)
        if numbers is None:
            return {"batch": None}
        take(self.queue, numbers)
        self.step += 1
        return {"batch": [self.bodies.pop(number) for number in numbers]}


def client() -> httpx.Client:
    return httpx.Client(transport=QueueTransport(), base_url="http://queue.test")
