"""The loop that plays prompts with slime's functions, one group after another, as episodes of a hive."""

import asyncio
import copy
import inspect
import logging
import traceback
import uuid
from argparse import Namespace
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from bombus.errors import BombusError, Code, Refused, in_one_line
from bombus.hive.failures import FailureKind
from bombus.sdk.aio import AsyncSwarmClient
from bombus.sdk.core import OFFLINE
from bombus.sdk.errors import BadReward, EpisodeGone, InfraError, SwarmError, failure_of
from bombus.sdk.running import contained, is_mistake, reports
from bombus.sdk.types import Credentials, EpisodeKind, Task, WorkflowOutput
from bombus.slime import generation
from bombus.slime.filters import as_filter_output, flattened
from bombus.slime.functions import load_function
from bombus.slime.generation import GenerateState
from bombus.slime.local_server import HOST
from bombus.slime.outcomes import is_aborted, output_of, reward_of
from bombus.slime.prompts import PromptSource
from bombus.slime.relay import SampledCall, SampleRelay
from bombus.slime.rewards import async_rm, batched_async_rm
from bombus.slime.saved import rollout_file, save_rollout
from bombus.slime.settings import SlimeOptions
from bombus.slime.types import SlimeSample

ATTEMPTS = 2  # attempts at each sample of a group, each in a new episode, before the group is lost
LOST_MAX = 8  # number of groups lost in a row after which the run fails
TOUCH_S = 30.0
TOUCHED_MAX = 512  # episodes in one request
WHOLE_GROUPS = "_tasks"  # suffix of the names of collection methods that batch only full groups

log = logging.getLogger("bombus.slime")
Notify = Callable[[str], None]


class SampleAborted(InfraError):
    """Raised if a sample's generate function aborted it. This is not the model's fault."""


class RewardFailed(InfraError):
    """Raised if a reward function raised an error, or returned a value that cannot be an episode's reward."""

    failure = FailureKind.GRADER


class GroupLost(BombusError):
    """Raised if one of a group's samples could not be played. The group's episodes are aborted."""


class PlayedSample(msgspec.Struct):
    """A sample that was played: what its function returned, and the calls of its episode."""

    credentials: Credentials
    returned: Any  # a sample, or a list of them
    calls: list[SampledCall]

    @property
    def samples(self) -> list[Any]:
        return self.returned if isinstance(self.returned, list) else [self.returned]


class PlayedGroup(msgspec.Struct):
    """The samples of one prompt. Their episodes stay open until the group is ended or dropped."""

    number: int  # position of the group in the order in which prompts were drawn
    task: Task
    played: list[PlayedSample]

    @property
    def returned(self) -> list[Any]:
        return [one.returned for one in self.played]


class RolloutReport(msgspec.Struct):
    """The results of one rollout's prompts. Every prompt is counted."""

    rollout_id: int
    rewards: list[float] = []
    kept: int = 0
    dropped: Counter[str] = msgspec.field(default_factory=Counter)  # groups, by the filter's reason
    lost: Counter[str] = msgspec.field(default_factory=Counter)  # groups, by kind of error
    unused: int = 0  # groups that were begun, but turned out not to be needed
    removed: int = 0  # samples that a filter marked
    reported: int = 0  # groups that were dropped or lost by the time of the last progress message

    def line(self, title: str = "rollout") -> str:
        mean = f"{sum(self.rewards) / len(self.rewards):.3f}" if self.rewards else "-"
        parts = [f"{title} {self.rollout_id}: {self.kept} groups, mean reward {mean}"]
        parts += [f"{count} dropped ({reason})" for reason, count in sorted(self.dropped.items())]
        parts += [f"{count} lost ({kind})" for kind, count in sorted(self.lost.items())]
        parts += [f"{self.unused} begun but not needed"] if self.unused else []
        parts += [f"{self.removed} samples removed"] if self.removed else []
        return ", ".join(parts)


