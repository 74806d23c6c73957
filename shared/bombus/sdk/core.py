"""The operations of a client on its engine, each written once for both threads and event loops.

They are coroutines that wait only in their `Exchange`. The exchange of `AsyncSwarmClient` waits in the caller's loop.
The exchange of `SwarmClient` blocks the caller's thread, so each operation completes the first time it is resumed (see
`finished`).
"""

import itertools
import logging
import math
import threading
import uuid
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar
from urllib.parse import quote, urlsplit

import msgspec
from pydantic import BaseModel

from bombus.config.algorithms import Estimator
from bombus.config.documents import no_effect
from bombus.datums.episodes import EndedEpisode, EpisodeDatum, datums_of, read_ended
from bombus.errors import Code
from bombus.hive.episodes import without_secret
from bombus.hive.failures import FailureKind
from bombus.hive.steps import IDLE_S
from bombus.sdk.claimed import GIVE_BACK_S, ClaimedEpisodes
from bombus.sdk.errors import (
    BadConfig,
    EngineOffline,
    NoEpisode,
    NoTaskId,
    OtherModel,
    ServerBusy,
    ServerFault,
    ServerUnreachable,
    SwarmError,
    WrongPhase,
)
from bombus.sdk.job import JobLike, job_document
from bombus.sdk.reports import read_report
from bombus.sdk.requests import (
    GENERAL_TIMEOUT_S,
    JSON_HEADERS,
    NoReply,
    ServerReply,
    ServerRequest,
    error_of,
    is_away,
    is_success,
    object_of,
    posted,
)
from bombus.sdk.throttle import should_throttle
from bombus.sdk.types import (
    Credentials,
    EpisodeKind,
    EpisodeUsage,
    PoolInformation,
    Task,
    ThrottlePolicy,
    WorkflowOutput,
)

log = logging.getLogger("bombus")

CLAIM_WAIT_S = 20.0  # how long the server waits to grant a claim before it replies
CLAIM_PAUSE_S = 1.0  # pause before the next claim if the server did not wait
THROTTLE_PAUSE_S = 2.0
REPLACE_WAIT_S = 60.0  # how long to wait for an episode in place of a lost one
POLL_S = 0.5
USAGE_PAUSE_S = 0.2
CALL_COUNTED_S = 2.0  # the longest time from the answer to a call until the call is counted
START_TIMEOUT_S = 600.0
BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.25, 10.0
READ_AT_ONCE = 256  # ended episodes in one request; the server returns as many as fit
TAKEN_AT_ONCE = 1024

OFFLINE, BOOTING, ROLLING = "ENGINE.OFFLINE", "ENGINE.BOOTING", "ENGINE.ROLLING"
ROLLING_POST, WEIGHT_SYNCING = "ENGINE.ROLLING_POST", "ENGINE.WEIGHT_SYNCING"
CANNOT_CONNECT = "ENGINE.CANNOT_CONNECT"
MODEL = "model.path"
DIFFERENCES_SHOWN = 6

T = TypeVar("T")
EpisodeReport = tuple[Task, str, WorkflowOutput]


class Exchange(Protocol):
    """How a client sends requests to its hive and waits: the part that differs between threads and event loops."""

    async def send(self, request: ServerRequest) -> ServerReply | NoReply: ...

    async def sleep(self, seconds: float) -> None: ...

    def check(self) -> None:
        """Raise `KeyboardInterrupt` in an agent's thread once the program is interrupted."""
        ...

    def note_claimed(self, episodes: Sequence[str]) -> None:
        """Record that these episodes were claimed. If the program is interrupted, they are given back."""
        ...


def finished(operation: Coroutine[Any, Any, T]) -> T:
    """Run an operation whose exchange blocks this thread, and return its result."""
    try:
        operation.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    operation.close()
    raise RuntimeError(f"{operation} needs a running event loop, but there is none")


