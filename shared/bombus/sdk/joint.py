"""The client's operations on joint episodes, which are one episode on each of several engines of a hive."""

import re
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from bombus.hive.bounded import trim
from bombus.sdk.core import (
    BEGUN_MAX,
    GIVE_BACK_S,
    ClientCore,
    ClientOperation,
    ServerReply,
    end_body,
    object_of,
    posted,
    warn_of_late,
)
from bombus.sdk.errors import ServerFault
from bombus.sdk.running import AgentResult, output_of
from bombus.sdk.types import EpisodeKind, JointEpisode, Task

_OF_ENGINE = re.compile(r"/e/[a-z0-9][a-z0-9-]*\Z")

JointResult = Mapping[str, AgentResult]  # by role: the outcome, or just the reward
JointReport = tuple[Task, JointEpisode, JointResult]
JointAgent = Callable[[Task, JointEpisode], JointResult | Awaitable[JointResult]]
AsyncJointAgent = Callable[[Task, JointEpisode], Awaitable[JointResult]]


class HiveCore(ClientCore):
    """The operations of one client on its engine, and on joint episodes of any engines of the hive.

    The routes of the latter are at the hive's root, whatever the client's engine is.
    """

    def begin_joint_episodes(  # noqa: PLR0913 - those of `SwarmClient.begin_joint_episodes`
        self,
        count: int,
        engines: Mapping[str, str],
        discard_episode_timeout: float | None = None,
        episode_type: EpisodeKind = "train",
        task_id: str = "",
        max_wait_s: float | None = None,
        max_episode_time: float | None = None,
    ) -> ClientOperation[list[JointEpisode]]:
        """See `SwarmClient.begin_joint_episodes`."""
        if len(set(engines.values())) != len(engines) or len(engines) < 2:
            raise ValueError(
                f"a joint episode is on two or more engines, one for each role, and this is {dict(engines)}: several "
                "roles of one engine's model call it by the same credentials"
            )
        body: dict[str, Any] = {
            "client_uuid": self.client_uuid,
            "claim_id": uuid.uuid4().hex,
            "engines": list(engines.values()),
            "count": count,
            "episode_type": episode_type,
            "task_id": task_id,
        }
        if discard_episode_timeout is not None:
            body["discard_episode_timeout"] = float(discard_episode_timeout)
        reply = yield from self._claimed(self._at_root("claim"), body, max_wait_s, self._give_back_joint)
        models = {engine: str(told.get("model", "")) for engine, told in reply["engines"].items()}
        claimed = [
            JointEpisode(
                engines=dict(engines),
                credentials={
                    role: self._credentials(one[name], models[name], self._root) for role, name in engines.items()
                },
            )
            for one in reply["joint_episodes"]
        ]
        self._note_joint(claimed, reply, discard_episode_timeout, max_episode_time)
        return claimed

    def _at_root(self, what: str) -> str:
        return f"{self._root}/{what}_joint_episodes"

    @property
    def _root(self) -> str:
        """The hive's address, also for a client that was given one of its engines."""
        return _OF_ENGINE.sub("", self.server_url)

    def _note_joint(
        self, claimed: Sequence[JointEpisode], reply: Mapping[str, Any], idle_s: float | None, lifetime_s: float | None
    ) -> None:
        parts = [part for joint in claimed for part in joint.credentials.values()]
        self._note_begun(parts, reply, idle_s, lifetime_s)
        with self._lock:
            self._joint |= dict.fromkeys(part.episode_uuid for part in parts)
            trim(self._joint, BEGUN_MAX)

    def _give_back_joint(self, body: dict[str, Any]) -> ClientOperation[None]:
        """Abort the joint episodes of a claim whose caller was interrupted while the reply was on its way."""
        reply = yield posted(self._at_root("claim"), body | {"wait_s": 0.0, "waited_s": 0.0}, GIVE_BACK_S)
        if isinstance(reply, ServerReply) and reply.status < 400 and (episodes := _granted_parts(reply)):
            detail = "interrupted in its claim"
            yield posted(self._at_root("abort"), self._abort_body(episodes, False, detail), GIVE_BACK_S)

    def end_joint_episodes(self, ends: Sequence[JointReport]) -> ClientOperation[None]:
        """See `SwarmClient.end_joint_episodes`. Those that have lasted too long are aborted instead, with a warning."""
        body = [end_parts(task, joint, results) for task, joint, results in ends]
        late = [joint for _, joint, _ in ends if any(map(self._is_late, joint.episode_uuids))]
        if late:
            warn_of_late(joint.episode for joint in late)
            yield from self.abort_joint_episodes(late, detail="over max_episode_time")
        on_time = [parts for parts, (_, joint, _) in zip(body, ends, strict=True) if joint not in late]
        if on_time:
            request = {"client_uuid": self.client_uuid, "joint_episodes": on_time}
            yield from self._request("POST", self._at_root("end"), request)
        self._note_joint_over([joint for _, joint, _ in ends])

    def abort_joint_episodes(
        self, joints: Sequence[JointEpisode], infra: bool = False, detail: str = ""
    ) -> ClientOperation[None]:
        """Abort joint episodes. Those that are already over stay as they are."""
        if not joints:
            return
        first = [joint.episode_uuids[0] for joint in joints]  # with which the others are aborted
        yield from self._request("POST", self._at_root("abort"), self._abort_body(first, infra, detail))
        self._note_joint_over(joints)

    def _note_joint_over(self, joints: Sequence[JointEpisode]) -> None:
        episodes = [episode for joint in joints for episode in joint.episode_uuids]
        self._note_over(episodes)
        with self._lock:
            for episode in episodes:
                self._joint.pop(episode, None)

    def touch_joint_episodes(self, joints: Sequence[JointEpisode]) -> ClientOperation[list[JointEpisode]]:
        """Keep joint episodes from going idle. Returns those that are over."""
        if not joints:
            return []
        body = {"client_uuid": self.client_uuid, "episode_uuids": [joint.episode_uuids[0] for joint in joints]}
        reply = yield from self._request("POST", self._at_root("touch"), body)
        return [joint for joint in joints if joint.episode_uuids[0] in reply["over"]]

    def give_up(self, episodes: Sequence[str]) -> ClientOperation[None]:
        """Abort the episodes of an interrupted program, joint ones too."""
        with self._lock:
            joint = [episode for episode in episodes if episode in self._joint]
        others = [episode for episode in episodes if episode not in joint]
        if joint:
            yield from self._give_up(self._at_root("abort"), joint)
        if others:
            yield from super().give_up(others)


def _granted_parts(reply: ServerReply) -> list[str]:
    """Return the episodes that a claim's reply grants, none where it cannot be read."""
    try:
        return [part["episode_uuid"] for joint in object_of(reply)["joint_episodes"] for part in joint.values()]
    except (ServerFault, KeyError):
        return []


def check_roles(joint: JointEpisode, results: JointResult) -> None:
    """Raise `ValueError` unless there is a result for each role of a joint episode."""
    if set(results) != set(joint.credentials):
        raise ValueError(
            f"a joint episode is ended as a whole, with a result for each of {sorted(joint.credentials)}, and there "
            f"are results for {sorted(results)}"
        )


def end_parts(task: Task, joint: JointEpisode, results: JointResult) -> list[dict[str, Any]]:
    """Return the report of a joint episode. Raises `ValueError` as `check_roles` does."""
    check_roles(joint, results)
    return [end_body(task, one.episode_uuid, output_of(results[role])) for role, one in joint.credentials.items()]