class SlimeDriver:
    """Plays rollouts against one engine. Use it inside `async with`, which keeps open episodes from going idle."""

    def __init__(
        self,
        options: SlimeOptions,
        client: AsyncSwarmClient,
        source: PromptSource,
        tell: Notify,
        touch_s: float = TOUCH_S,
    ) -> None:
        self._options = options
        self._client = client
        self._source = source
        self._tell = tell
        self._touch_s = touch_s
        self._name = uuid.uuid4().hex[:8]  # part of task ids, so that two drivers' groups are not compared
        self._open: set[str] = set()
        self._in_a_row = Counter[str]()  # groups lost in a row, by stage: while they were "played" or "ended"
        self._group_size = 0  # number of episodes below which the engine does not train on a group
        self.args = options.namespace()
        self._state = GenerateState(self.args)
        self._relay = SampleRelay(client.server_url, self._state.tokenizer)
        self._beating: asyncio.Task[None] | None = None
        self._functions = {
            name: load_function(path)
            for name in (
                "custom_generate_function_path",
                "custom_rm_path",
                "dynamic_sampling_filter_path",
                "rollout_sample_filter_path",
                "rollout_all_samples_process_path",
            )
            if (path := getattr(options, name))
        }

    async def __aenter__(self) -> "SlimeDriver":
        # Code without a sample's args, such as reward functions, gets no answers: every model call needs an episode.
        nobody = await self._relay.open(None)
        self.args.sglang_router_ip, self.args.sglang_router_port = HOST, nobody.port
        self._beating = asyncio.create_task(self._beat())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._beating is not None
        self._beating.cancel()
        await asyncio.gather(self._beating, return_exceptions=True)
        await self._abort(sorted(self._open), "the driver stopped", FailureKind.CLIENT)
        await self._relay.__aexit__()

    async def run(self) -> list[RolloutReport]:
        """Play all rollouts. Raises `BombusError` if many groups in a row are lost."""
        options = self._options
        await self._learn_group_size()
        needed = len(self._source.prompts) * options.num_epoch // options.rollout_batch_size
        reports = []
        for rollout_id in range(options.num_rollout or max(needed, 1)):
            report = await self.rollout(rollout_id)
            self._tell(report.line())
            reports.append(report)
        self._tell_what_was_not_begun(len(reports))
        return reports

    async def _learn_group_size(self) -> None:
        """Ask the engine how many episodes each group needs. Raises `Refused` if no group could ever be full."""
        pool = await self._client.get_rollout_stat()
        trains = pool.engine_status != OFFLINE and pool.sample_collection_method.endswith(WHOLE_GROUPS)
        if self._options.debug_rollout_only or not trains:
            return
        self._group_size, given = pool.task_expected_num_repeat, self._options.n_samples_per_prompt
        groups = f"the engine trains on groups of {self._group_size} episodes (rollout.num_repeat)"
        if given < self._group_size:
            why = f"{groups}, which --n-samples-per-prompt {given} never fills: there would be no training"
            raise Refused(Code.BAD_CONFIG, f"{why}. Give {self._group_size}, or start a job that has {given}")
        if given % self._group_size:
            left = given % self._group_size
            self._tell(f"{groups}: {left} of {given} samples of a prompt are not trained on unless others are removed")

    def _tell_what_was_not_begun(self, rollouts: int) -> None:
        """Report how many prompts were not begun because only whole batches are played."""
        options, count = self._options, len(self._source.prompts)
        wanted = count * (1 if options.num_rollout else options.num_epoch)
        if (left := wanted - self._source.begun) > 0:
            size = options.rollout_batch_size
            epochs = f" in {options.num_epoch} epochs" if wanted > count else ""
            why = f"{left} of the {wanted} prompts{epochs} were not begun in {rollouts} rollouts of {size}"
            self._tell(f"{why}: --num-rollout {rollouts - (-left // size)} would begin all of them")

    async def rollout(self, rollout_id: int) -> RolloutReport:
        """Play prompts until a batch of groups is kept, and end their episodes."""
        report = RolloutReport(rollout_id)
        everything: list[PlayedGroup] = []
        kept = await self._collect(report, everything)
        kept.sort(key=lambda group: group.number)
        if "rollout_sample_filter_path" in self._functions:
            self._call("rollout_sample_filter_path", [group.returned for group in kept])
            kept = [group for group in kept if await self._end(group, report)]
        if "rollout_all_samples_process_path" in self._functions:
            everything.sort(key=lambda group: group.number)
            self._call("rollout_all_samples_process_path", [group.returned for group in everything], self._source)
        if template := self._options.save_debug_rollout_data:
            samples = [sample for group in kept for sample in flattened(group.returned)]
            path = rollout_file(template, rollout_id)
            if left_out := save_rollout(path, rollout_id, samples):
                self._tell(f"{path} leaves out values that no file can contain: {', '.join(left_out)}")
        report.kept = len(kept)
        return report

    async def _collect(self, report: RolloutReport, everything: list[PlayedGroup]) -> list[PlayedGroup]:
        """Return a batch of groups. Their episodes have been ended, unless a filter has to see all groups first."""
        size = self._options.rollout_batch_size
        kept: list[PlayedGroup] = []
        pending: set[asyncio.Task[PlayedGroup]] = set()
        done: set[asyncio.Task[PlayedGroup]] = set()
        try:
            while len(kept) < size:
                self._tell_what_came_to_nothing(report, len(kept))
                if len(kept) + len(pending) < size:
                    begun = [self._source.group() for _ in range(self._options.over_sampling)]
                    pending |= {asyncio.create_task(self._play_group(group)) for group in begun}
                    continue
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                while done:
                    group = self._taken(done.pop(), report)
                    if group is not None:
                        everything.append(group)
                        available = len(kept) + len(done) + len(pending) + 1
                        if len(kept) == size:
                            report.unused += 1
                            await self._drop(group, "the batch was full")
                        elif await self._is_kept(group, report, available):
                            kept.append(group)
        finally:
            report.unused += len(pending)
            for task in (*pending, *done):
                task.cancel()
            for left in await asyncio.gather(*pending, *done, return_exceptions=True):
                if isinstance(left, PlayedGroup):  # the group was played before it could be cancelled
                    await self._drop(left, "the batch was full")
        return kept

    def _tell_what_came_to_nothing(self, report: RolloutReport, kept: int) -> None:
        """Report the progress whenever another batch's worth of groups has been dropped or lost."""
        gone = report.dropped.total() + report.lost.total()
        if gone >= report.reported + self._options.rollout_batch_size:
            report.reported, report.kept = gone, kept
            self._tell(f"{report.line('so far in rollout')}; continuing")

    async def _is_kept(self, group: PlayedGroup, report: RolloutReport, available: int) -> bool:
        if not await self._passes(group, report, available):
            return False
        return "rollout_sample_filter_path" in self._functions or await self._end(group, report)

    def _taken(self, task: "asyncio.Task[PlayedGroup]", report: RolloutReport) -> PlayedGroup | None:
        """Return the group that a task has played, or None if it was lost. Raises `BombusError` as `_lose` does."""
        try:
            group = task.result()
        except GroupLost as error:
            self._lose(report, "played", type(error.__cause__).__name__, str(error))
            return None
        self._in_a_row["played"] = 0
        return group

    def _lose(self, report: RolloutReport, stage: str, kind: str, why: str) -> None:
        """Count a group that was lost while it was being played or ended. Raises `BombusError` after `LOST_MAX` groups
        in a row."""
        report.lost[kind] += 1
        self._in_a_row[stage] += 1
        log.warning("%s", why)
        if self._in_a_row[stage] >= LOST_MAX:
            raise BombusError(f"{LOST_MAX} groups in a row were lost, the last one because: {why}")

    async def _passes(self, group: PlayedGroup, report: RolloutReport, available: int) -> bool:
        """Return whether the dynamic sampling filter keeps a group. Abort the episodes of a group that it drops."""
        if "dynamic_sampling_filter_path" not in self._functions:
            return True
        output = as_filter_output(self._call("dynamic_sampling_filter_path", group.returned))
        if output.keep or (output.keep_when_insufficient and available <= self._options.rollout_batch_size):
            return True
        report.dropped[output.reason or "no reason given"] += 1
        await self._drop(group, f"dropped by dynamic sampling: {output.reason or 'no reason given'}")
        return False

    def _call(self, option: str, *given: object) -> Any:
        """Call a filter. If it raises, the run ends, because it is unknown which groups the filter would have kept."""
        try:
            return self._functions[option](self.args, *given)
        except Exception as error:  # the user's code may raise anything
            flag = f"--{option.replace('_', '-')} {getattr(self._options, option)}"
            why = f"the function of {flag} raised {in_one_line(error)} at {_place(error)}"
            raise BombusError(f"{why}: fix it and start again. Episodes that had not ended are aborted") from error

    # ---- a group ----------------------------------------------------------------------------------------------

    async def _play_group(self, group: list[SlimeSample]) -> PlayedGroup:
        number = group[0].group_index or 0
        task = Task(task_id=f"{self._name}-{number}", metadata={"prompt_index": number})
        mine: set[str] = set()
        try:
            claimed = await self._claim(task, len(group), mine)
            playing = [self._play(task, sample, one, mine) for sample, one in zip(group, claimed, strict=True)]
            played = await _all(playing)
            found = PlayedGroup(number, task, played)
            if self._options.group_rm:
                await self._reward([one.returned for one in played])
            with _grading():
                for one in played:
                    output_of(one.samples, one.calls, self.args)  # raises for rewards that no episode can have
        except (SwarmError, Refused) as error:
            await self._abort(sorted(mine & self._open), "refused", failure_of(error))
            raise
        except asyncio.CancelledError:
            await self._abort(sorted(mine & self._open), "not needed")
            raise
        except Exception as error:  # the hook's own code may raise anything, which must not stop the other groups
            cause = _cause(error)
            await self._abort(sorted(mine & self._open), repr(cause), failure_of(error))
            raise GroupLost(f"the group of prompt {number} is lost: {_said(cause)}") from cause
        return found

    async def _claim(self, task: Task, count: int, mine: set[str]) -> list[Credentials]:
        kind: EpisodeKind = "eval" if self._options.debug_rollout_only else "train"
        claimed = await self._client.begin_episodes(count, episode_type=kind, task_id=task.task_id)
        mine |= {one.episode_uuid for one in claimed}
        self._open |= {one.episode_uuid for one in claimed}
        return claimed

    async def _play(self, task: Task, prompt: SlimeSample, claimed: Credentials, mine: set[str]) -> PlayedSample:
        """Play one sample. If that fails, play it again in a new episode before giving up the group."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await self._attempt(copy.deepcopy(prompt), claimed)
            except Refused:  # raised by bombus, with a message that says what to do: another attempt would fail too
                raise
            except Exception as error:  # raised by the hook's code: another attempt may succeed
                cause = _cause(error)
                reports.report(cause, f"sample {prompt.index}, attempt {attempt} of {ATTEMPTS}")
                if attempt == ATTEMPTS or is_mistake(cause):
                    raise
                await self._abort([claimed.episode_uuid], repr(cause), failure_of(error))
            (claimed,) = await self._claim(task, 1, mine)
        raise AssertionError("the last attempt returns or raises")

    async def _attempt(self, sample: SlimeSample, claimed: Credentials) -> PlayedSample:
        sample.session_id = claimed.episode
        group_index, index = sample.group_index, sample.index
        async with self._state.semaphore:
            address = await self._relay.open(claimed)
            args = copy.copy(self.args)
            args.sglang_router_ip, args.sglang_router_port = HOST, address.port
            try:
                returned = await self._generate(args, sample)
            finally:
                await self._relay.retire(address)
        found = PlayedSample(claimed, returned, address.calls)
        for one in found.samples:  # a hook may return samples that it has created
            one.group_index = group_index
            one.index = index if one.index is None else one.index
        if not found.samples or any(is_aborted(one) for one in found.samples):
            raise SampleAborted("the generate function returned an aborted sample")
        if not self._options.group_rm:
            await self._reward([returned])
        return found

    async def _generate(self, args: Namespace, sample: SlimeSample) -> Any:
        function = self._functions.get("custom_generate_function_path", generation.generate)
        more = {"evaluation": False} if "evaluation" in inspect.signature(function).parameters else {}
        return await contained(function(args, sample, dict(self._state.sampling_params), **more))

    async def _reward(self, returned: Sequence[Any]) -> None:
        """Reward the results of generate functions: one sample, a list of samples, or a whole group.

        Raises `RewardFailed` if a reward function fails.
        """
        with _grading():
            await self._set_rewards(returned)

    async def _set_rewards(self, returned: Sequence[Any]) -> None:
        if not self._options.group_rm and not isinstance(returned[0], list):
            if returned[0].reward is None:
                returned[0].reward = await contained(async_rm(self.args, returned[0]))
            return
        samples = [sample for sample in flattened(returned) if sample.reward is None]
        if samples:
            rewards = list(await contained(batched_async_rm(self.args, samples)))
            if len(rewards) != len(samples):
                raise ValueError(f"the reward function gave {len(rewards)} rewards for {len(samples)} samples")
            for sample, reward in zip(samples, rewards, strict=True):
                sample.reward = reward

    # ---- their episodes ---------------------------------------------------------------------------------------

    async def _end(self, group: PlayedGroup, report: RolloutReport) -> bool:
        """End the episodes of a group. Return whether the hive has accepted them.

        A group is dropped if so many of its samples are removed that the hive would never train on it.
        """
        removed = [one for one in group.played if any(sample.remove_sample for sample in one.samples)]
        report.removed += len(removed)
        if removed and (left := len(group.played) - len(removed)) < self._group_size:
            await self._drop(group, "too few are left after others were removed")
            why = f"the group of prompt {group.number} has {left} samples left after {len(removed)} were removed"
            needs = f"the engine trains only on groups of {self._group_size}: give a larger --n-samples-per-prompt"
            self._lose(report, "ended", "too few left", f"{why}, but {needs}")
            return False
        ends: list[tuple[Task, str, WorkflowOutput]] = []
        for one in group.played:
            if one not in removed:
                output = output_of(one.samples, one.calls, self.args)
                ends.append((group.task, one.credentials.episode_uuid, output))
        await self._abort([one.credentials.episode_uuid for one in removed], "removed by the sample filter")
        try:
            if ends:
                await self._client.end_episodes(ends)
        except EpisodeGone as error:
            report.lost["EpisodeGone"] += 1
            log.warning("the group of %s is lost: %s", group.task.task_id, error)
            why = "another episode of the group is over"
            await self._abort([episode for _, episode, _ in ends], why, FailureKind.HIVE)
            return False
        except BadReward as error:
            await self._abort([episode for _, episode, _ in ends], "the rewards were refused", FailureKind.GRADER)
            hint = "calls below /v1/ cannot be told apart: give all samples of an attempt the same reward"
            self._lose(report, "ended", "BadReward", f"the group of prompt {group.number} is lost: {error} ({hint})")
            return False
        self._in_a_row["ended"] = 0
        self._open -= {episode for _, episode, _ in ends}
        ended = [one for one in group.played if one not in removed]
        report.rewards += [reward_of(sample, self.args) for one in ended for sample in one.samples]
        return True

    async def _drop(self, group: PlayedGroup, why: str) -> None:
        await self._abort([one.credentials.episode_uuid for one in group.played], why)

    async def _abort(self, episodes: Sequence[str], why: str, failure: FailureKind | None = None) -> None:
        self._open -= set(episodes)
        for start in range(0, len(episodes), TOUCHED_MAX):
            try:
                some = episodes[start : start + TOUCHED_MAX]
                await self._client.abort_episodes(some, failure=failure, detail=why[:300])
            except SwarmError as error:
                log.warning("%d episodes could not be aborted and will go idle: %s", len(some), error)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._touch_s)
            episodes = sorted(self._open)
            for start in range(0, len(episodes), TOUCHED_MAX):
                try:
                    await self._client.touch_episodes(episodes[start : start + TOUCHED_MAX])
                except SwarmError as error:
                    log.warning("could not keep the episodes alive: %s", error)


@contextmanager
def _grading() -> Iterator[None]:
    """Raise `RewardFailed` if reward code raises an error other than one of bombus's own."""
    try:
        yield
    except InfraError as error:
        error.attribute_to(FailureKind.GRADER)
        raise
    except BombusError:
        raise
    except Exception as error:  # raised by the hook's code
        raise RewardFailed(repr(error)) from error


def _cause(error: Exception) -> Exception:
    """Return the error that a reward function raised or, if the error did not come from one, the error itself."""
    raised = error.__cause__ if isinstance(error, RewardFailed) else None
    return raised if isinstance(raised, Exception) else error


def _said(error: Exception) -> str:
    """Return an error as text, including the place where it was raised. A `BombusError` needs no place, because its
    text says what to do."""
    return repr(error) if isinstance(error, BombusError) else f"{error!r} at {_place(error)}"


def _place(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}, line {frame.lineno}"


async def _all(playing: Sequence[Awaitable[PlayedSample]]) -> list[PlayedSample]:
    """Return the results of all samples. If one fails, cancel and await the others before raising its error."""
    tasks = [asyncio.ensure_future(each) for each in playing]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
