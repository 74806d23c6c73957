"""The client's operations on multi-model episodes.

A multi-model episode consists of one episode on each of several engines of a hive.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from bombus.hive.failures import FailureKind
from bombus.sdk.core import ClientCore, end_body, warn_of_late
from bombus.sdk.running import AgentResult, output_of
from bombus.sdk.types import EpisodeKind, MultiModelEpisode, Task

MultiModelResult = Mapping[str, AgentResult]  # maps each role to its outcome, or just the reward
MultiModelReport = tuple[Task, MultiModelEpisode, MultiModelResult]
MultiModelAgent = Callable[[Task, MultiModelEpisode], MultiModelResult | Awaitable[MultiModelResult]]
AsyncMultiModelAgent = Callable[[Task, MultiModelEpisode], Awaitable[MultiModelResult]]


class HiveCore(ClientCore):
    """The operations of a client on its engine, and on multi-model episodes of any of the hive's engines."""

    async def begin_multi_model_episode(  # noqa: PLR0913 - those of `begin_episode`
        self,
        engines: Mapping[str, str],
        discard_episode_timeout: float | None = None,
        episode_type: EpisodeKind = "train",
        *,
        task_id: str = "",
        max_wait_s: float | None = None,
        max_episode_time: float | None = None,
    ) -> MultiModelEpisode:
        """Claim one episode on each of several engines together, waiting until all of them have one.

        `engines` names the engine of each role, such as `{"planner": "big", "worker": "small"}`, and the result
        contains the credentials for each role: `episode["planner"]`. The episodes are ended together by
        `end_multi_model_episode`, or aborted together, and activity in one of them keeps all of them alive. See
        `begin_episode`; there is no `throttle_policy`, because that divides the batch of one engine among its clients.
        """
        (episode,) = await self.begin_multi_model_episodes(
            1,
            engines,
            discard_episode_timeout,
            episode_type,
            task_id=task_id,
            max_wait_s=max_wait_s,
            max_episode_time=max_episode_time,
        )
        return episode

    async def begin_multi_model_episodes(  # noqa: PLR0913 - those of `begin_episodes`
        self,
        n: int,
        engines: Mapping[str, str],
        discard_episode_timeout: float | None = None,
        episode_type: EpisodeKind = "train",
        *,
        task_id: str = "",
        max_wait_s: float | None = None,
        max_episode_time: float | None = None,
    ) -> list[MultiModelEpisode]:
        """Claim `n` multi-model episodes in one request, all or none. See `begin_multi_model_episode`."""
        if len(set(engines.values())) != len(engines) or len(engines) < 2:
            raise ValueError(
                f"a multi-model episode needs two or more engines, one for each role, not {dict(engines)}: let roles "
                "with the same model share one role's credentials"
            )
        body = {"engines": list(engines.values()), "count": n, "episode_type": episode_type, "task_id": task_id}
        claim, abort = self.claimed.multi_model_path("claim"), self.claimed.multi_model_path("abort")
        reply = await self._claim(claim, abort, body, discard_episode_timeout, max_wait_s)
        models = {engine: str(found.get("model", "")) for engine, found in reply["engines"].items()}
        root = self.claimed.root
        claimed = [
            MultiModelEpisode(
                engines=dict(engines),
                credentials={role: self._credentials(one[name], models[name], root) for role, name in engines.items()},
            )
            for one in reply["multi_model_episodes"]
        ]
        parts = [part for episode in claimed for part in episode.credentials.values()]
        self._note(parts, reply, discard_episode_timeout, max_episode_time, are_multi_model=True)
        return claimed

    async def end_multi_model_episode(self, task: Task, episode: MultiModelEpisode, results: MultiModelResult) -> None:
        """Report the results of a multi-model episode: for each role an outcome, or just a reward.

        Repeating the same report is harmless; a different report raises `OtherOutcome`.
        """
        await self.end_multi_model_episodes([(task, episode, results)])

    async def end_multi_model_episodes(self, ends: Sequence[MultiModelReport]) -> None:
        """Report several episodes, each as (task, multi-model episode, results by role), in one request, all or none.

        Episodes that have lasted too long are aborted instead, with a warning.
        """
        body = [end_parts(task, episode, results) for task, episode, results in ends]
        late = [episode for _, episode, _ in ends if any(map(self.claimed.is_late, episode.episode_uuids))]
        if late:
            warn_of_late(episode.episode for episode in late)
            await self._abort_multi_model(late, FailureKind.TIME, "over max_episode_time")
        on_time = [parts for parts, (_, episode, _) in zip(body, ends, strict=True) if episode not in late]
        if on_time:
            reports = [report for parts in on_time for report in parts]
            await self._report(self.claimed.multi_model_path("end"), {"multi_model_episodes": on_time}, reports)
        self._multi_model_over([episode for _, episode, _ in ends])

    async def abort_multi_model_episode(
        self, episode: MultiModelEpisode, *, failure: FailureKind | None = None, detail: str = ""
    ) -> None:
        """Abort a multi-model episode on all of its engines. `failure` says what failed, if anything did.

        If the episode is already over, nothing changes.
        """
        await self._abort_multi_model([episode], failure, detail)

    async def _abort_multi_model(
        self, episodes: Sequence[MultiModelEpisode], failure: FailureKind | None = None, detail: str = ""
    ) -> None:
        first = [episode.episode_uuids[0] for episode in episodes]  # the other parts are aborted with it
        body = self.claimed.abort_body(first, failure, detail)
        await self._report(self.claimed.multi_model_path("abort"), body, [body])
        self._multi_model_over(episodes)

    def _multi_model_over(self, episodes: Sequence[MultiModelEpisode]) -> None:
        self.claimed.over([uuid for episode in episodes for uuid in episode.episode_uuids])

    async def touch_multi_model_episodes(self, episodes: Sequence[MultiModelEpisode]) -> list[MultiModelEpisode]:
        """Keep these multi-model episodes from going idle. Returns the episodes that have ended."""
        if not episodes:
            return []
        body = {"episode_uuids": [episode.episode_uuids[0] for episode in episodes]}
        reply = await self._post(self.claimed.multi_model_path("touch"), body)
        return [episode for episode in episodes if episode.episode_uuids[0] in reply["over"]]


def check_roles(episode: MultiModelEpisode, results: MultiModelResult) -> None:
    """Raise `ValueError` unless there is a result for each role of a multi-model episode."""
    if set(results) != set(episode.credentials):
        raise ValueError(
            f"a multi-model episode must be ended with a result for each role, {sorted(episode.credentials)}, but "
            f"there are results for {sorted(results)}"
        )


def end_parts(task: Task, episode: MultiModelEpisode, results: MultiModelResult) -> list[dict[str, Any]]:
    """Return the report on a multi-model episode. Raises `ValueError` as `check_roles` does."""
    check_roles(episode, results)
    return [end_body(task, one.episode_uuid, output_of(results[role])) for role, one in episode.credentials.items()]