class ClientCore:
    """The operations of one client on its engine. Safe to use from many threads.

    `server_url` is the hive's address, without an engine's prefix. `claimed` contains the client's episodes and the
    client's clock. `jitter` returns numbers from 0 to 1. `on_claimed` is called with the seconds of silence after which
    the hive considers this client dead; without `on_claimed`, the client does not send heartbeats.
    """

    def __init__(  # noqa: PLR0913 - the parts of a client
        self,
        server_url: str,
        exchange: Exchange,
        claimed: ClaimedEpisodes,
        jitter: Callable[[], float],
        *,
        on_claimed: Callable[[float], object] | None = None,
        retry_s: float = 120.0,
        verbose: bool = True,
    ) -> None:
        self.server_url = server_url.rstrip("/")
        self.claimed = claimed
        self.verbose = verbose
        self._missed_at = -math.inf
        self._exchange = exchange
        self._clock = claimed.clock
        self._jitter = jitter
        self._on_claimed = on_claimed
        self._retry_s = retry_s
        self._lock = threading.Lock()
        self._reached = False  # whether the server has ever replied
        self._waiting = False  # whether the server has stopped replying
        self._suspended = ""  # the reason that was last logged
        self._started_tasks: list[str] = []  # tasks begun by this client, for throttling
        self._may_touch = True  # whether the hive supports heartbeats of clients

    @property
    def client_uuid(self) -> str:
        return self.claimed.client_uuid

    @property
    def missed_at(self) -> float:
        """Return when the hive last failed to reply, or replied with a 502 to 504 or a 500 without a code.

        The time is in `time.monotonic` seconds, or minus infinity if this has never happened.
        """
        return self._missed_at

    # ---- requests ---------------------------------------------------------------------------------------------

    async def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = GENERAL_TIMEOUT_S
    ) -> dict[str, Any]:
        """Send a request until there is a reply, with backoff.

        All attempts have the same id, so that a command whose reply was lost is not carried out twice.
        """
        if method == "POST":
            request = posted(path, body or {}, timeout_s)
        else:
            request = ServerRequest(method=method, path=path, headers=JSON_HEADERS, timeout_s=timeout_s)
        began = self._clock()
        for attempt in itertools.count():
            reply = await self._exchange.send(request)
            self._exchange.check()
            if isinstance(reply, ServerReply):
                self._reached, self._waiting = True, False
            if is_success(reply):
                return object_of(reply)
            error = error_of(reply, path)
            away = is_away(reply, error)
            if away:
                self._missed_at = self._clock()
            if isinstance(reply, NoReply):
                self._warn_of_waiting()
            if not away and not isinstance(error, ServerBusy):
                raise error
            pause = self._backoff(attempt, reply.retry_after_s if isinstance(reply, ServerReply) else 0.0)
            if self._clock() - began + pause > self._retry_s:
                raise error
            await self._exchange.sleep(pause)
        raise AssertionError("unreachable")

    async def _post(self, path: str, body: Mapping[str, Any], timeout_s: float = GENERAL_TIMEOUT_S) -> dict[str, Any]:
        """Send one of this client's commands, and return the reply."""
        return await self._request("POST", path, {"client_uuid": self.client_uuid, **body}, timeout_s)

    async def _command(
        self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = START_TIMEOUT_S
    ) -> None:
        """Send a command that the engine may refuse because of its phase. Raises `WrongPhase` if the engine refuses."""
        reply = await self._request("POST", path, body, timeout_s)
        if not reply.get("success"):
            raise WrongPhase(str(reply.get("failure_reason", "")), str(reply.get("code", "")), 200)

    def _warn_of_waiting(self) -> None:
        """Warn once per outage of the server, so that waiting is not mistaken for work."""
        with self._lock:
            waiting, self._waiting = self._waiting, True
        if not waiting:
            todo = "is it still running?" if self._reached else "start it with `bombus up`"
            log.warning("waiting for %s, up to %g s: %s", self.server_url, self._retry_s, todo)

    def _backoff(self, attempt: int, at_least_s: float) -> float:
        """Return a pause that doubles with each attempt, with up to 50% jitter, so that clients do not all retry at
        once."""
        pause: float = min(BACKOFF_FIRST_S * 2 ** min(attempt, 20), BACKOFF_MAX_S)
        return max(pause, at_least_s) * (1 + self._jitter() / 2)

    # ---- claiming ---------------------------------------------------------------------------------------------

    async def begin_episode(  # noqa: PLR0913 - AgentJet's arguments, and ours as keywords
        self,
        discard_episode_timeout: float | None = None,
        episode_type: EpisodeKind = "train",
        throttle_policy: ThrottlePolicy | None = None,
        *,
        max_wait_s: float | None = None,
        max_episode_time: float | None = None,
        sampler: str = "",
    ) -> tuple[str, Credentials]:
        """Claim an episode, waiting until there is one. Returns its id and the credentials that an agent needs.

        The server aborts the episode after `discard_episode_timeout` seconds without a call or a touch, by default 240
        seconds or two steps of the engine, whichever is longer. Regardless of that timeout, it also aborts the episode
        if this process has been silent for the job's `collection.client_silence_s`. After `max_episode_time` seconds
        (default: twice `discard_episode_timeout`), `end_episode` aborts the episode instead of ending it. Raises
        `EngineOffline`, or `NoEpisode` after `max_wait_s`.

        If you train with your own loop (docs/training.md), `sampler` is the path of the saved model that the episode
        plays with, as returned by `save_weights_for_sampler`, or `base`. `take_datums` then returns the data to train
        on.
        """
        task_id = ""
        if throttle_policy is not None and episode_type == "train":
            task_id = throttle_policy.current_task_id
            await self._throttled(throttle_policy)
        (claimed,) = await self.begin_episodes(
            1,
            discard_episode_timeout,
            episode_type,
            task_id=task_id,
            max_wait_s=max_wait_s,
            max_episode_time=max_episode_time,
            sampler=sampler,
        )
        return claimed.episode_uuid, claimed

    async def begin_episodes(  # noqa: PLR0913 - AgentJet's arguments, and ours as keywords
        self,
        n: int,
        discard_episode_timeout: float | None = None,
        episode_type: EpisodeKind = "train",
        *,
        task_id: str = "",
        max_wait_s: float | None = None,
        max_episode_time: float | None = None,
        sampler: str = "",
    ) -> list[Credentials]:
        """Claim `n` episodes in one request, all or none. See `begin_episode`.

        If this is interrupted while it waits (Ctrl-C, a cancelled task), no episode stays open.
        """
        body: dict[str, Any] = {"count": n, "episode_type": episode_type, "task_id": task_id}
        if sampler:
            body["sampler"] = sampler
        reply = await self._claim("/claim_episodes", "/abort_episodes", body, discard_episode_timeout, max_wait_s)
        model = str(reply.get("model", ""))
        version = reply.get("policy_version")
        claimed = [self._credentials(episode, model, version=version) for episode in reply["episodes"]]
        are_sampled = bool(sampler) and episode_type == "train"
        self._note(claimed, reply, discard_episode_timeout, max_episode_time, are_sampled=are_sampled)
        return claimed

    async def _claim(
        self, path: str, abort_path: str, body: dict[str, Any], idle_s: float | None, max_wait_s: float | None
    ) -> dict[str, Any]:
        """Send a claim until it is granted, and return the reply.

        If this is interrupted, the claimed episodes are aborted.
        """
        body = {"client_uuid": self.client_uuid, "claim_id": uuid.uuid4().hex, **body}
        if idle_s is not None:
            body["discard_episode_timeout"] = float(idle_s)
        if self._on_claimed is not None and self._may_touch:
            body["touches"] = True
        try:
            reply = await self._granted(path, body, max_wait_s)
            silence_s = reply.get("client_silence_s")
            if self._on_claimed is not None and silence_s is not None:
                self._on_claimed(float(silence_s))
            return reply
        except (SwarmError, GeneratorExit):
            raise
        except BaseException:
            await self._give_back(path, abort_path, body)
            raise

    async def _granted(self, path: str, body: dict[str, Any], max_wait_s: float | None) -> dict[str, Any]:
        """Send a claim until it is granted, and return the reply.

        On return, `body` contains the id and the wait times of the last attempt.
        """
        began = self._clock()
        while True:
            attempt_at = self._clock()
            left = CLAIM_WAIT_S if max_wait_s is None else began + max_wait_s - attempt_at
            wait_s = max(0.0, min(CLAIM_WAIT_S, left))
            body |= {"wait_s": wait_s, "waited_s": attempt_at - began}
            try:
                reply = await self._request("POST", path, body, wait_s + GENERAL_TIMEOUT_S)
            except SwarmError as error:
                if error.code == Code.UNKNOWN_FIELD and body.pop("touches", False):
                    self._may_touch = False  # the hive is older than this client
                    continue
                if error.code != Code.OTHER_CLAIM:
                    raise
                body["claim_id"] = uuid.uuid4().hex  # the reply was lost, and the server has taken the claim back
                continue
            if reply.get("success"):
                return reply
            why = str(reply.get("fail_cause", ""))
            if reply.get("engine_status") == OFFLINE:
                raise EngineOffline(why, str(reply.get("code", "")), 200)
            self._warn_of_suspension(reply)
            now = self._clock()
            if max_wait_s is not None and now >= began + max_wait_s:
                raise NoEpisode(why, str(reply.get("code", "")), 200)
            if now - attempt_at < wait_s / 2:
                await self._exchange.sleep(CLAIM_PAUSE_S * (1 + self._jitter()))

    async def _give_back(self, path: str, abort_path: str, body: dict[str, Any]) -> None:
        """Abort the episodes of a claim whose caller was interrupted before the reply arrived.

        The server grants a claim id only once, so repeating the claim returns what the lost reply contained. Each
        request is tried only once: an interrupted program is about to exit, and episodes that are left open are aborted
        once they go idle.
        """
        send = self._exchange.send
        reply = await send(posted(path, body | {"wait_s": 0.0, "waited_s": 0.0}, GIVE_BACK_S))
        if is_success(reply) and (episodes := _granted_ids(reply)):
            aborted = self.claimed.abort_body(episodes, None, "interrupted in its claim")
            await send(posted(abort_path, aborted, GIVE_BACK_S))

    def _credentials(
        self, episode: Mapping[str, str], model: str, at: str = "", version: int | None = None
    ) -> Credentials:
        """Return the credentials that an agent needs. `at` is the hive's address if it differs from the client's
        URL."""
        return Credentials(
            base_url=(at or self.server_url) + urlsplit(episode["openai_base_url"]).path,
            api_key=episode["openai_api_key"],
            model=model,
            episode_uuid=episode["episode_uuid"],
            policy_version=version,
        )

    def _note(
        self,
        claimed: Sequence[Credentials],
        reply: Mapping[str, Any],
        idle_s: float | None,
        lifetime_s: float | None,
        **kinds: bool,
    ) -> None:
        """Record the episodes granted by a reply, and how long they may last."""
        idle_s = idle_s or float(reply.get("discard_episode_timeout", IDLE_S))
        episodes = [one.episode_uuid for one in claimed]
        self.claimed.note(episodes, idle_s, lifetime_s, **kinds)
        self._exchange.note_claimed(episodes)

    async def _throttled(self, policy: ThrottlePolicy) -> None:
        """Wait until this client may start the policy's task, and record that it has started."""
        while True:
            stat = await self.get_rollout_stat()
            with self._lock:
                if not should_throttle(policy, stat, self.client_uuid, self._started_tasks):
                    if policy.current_task_id not in self._started_tasks:
                        self._started_tasks.append(policy.current_task_id)
                        kept = 3 * policy.expected_batch_size * policy.expected_num_repeat
                        del self._started_tasks[:-kept]
                    return
            await self._exchange.sleep(THROTTLE_PAUSE_S)

    # ---- ending -----------------------------------------------------------------------------------------------

    async def end_episode(self, task: Task, episode_uuid: str, workflow_output: WorkflowOutput) -> None:
        """Report an episode's outcome. Repeating the same report is harmless; a different report raises
        `OtherOutcome`."""
        await self.end_episodes([(task, episode_uuid, workflow_output)])

    async def end_episodes(self, ends: Sequence[EpisodeReport]) -> None:
        """Report several episodes, each as (task, episode id, outcome), in one request, all or none.

        Episodes that have lasted too long are aborted instead, with a warning.
        """
        late = [episode for _, episode, _ in ends if self.claimed.is_late(episode)]
        if late:
            warn_of_late(map(without_secret, late))
            await self.abort_episodes(late, failure=FailureKind.TIME, detail="over max_episode_time")
        body = [end_body(task, episode, output) for task, episode, output in ends if episode not in late]
        if body:
            await self._report("/end_episodes", {"episodes": body}, body)
        self.claimed.over([episode for _, episode, _ in ends])
        self.claimed.ended([episode for _, episode, _ in ends if episode not in late])

    async def abort_episode(self, episode_uuid: str, *, failure: FailureKind | None = None, detail: str = "") -> None:
        """Abort an episode. `failure` says what failed; omit it if nothing failed and the episode is just not
        needed."""
        await self.abort_episodes([episode_uuid], failure=failure, detail=detail)

    async def abort_episodes(
        self, episode_uuids: Sequence[str], *, failure: FailureKind | None = None, detail: str = ""
    ) -> None:
        """Abort episodes. Those that are already over are not changed."""
        if not episode_uuids:
            return
        body = self.claimed.abort_body(episode_uuids, failure, detail)
        await self._report("/abort_episodes", body, [body])
        self.claimed.over(episode_uuids)

    async def _report(self, path: str, body: dict[str, Any], ends: Sequence[dict[str, Any]]) -> None:
        """Report the `ends` in a body. If the hive is older than this client, the kinds of failure are left out."""
        try:
            await self._post(path, body)
        except SwarmError as error:
            kinds = [end.pop("failure", None) for end in ends]
            if error.code != Code.UNKNOWN_FIELD or not any(kinds):
                raise
            await self._post(path, body)

    # ---- data of ended episodes --------------------------------------------------------------------------------

    async def take_datums(
        self, episode_uuids: Sequence[str] | None = None, *, estimator: Estimator | str = Estimator.DR_GRPO
    ) -> list[EpisodeDatum]:
        """Return the tokens of ended episodes of a training-operations run as data for a loss, and release the
        episodes.

        By default, these are all episodes that this client has begun with a `sampler`, has ended, and has not taken
        before. Each episode is compared with the others of its task and sampler that are taken in the same call, by
        default as its reward minus their mean. If several calls run at the same time, each episode is taken by only one
        of them.
        """
        compared = Estimator(estimator)
        datums_of((), compared)  # raises for an unusable estimator before anything is taken
        ours = self.claimed.begin_taking(episode_uuids)
        try:
            return await self._taken(ours, compared)
        finally:
            self.claimed.end_taking(ours)

    async def _taken(self, episodes: list[str], compared: Estimator) -> list[EpisodeDatum]:
        found, lost = await self._read_ended(episodes)
        datums = datums_of(found, compared)
        names = [*(each.episode_uuid for each in found), *lost]
        for first in range(0, len(names), TAKEN_AT_ONCE):
            try:
                await self._post("/take_ended_episodes", {"episode_uuids": names[first : first + TAKEN_AT_ONCE]})
            except SwarmError as error:  # the tokens have been read, and the server's copies will expire
                log.warning("episodes whose data were read stay on the server until they expire: %s", error)
        self.claimed.taken(episodes)
        return datums

    async def _read_ended(self, episodes: list[str]) -> tuple[list[EndedEpisode], list[str]]:
        """Read ended episodes, in as many requests as necessary.

        Returns the episodes, and the ids of those whose calls are lost. Episodes without data are logged with a
        warning.
        """
        found: list[EndedEpisode] = []
        lost: list[str] = []
        left = episodes
        while left:
            asked, later = left[:READ_AT_ONCE], left[READ_AT_ONCE:]
            reply = await self._post("/read_ended_episodes", {"episode_uuids": asked}, START_TIMEOUT_S)
            try:
                found += read_ended(reply["episodes"])
                missing, rest = {**dict.fromkeys(reply["gone"], "it is gone"), **reply["lost"]}, list(reply["left"])
                lost += reply["lost"]
            except (msgspec.MsgspecError, KeyError, TypeError) as error:
                raise ServerFault(f"The server's reply contains no ended episodes: {error}") from error
            if len(rest) >= len(asked):
                raise ServerFault("The server returned none of the requested episodes.")
            for episode, why in missing.items():
                log.warning("the data of episode %s is not available: %s", without_secret(episode), why)
            left = rest + later
        return found, lost

    # ---- open episodes ----------------------------------------------------------------------------------------

    async def touch_episodes(self, episode_uuids: Sequence[str]) -> list[str]:
        """Keep these episodes from going idle. Returns the episodes that have ended."""
        if not episode_uuids:
            return []
        return list((await self._post("/touch_episodes", {"episode_uuids": list(episode_uuids)}))["over"])

    async def watch_episodes(self, episode_uuids: Sequence[str]) -> dict[str, EpisodeUsage]:
        """Keep these episodes from going idle. Returns the usage so far of those that are still open."""
        reply = await self._post("/touch_episodes", {"episode_uuids": list(episode_uuids)})
        if "used" not in reply:
            raise ServerFault("The hive is older than this client: it does not report the usage of episodes.")
        return {episode: EpisodeUsage.model_validate(used) for episode, used in reply["used"].items()}

    async def episode_usage(self, episode_uuid: str) -> EpisodeUsage | None:
        """Return an episode's usage after its agent's last call, or None if the episode is over.

        A call is counted a moment after it is answered, so this polls until two results are equal, and for longer if no
        call has been counted.
        """
        began = self._clock()
        before: EpisodeUsage | None = None
        while True:
            used = (await self.watch_episodes([episode_uuid])).get(episode_uuid)
            if used is None or (used == before and (used.calls or self._clock() - began >= CALL_COUNTED_S)):
                return used
            before = used
            await self._exchange.sleep(USAGE_PAUSE_S)

    async def can_continue_episode(self, episode_uuid: str) -> bool:
        """Return whether this client still holds the episode."""
        return bool((await self._post("/can_continue_episode", {"episode_uuid": episode_uuid}))["can_continue"])

    async def replay_latest_llm_call(self, episode_uuid: str = "") -> dict[str, Any]:
        """Return the newest complete call of an episode, as `{input, output}`.

        With the admin key and no id, return the newest call of any episode.
        """
        return await self._request("POST", "/replay_latest_llm_call", {"episode_uuid": episode_uuid})

    # ---- the engine -------------------------------------------------------------------------------------------

    async def get_engine_status(self) -> tuple[str, dict[str, Any]]:
        """Return the phase and its details, or ("ENGINE.CANNOT_CONNECT", ...) if the server does not reply."""
        try:
            reply = await self._request("GET", "/get_engine_status", timeout_s=10.0)
        except (ServerUnreachable, ServerBusy) as error:
            return CANNOT_CONNECT, {"engine_status_detail": error.why}
        return str(reply["engine_status"]), reply

    async def get_global_step(self) -> int:
        """Return how many optimizer steps the engine has made."""
        return int((await self._request("GET", "/get_engine_status"))["global_step"])

    async def get_rollout_stat(self) -> PoolInformation:
        """Return the progress of the next batch."""
        path = f"/get_current_batch_rollout_pool_information?client_uuid={quote(self.client_uuid)}"
        return PoolInformation.model_validate(await self._request("GET", path))

    async def sync_train_config(self, agent_jet_job: JobLike) -> None:
        """Configure the engine with a job. Raises `BadConfig` if the job is invalid, and `WrongPhase` unless the engine
        is OFFLINE.

        Keys of the job that have no effect are logged.
        """
        reply = await self._request("POST", "/sync_train_config", _job_body(agent_jet_job))
        for key in reply.get("ignored") or []:
            log.warning("%s", no_effect(str(key)))

    async def start_engine(self) -> None:
        """Start the engine and wait until it is ROLLING. Raises `WrongPhase`, or `EngineOffline` with the reason.

        Raises `BadConfig` if the job cannot continue from its experiment's checkpoints.
        """
        reply = await self._request("POST", "/start_engine", timeout_s=START_TIMEOUT_S)
        if not reply.get("success"):
            why, code = str(reply.get("error", "the engine did not start")), str(reply.get("code", ""))
            raise BadConfig(why, code, 200) if code == Code.BAD_CONFIG else WrongPhase(why, code, 200)
        if reply.get("begun"):
            log.warning("run %s begins %s", reply.get("run"), reply["begun"])
        await self.wait_for_status(ROLLING)

    async def stop_engine(self) -> None:
        """Stop the engine and wait until it is OFFLINE. Its open episodes are aborted."""
        await self._command("/stop_engine")
        await self.wait_for_status(OFFLINE)

    async def resume_engine(self) -> None:
        """Resume a suspended run once the cause of its suspension is gone. Raises `WrongPhase` if the engine runs no
        job."""
        await self._command("/resume_engine")
        self._suspended = ""

    def _warn_of_suspension(self, reply: Mapping[str, Any]) -> None:
        """Log each reason for the run's suspension once, because waiting clients then depend on the operator."""
        why = str(reply.get("suspended", ""))
        if why not in ("", self._suspended):
            log.warning("the run is suspended: %s", why)
            log.warning("once the cause is gone, client.resume_engine() or `bombus resume` lets it continue")
        self._suspended = why

    async def wait_for_status(self, wanted: str, timeout_s: float = 3600.0) -> None:
        """Wait until the engine is in this phase. Raises `EngineOffline` if the engine goes OFFLINE first, and
        `TimeoutError` if it takes longer than `timeout_s`.

        If the engine's run is suspended, each reason is logged once.
        """
        began = self._clock()
        while True:
            status, reply = await self.get_engine_status()
            self._warn_of_suspension(reply)
            if status == wanted:
                return
            if status == OFFLINE:
                why = reply.get("failure") or "it was stopped"
                raise EngineOffline(f"The engine went OFFLINE before it was {wanted}: {why}")
            if self._clock() - began > timeout_s:
                detail = reply.get("engine_status_detail")
                now = f"{status} ({detail})" if detail else status
                raise TimeoutError(f"The engine was not {wanted} within {timeout_s:g} s; it is {now}.")
            await self._exchange.sleep(POLL_S)

    async def auto_sync_train_config_and_start_engine(
        self, agent_jet_job: JobLike, force_restart: bool = False
    ) -> None:
        """Bring the engine to ROLLING: start it with this job if it is OFFLINE, otherwise join the running job.

        If the running job differs from this one, log a warning, or raise `OtherModel` if it trains another model. With
        `force_restart`, stop the running job and start this one instead.
        """
        job = job_document(agent_jet_job)
        if force_restart:
            await self.stop_engine()
        status, reply = await self.get_engine_status()
        if status == CANNOT_CONNECT:
            raise ServerUnreachable(f"{reply['engine_status_detail']}. Start a hive with `bombus up`.")
        if status == OFFLINE:
            try:
                await self.sync_train_config(job)
                await self.start_engine()
                status = ROLLING
            except WrongPhase as error:
                if isinstance(error, EngineOffline):
                    raise
                # Another client was faster, perhaps between our two requests: its job is running.
                log.info("the engine is being started by another client (%s)", error.why)
        elif reply.get("global_step") or reply.get("pool_episodes"):
            log.warning("%s", _where_it_goes_on(self.server_url, reply))
        if status not in (ROLLING, ROLLING_POST):
            await self.wait_for_status(ROLLING)
        await self._join(job)
        if self.verbose:
            log.info("the engine at %s is ROLLING; watch it with `bombus overwatch`", self.server_url)

    async def _join(self, job: JobLike) -> None:
        """Join the running job. Raises `OtherModel` if it trains another model.

        Any other difference is only a warning, because the clients of one engine need not agree on settings that do not
        concern them, such as the learning rate.
        """
        reply = await self._request("POST", "/compare_train_config", _job_body(job))
        differences: dict[str, Any] = reply["differences"]
        if not differences:
            return
        why = _describe_differences(self.server_url, differences)
        if MODEL in differences:
            raise OtherModel(why, Code.WRONG_PHASE, 200)
        log.warning("%s", why)

    async def agree_sync_weight(self) -> None:
        """Tell the server that this client has sampled enough for this batch. Raises `WrongPhase`."""
        await self._command("/agree_sync_weight", {"client_uuid": self.client_uuid}, GENERAL_TIMEOUT_S)

    async def push_verbose_log(self, tag: str, message: str) -> bool:
        """Write a line to the server's log. Returns False if it was dropped because too many lines came within a
        second."""
        return bool((await self._request("POST", "/push_verbose_log", {"tag": tag, "message": message}))["success"])


