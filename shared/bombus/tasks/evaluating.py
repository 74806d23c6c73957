"""Evaluation of the policy that a hive trains: episodes that are not trained on, with scores per policy version."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager

import msgspec

from bombus.environments.chat_model import ModelRefused
from bombus.environments.kinds import RolloutStatus
from bombus.environments.rollout import Rollout
from bombus.errors import in_one_line
from bombus.hive.failures import FailureKind
from bombus.sdk.aio import AsyncSwarmClient
from bombus.sdk.errors import EpisodeGone, InfraError, SwarmError, failure_of
from bombus.sdk.types import Credentials, Task
from bombus.task_groups import first_failure
from bombus.tasks.playing import FAILURES_IN_A_ROW_MAX, EpisodeScore, ServerFailed, score_of_rollout

log = logging.getLogger("bombus")

ABORT_S = 15.0  # time for the hive to abort the episodes that are given up
LOOK_S = 1.0  # time between two checks for a new version
NOT_BEGUN = "the hive had closed it before its turn came"
EPISODE_S_MAX = 86_400.0  # for an episode waiting for its turn; the hive ends the wait by closing a batch


class EvalScore(EpisodeScore, frozen=True, kw_only=True):
    """The score of an evaluation episode.

    `version` is the policy version that sampled the whole episode. If several versions sampled it, `version` is None
    and `versions` lists them. For an episode without an answer, `version` is the version at the time of its claim.
    """

    version: int | None
    versions: tuple[int, ...]


class EvalSet(msgspec.Struct, frozen=True, kw_only=True):
    """Tasks to play, and the rollout to play them with. Tasks that do not name a data set are assigned to this one."""

    name: str
    tasks: Sequence[Task]
    rollout: Rollout


class _EvalEpisode(msgspec.Struct, frozen=True):
    task: Task  # the task with its data set filled in
    number: int
    rollout: Rollout


class Evaluation:
    """Plays data sets once. `report` is called with the score of each finished episode.

    Up to `claim` episodes are claimed together. In a synchronous run they all play one version, because the hive's next
    batch waits for them. `versions` contains the versions at the claims: just one, unless the engine advances between
    two claims. In an asynchronous run no batch waits, and each score names the versions that sampled its episode.

    `cut_off` counts the episodes that the hive closed before they ended, which have no reward. A data set is given up
    if too many of its episodes fail in a row. Raises the client's errors, or, once the other data sets have been
    played, `ServerFailed` for those that were given up.
    """

    def __init__(
        self, client: AsyncSwarmClient, report: Callable[[EvalScore], None], *, at_once: int = 8, claim: int = 64
    ) -> None:
        self._client = client
        self._report = report
        self._slots = asyncio.Semaphore(at_once)
        self._claim = claim
        self._open: set[str] = set()
        self._over: set[str] = set()  # episodes that the hive has closed
        self._failed: Counter[str] = Counter()  # number of failed episodes in a row for each data set
        self._given_up: dict[str, str] = {}  # data set -> reason
        self._unplayed: Counter[str] = Counter()
        self.versions: list[int] = []
        self.cut_off = 0

    async def play(self, data_sets: Sequence[EvalSet], repeat: int = 1) -> None:
        waiting = list(_episodes(data_sets, repeat))
        while waiting := self._without_given_up(waiting):
            together, waiting = waiting[: self._claim], waiting[self._claim :]
            claimed = await self._client.begin_episodes(
                len(together), episode_type="eval", max_episode_time=EPISODE_S_MAX
            )
            self._note_version(_version_of(claimed[0]))
            async with self._nothing_left_open(claimed):
                await self._play(together, claimed)
        if self._given_up:
            raise ServerFailed("; ".join(self._why_given_up(name) for name in self._given_up))

    def _without_given_up(self, episodes: Sequence[_EvalEpisode]) -> list[_EvalEpisode]:
        left = [each for each in episodes if each.task.data_set not in self._given_up]
        self._unplayed.update(each.task.data_set for each in episodes if each.task.data_set in self._given_up)
        return left

    def _why_given_up(self, name: str) -> str:
        why = f"{FAILURES_IN_A_ROW_MAX} episodes of {name} in a row failed, the last one with: {self._given_up[name]}"
        return why + (f"; {self._unplayed[name]} more of its episodes were not played" if self._unplayed[name] else "")

    def _note_version(self, version: int) -> None:
        if version not in self.versions:
            self.versions.append(version)

    async def _play(self, episodes: Sequence[_EvalEpisode], claimed: Sequence[Credentials]) -> None:
        async with first_failure() as group:
            for episode, credentials in zip(episodes, claimed, strict=True):
                group.create_task(self._episode(episode, credentials))

    async def _episode(self, episode: _EvalEpisode, credentials: Credentials) -> None:
        async with self._slots:
            name, uuid = episode.task.data_set, credentials.episode_uuid
            if name in self._given_up:
                self._unplayed[name] += 1  # the episode is aborted with the other open ones
                return
            score = _not_begun(episode, credentials) if uuid in self._over else await self._scored(episode, credentials)
            self._open.discard(uuid)
            self._report(score)
            if uuid in self._over:
                self.cut_off += 1
            elif score.reward is not None:
                self._failed[name] = 0
            else:
                self._failed[name] += 1
                if self._failed[name] >= FAILURES_IN_A_ROW_MAX:
                    self._given_up.setdefault(name, score.error)

    async def _scored(self, episode: _EvalEpisode, credentials: Credentials) -> EvalScore:
        began = time.monotonic()
        task = episode.task
        result = await episode.rollout.play(task, credentials)
        score = _of_versions(
            score_of_rollout(task.data_set, task, episode.number, result, time.monotonic() - began),
            result.versions or (_version_of(credentials),),
        )
        if isinstance(result.error, ModelRefused) and result.error.is_over:
            return await self._closed_by_the_hive(score, credentials, result.error)
        if result.error is not None:
            failure = failure_of(result.error)
            await self._client.abort_episode(credentials.episode_uuid, failure=failure, detail=score.error)
            return _without_reward(score, credentials, result.error)
        try:
            await self._client.end_episodes([(task, credentials.episode_uuid, result.output())])
        except EpisodeGone as error:  # for example because its batch stopped waiting for it
            return await self._closed_by_the_hive(score, credentials, error)
        return score

    async def _closed_by_the_hive(
        self, score: EvalScore, credentials: Credentials, error: InfraError | SwarmError
    ) -> EvalScore:
        """Find out which other episodes the hive closed together with this one, so that they are not started."""
        self._over.add(credentials.episode_uuid)
        self._over.update(await self._client.touch_episodes(list(self._open)))
        return _without_reward(score, credentials, error)

    @asynccontextmanager
    async def _nothing_left_open(self, claimed: Sequence[Credentials]) -> AsyncIterator[None]:
        """Keep the episodes alive while they are being played or are waiting to be, and abort those still open at the
        end."""
        uuids = [each.episode_uuid for each in claimed]
        self._open.update(uuids)
        try:
            async with self._client.keep_alive(*uuids):
                yield
        finally:
            if self._open:
                try:
                    async with asyncio.timeout(ABORT_S):
                        await self._client.abort_episodes(
                            list(self._open), failure=FailureKind.CLIENT, detail="the evaluation was stopped"
                        )
                except (SwarmError, TimeoutError) as error:
                    log.warning("open episodes could not be aborted, and will end once idle for too long: %s", error)
                self._open.clear()


class EvalSchedule:
    """Decides which policy versions are evaluated: the first one seen, then each multiple of `every`.

    If evaluation is slower than training, versions are skipped, and the newest version is next.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._run = -1
        self._next = 0

    def is_due(self, run: int, version: int) -> bool:
        return run != self._run or version >= self._next

    def played(self, run: int, version: int) -> list[int]:
        """Record that a version was evaluated. Return the versions before it that were due but skipped."""
        skipped = [] if run != self._run else list(range(self._next, version, self._every))
        self._run = run
        self._next = (version // self._every + 1) * self._every
        return skipped


async def wait_until_due(client: AsyncSwarmClient, schedule: EvalSchedule) -> tuple[int, int] | None:
    """Wait for a version that is due for evaluation. Return the run and the number of this version.

    Returns None once the engine is no longer running.
    """
    while True:
        _, status = await client.get_engine_status()
        if "policy_version" not in status:
            raise SwarmError(f"the hive does not answer: {status.get('engine_status_detail', '')}")
        if status["engine_status"] == "ENGINE.OFFLINE":
            return None
        run, version = int(status["run"]), int(status["policy_version"])
        if schedule.is_due(run, version):
            return run, version
        await asyncio.sleep(LOOK_S)


def _episodes(data_sets: Sequence[EvalSet], repeat: int) -> Iterator[_EvalEpisode]:
    for data_set in data_sets:
        for task in data_set.tasks:
            named = task if task.data_set else task.model_copy(update={"data_set": data_set.name})
            for number in range(repeat):
                yield _EvalEpisode(named, number, data_set.rollout)


def _version_of(credentials: Credentials) -> int:
    if credentials.policy_version is None:
        raise SwarmError("the server's claims have no policy version: is it a bombus hive?")
    return credentials.policy_version


def _not_begun(episode: _EvalEpisode, credentials: Credentials) -> EvalScore:
    score = EpisodeScore(
        tasks=episode.task.data_set,
        task_id=episode.task.task_id,
        number=episode.number,
        status=RolloutStatus.ABORTED,
        error=NOT_BEGUN,
    )
    return _of_versions(score, (_version_of(credentials),))


def _without_reward(score: EvalScore, credentials: Credentials, error: Exception) -> EvalScore:
    """Return the score of an aborted episode.

    The score's error does not name the episode, so that equal errors are counted together.
    """
    why = in_one_line(error).replace(f"Episode {credentials.episode}", "the episode")
    return msgspec.structs.replace(score, status=RolloutStatus.ABORTED, reward=None, is_success=None, error=why)


def _of_versions(score: EpisodeScore, versions: tuple[int, ...]) -> EvalScore:
    version = versions[0] if len(versions) == 1 else None
    return EvalScore(**msgspec.structs.asdict(score), version=version, versions=versions)
