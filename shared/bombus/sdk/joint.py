"""The client's operations on joint episodes, which are one episode on each of several engines of a hive."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from bombus.sdk.core import ClientCore, end_body, warn_of_late
from bombus.sdk.running import AgentResult, output_of
from bombus.sdk.types import EpisodeKind, JointEpisode, Task

JointResult = Mapping[str, AgentResult]  # by role: the outcome, or just the reward
JointReport = tuple[Task, JointEpisode, JointResult]
JointAgent = Callable[[Task, JointEpisode], JointResult | Awaitable[JointResult]]
AsyncJointAgent = Callable[[Task, JointEpisode], Awaitable[JointResult]]


class HiveCore(ClientCore):
    """The operations of one client on its engine, and on joint episodes of any engines of the hive."""

    async def begin_joint_episode(  # noqa: PLR0913 - those of `begin_episode`
        self,
        engines: Mapping[str, str],
        discard_episode_timeout: float | None = None,
        episode_type: EpisodeKind = "train",
        *,
        task_id: str = "",
        max_wait_s: float | None = None,
        max_episode_time: float | None = None,
    ) -> JointEpisode:
        """Claim one episode on each of several engines at once, waiting until all of them have one.

        `engines` names the engine of each role, such as `{"planner": "big", "worker": "small"}`, and the result has the
        credentials of each: `joint["planner"]`. The episodes have one outcome: they are ended together, by
        `end_joint_episode`, or aborted together, and activity of one keeps all of them. See `begin_episode`; there is
        no `throttle_policy`, which divides the batch of one engine among its clients.
        """
        (joint,) = await self.begin_joint_episodes(
            1,
            engines,
            discard_episode_timeout,
            episode_type,
            task_id=task_id,
            max_wait_s=max_wait_s,
            max_episode_time=max_episode_time,
        )
        return joint

    async def begin_joint_episodes(  # noqa: PLR0913 - those of `begin_episodes`
        self,
        n: int,
        engines: Mapping[str, str],
        discard_episode_timeout: float | None = None,
        episode_type: EpisodeKind = "train",
        *,
        task_id: str = "",
        max_wait_s: float | None = None,
        max_episode_time: float | None = None,
    ) -> list[JointEpisode]:
        """Claim `n` joint episodes in one request, all or none. See `begin_joint_episode`."""
        if len(set(engines.values())) != len(engines) or len(engines) < 2:
            raise ValueError(
                f"a joint episode is on two or more engines, one for each role, and this is {dict(engines)}: several "
                "roles of one engine's model call it by the same credentials"
            )
        body = {"engines": list(engines.values()), "count": n, "episode_type": episode_type, "task_id": task_id}
        claim, abort = self.claimed.joint_path("claim"), self.claimed.joint_path("abort")
        reply = await self._claim(claim, abort, body, discard_episode_timeout, max_wait_s)
        models = {engine: str(told.get("model", "")) for engine, told in reply["engines"].items()}
        root = self.claimed.root
        claimed = [
            JointEpisode(
                engines=dict(engines),
                credentials={role: self._credentials(one[name], models[name], root) for role, name in engines.items()},
            )
            for one in reply["joint_episodes"]
        ]
        parts = [part for joint in claimed for part in joint.credentials.values()]
        self._note(parts, reply, discard_episode_timeout, max_episode_time, are_joint=True)
        return claimed

    async def end_joint_episode(self, task: Task, joint: JointEpisode, results: JointResult) -> None:
        """Report how a joint episode went: for each role an output, or just a reward.

        Repeating a report is harmless; a different one raises `OtherOutcome`.
        """
        await self.end_joint_episodes([(task, joint, results)])

    async def end_joint_episodes(self, ends: Sequence[JointReport]) -> None:
        """Report (task, joint episode, results by role) of several in one request, all or none.

        Those that have lasted too long are aborted instead, with a warning.
        """
        body = [end_parts(task, joint, results) for task, joint, results in ends]
        late = [joint for _, joint, _ in ends if any(map(self.claimed.is_late, joint.episode_uuids))]
        if late:
            warn_of_late(joint.episode for joint in late)
            await self._abort_joint(late, detail="over max_episode_time")
        on_time = [parts for parts, (_, joint, _) in zip(body, ends, strict=True) if joint not in late]
        if on_time:
            await self._post(self.claimed.joint_path("end"), {"joint_episodes": on_time})
        self._joint_over([joint for _, joint, _ in ends])

    async def abort_joint_episode(self, joint: JointEpisode, *, infra: bool = False, detail: str = "") -> None:
        """Abort a joint episode on all of its engines. `infra` says that no model is to blame.

        One that is already over stays as it is.
        """
        await self._abort_joint([joint], infra, detail)

    async def _abort_joint(self, joints: Sequence[JointEpisode], infra: bool = False, detail: str = "") -> None:
        first = [joint.episode_uuids[0] for joint in joints]  # with which the others are aborted
        body = self.claimed.abort_body(first, infra, detail)
        await self._request("POST", self.claimed.joint_path("abort"), body)
        self._joint_over(joints)

    def _joint_over(self, joints: Sequence[JointEpisode]) -> None:
        self.claimed.over([episode for joint in joints for episode in joint.episode_uuids])

    async def touch_joint_episodes(self, joints: Sequence[JointEpisode]) -> list[JointEpisode]:
        """Keep these joint episodes from going idle. Returns those that are over."""
        if not joints:
            return []
        body = {"episode_uuids": [joint.episode_uuids[0] for joint in joints]}
        reply = await self._post(self.claimed.joint_path("touch"), body)
        return [joint for joint in joints if joint.episode_uuids[0] in reply["over"]]


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