def _job_body(job: JobLike) -> dict[str, Any]:
    document = job_document(job)
    return {"yaml_as_string": document if isinstance(document, str) else msgspec.json.encode(document).decode()}


def _where_it_goes_on(url: str, reply: Mapping[str, Any]) -> str:
    """Describe where this program joins an engine that is already running: after which step, and with which pooled
    episodes."""
    left = reply.get("pool_episodes", 0)
    pool = f", and the next batch begins with {left} ended episodes of its pool" if left else ""
    return (
        f"the engine at {url} is already running: this program continues its run {reply.get('run', '-')} after step "
        f"{reply.get('global_step', '-')}{pool}. client.stop_engine() or `bombus stop` ends that run"
    )


def _describe_differences(url: str, differences: dict[str, Any]) -> str:
    """Describe how a job differs from the running one, and how to train the new one instead."""
    first = sorted(differences, key=lambda name: name != MODEL)[:DIFFERENCES_SHOWN]
    shown = [f"{name} is {differences[name]['running']!r}, not {differences[name]['wanted']!r}" for name in first]
    more = f", and {len(differences) - len(first)} more" if len(differences) > len(first) else ""
    return (
        f"The engine at {url} keeps running its current job, which differs from yours: {'; '.join(shown)}{more}. "
        "To train yours, stop the engine first, with client.stop_engine() or `bombus stop`."
    )


def check_task(task: Task) -> None:
    """Raise `NoTaskId` if a task has no id, because no episode of it could be ended."""
    if not task.task_id:
        raise NoTaskId("task.task_id is empty: episodes are compared within a task, so it needs an id")


def end_body(task: Task, episode: str, output: WorkflowOutput | BaseModel) -> dict[str, Any]:
    """Return the body of the request that reports an episode's end (see `reports`).

    Raises `NoTaskId` if the task has no id.
    """
    check_task(task)
    given = {name: getattr(output, name, None) for name in ("metadata", "log_metrics", "is_success")}
    report = msgspec.structs.asdict(read_report(**given))
    report["metadata"] |= {"task_id": task.task_id}
    body = {
        "episode_uuid": episode,
        "task_id": task.task_id,
        "workflow_output": {"reward": getattr(output, "reward", None), **report},
    }
    if task.data_set:
        body["data_set"] = task.data_set
    if (failure := getattr(output, "failure", None)) is not None:
        body["failure"] = failure
    return body


def warn_of_late(episodes: Iterable[str]) -> None:
    """Log which episodes have lasted too long, using names that are safe to show."""
    log.warning(
        "%s lasted longer than max_episode_time: aborted instead of ended. Begin with a longer "
        "discard_episode_timeout, or pass max_episode_time.",
        ", ".join(episodes),
    )


def _granted_ids(reply: ServerReply) -> list[str]:
    """Return the episodes granted by the reply to a claim, or none if the reply cannot be read.

    They include the parts of multi-model episodes.
    """
    try:
        granted = object_of(reply)
        parts = [part for episode in granted.get("multi_model_episodes", ()) for part in episode.values()]
        return [episode["episode_uuid"] for episode in [*granted.get("episodes", ()), *parts]]
    except (ServerFault, KeyError):
        return []
