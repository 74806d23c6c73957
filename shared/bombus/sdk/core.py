"""The client without its I/O: every operation is a generator that yields the requests and pauses that it needs.

A driver (`client.py`, `aio.py`) carries out each `ServerRequest` and `Sleep` and sends the result back in. It throws in
what interrupts it meanwhile (Ctrl-C, a cancelled task), so that the operation can undo what it has begun. So the logic
of retries, waiting and deadlines exists once, and is tested without a network.
"""

import itertools
import logging
import math
import threading
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import msgspec
from pydantic import BaseModel

from bombus.config.algorithms import Estimator
from bombus.config.documents import no_effect
from bombus.datums.episodes import EndedEpisode, EpisodeDatum, datums_of, read_ended
from bombus.errors import Code
from bombus.hive.bounded import trim
from bombus.hive.episodes import without_secret
from bombus.hive.steps import IDLE_S
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
    error_for,
)
from bombus.sdk.reports import read_report
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

CLAIM_WAIT_S = 20.0  # how long the server holds a claim before it answers
CLAIM_PAUSE_S = 1.0  # before the next claim, if the server did not wait
THROTTLE_PAUSE_S = 2.0
REPLACE_WAIT_S = 60.0  # for an episode in the place of one that was lost
POLL_S = 0.5
USAGE_PAUSE_S = 0.2
CALL_COUNTED_S = 2.0  # the longest from the answer of a call until it is counted
GENERAL_TIMEOUT_S = 30.0
GIVE_BACK_S = 5.0  # longer than the server holds a claim in one slice
START_TIMEOUT_S = 600.0
BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.25, 10.0
LIFETIMES = 2.0  # by default an episode may last this many times its idle limit
BEGUN_MAX = 100_000
READ_AT_ONCE = 256  # ended episodes: the server answers with as many of them as fit
TAKEN_AT_ONCE = ABORTED_AT_ONCE = 1024

AWAY = (502, 503, 504)
JSON_HEADERS = {"Content-Type": "application/json"}

OFFLINE, BOOTING, ROLLING = "ENGINE.OFFLINE", "ENGINE.BOOTING", "ENGINE.ROLLING"
ROLLING_POST, WEIGHT_SYNCING = "ENGINE.ROLLING_POST", "ENGINE.WEIGHT_SYNCING"
CANNOT_CONNECT = "ENGINE.CANNOT_CONNECT"
MODEL = "model.path"
DIFFERENCES_SHOWN = 6


class ServerRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to send. The driver answers it with an `ServerReply` or a `NoReply`."""

    method: str
    path: str
    body: bytes = b""
    headers: dict[str, str] = {}
    timeout_s: float = GENERAL_TIMEOUT_S


class Sleep(msgspec.Struct, frozen=True):
    seconds: float


class ServerReply(msgspec.Struct, frozen=True, kw_only=True):
    """What a server answered. `url` is what was asked, with the prefix of an engine."""

    status: int
    body: bytes
    url: str = ""
    retry_after_s: float = 0.0


class NoReply(msgspec.Struct, frozen=True):
    """The request got no reply: it may or may not have been carried out."""

    why: str


T = TypeVar("T")
ClientOperation = Generator[ServerRequest | Sleep, ServerReply | NoReply | None, T]
EpisodeReport = tuple[Task, str, WorkflowOutput]


class ClientCore:
    """The operations of one client, and the episodes that it has begun. Safe to use from many threads.

    `server_url` is the hive's, without an engine's prefix. `clock` returns monotonic seconds, `jitter` numbers from 0
    to 1.
    """

    def __init__(
        self,
        server_url: str,
        clock: Callable[[], float],
        jitter: Callable[[], float],
        *,
        retry_s: float = 120.0,
        client_uuid: str = "",
    ) -> None:
        self.server_url = server_url.rstrip("/")
        self.client_uuid = client_uuid or str(uuid.uuid4())
        self._clock = clock
        self._jitter = jitter
        self._retry_s = retry_s
        self._lock = threading.Lock()
        self.shortest_idle_s = math.inf  # of the idle limits of all episodes that this client has begun
        self._reached = False  # whether the server has ever replied
        self._waiting = False  # whether it has stopped replying
        self.missed_at = -math.inf  # when the server last gave no reply, or one that it is not there for now
        self._suspended = ""  # the reason that this client has warned of
        self._begun: dict[str, float] = {}  # by episode: when its time is over
        self._sampled: dict[str, bool] = {}  # whether this client has ended them: episodes begun with a sampler
        self._taking: set[str] = set()  # of these, those that a call of `take_datums` reads now
        self._joint: dict[str, None] = {}  # episodes begun as parts of joint ones
        self._started_tasks: list[str] = []  # that this client has begun, for throttling
        # Called with the silence after which the hive takes this client for dead. None: this client does not touch.
        self.on_claimed: Callable[[float], object] | None = None
        self._may_touch = True  # whether the hive is one of those that take the touches of clients

    # ---- requests ---------------------------------------------------------------------------------------------

    def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = GENERAL_TIMEOUT_S
    ) -> ClientOperation[dict[str, Any]]:
        """Send until there is a reply, backing off while there is none. All attempts have one id, so that a command
        whose reply was lost is not carried out twice."""
        if method == "POST":
            request = posted(path, body or {}, timeout_s)
        else:
            request = ServerRequest(method=method, path=path, headers=JSON_HEADERS, timeout_s=timeout_s)
        began = self._clock()
        for attempt in itertools.count():
            reply = yield request
            assert reply is not None
            if isinstance(reply, ServerReply):
                self._reached, self._waiting = True, False
            if isinstance(reply, ServerReply) and reply.status < 400:
                return object_of(reply)
            error = _error_of(reply, path)
            is_away = _is_away(reply, error)
            if is_away:
                self.missed_at = self._clock()
            if isinstance(reply, NoReply):
                self._warn_of_waiting()
            if not is_away and not isinstance(error, ServerBusy):
                raise error
            pause = self._backoff(attempt, reply.retry_after_s if isinstance(reply, ServerReply) else 0.0)
            if self._clock() - began + pause > self._retry_s:
                raise error
            yield Sleep(pause)
        raise AssertionError("unreachable")

    def _warn_of_waiting(self) -> None:
        """Warn once each time that the server goes away, so that waiting is not mistaken for work."""
        with self._lock:
            waiting, self._waiting = self._waiting, True
        if not waiting:
            todo = "is it still running?" if self._reached else "start it with `bombus up`"
            log.warning("waiting for %s, up to %g s: %s", self.server_url, self._retry_s, todo)

    def _backoff(self, attempt: int, at_least_s: float) -> float:
        """Return a pause that doubles each time, and is up to half as long again at random, so that clients do not all
        come back at once."""
        pause: float = min(BACKOFF_FIRST_S * 2 ** min(attempt, 20), BACKOFF_MAX_S)
        return max(pause, at_least_s) * (1 + self._jitter() / 2)

    # ---- claiming ---------------------------------------------------------------------------------------------

    def begin_episodes(  # noqa: PLR0913 - those of `SwarmClient.begin_episodes`
        self,
        count: int,
        discard_episode_timeout: float | None = None,
        episode_type: EpisodeKind = "train",
        task_id: str = "",
        max_wait_s: float | None = None,
        max_episode_time: float | None = None,
        sampler: str = "",
    ) -> ClientOperation[list[Credentials]]:
        """Claim `count` episodes, all or none, waiting as long as it takes or for `max_wait_s`.

        Whoever is interrupted while it waits (Ctrl-C, a cancelled task) leaves no episode open.
        Raises `EngineOffline` when no engine runs, `NoEpisode` after `max_wait_s`.
        """
        body: dict[str, Any] = {
            "client_uuid": self.client_uuid,
            "claim_id": uuid.uuid4().hex,
            "count": count,
            "episode_type": episode_type,
            "task_id": task_id,
        }
        if sampler:
            body["sampler"] = sampler
        if discard_episode_timeout is not None:
            body["discard_episode_timeout"] = float(discard_episode_timeout)
        reply = yield from self._claimed("/claim_episodes", body, max_wait_s, self._give_back)
        model = str(reply.get("model", ""))
        version = reply.get("policy_version")
        claimed = [self._credentials(episode, model, version=version) for episode in reply["episodes"]]
        self._note_begun(claimed, reply, discard_episode_timeout, max_episode_time)
        if sampler and episode_type == "train":
            with self._lock:
                self._sampled.update(dict.fromkeys((one.episode_uuid for one in claimed), False))
                trim(self._sampled, BEGUN_MAX)
        return claimed

    def _claimed(
        self,
        path: str,
        body: dict[str, Any],
        max_wait_s: float | None,
        give_back: Callable[[dict[str, Any]], ClientOperation[None]],
    ) -> ClientOperation[dict[str, Any]]:
        """Send a claim until it is granted, and return the reply. When it is interrupted, `give_back` its episodes."""
        if self.on_claimed is not None and self._may_touch:
            body["touches"] = True
        try:
            reply = yield from self._granted(path, body, max_wait_s)
            silence_s = reply.get("client_silence_s")
            if self.on_claimed is not None and silence_s is not None:
                self.on_claimed(float(silence_s))
            return reply
        except (SwarmError, GeneratorExit):
            raise
        except BaseException:
            yield from give_back(body)
            raise

    def _granted(self, path: str, body: dict[str, Any], max_wait_s: float | None) -> ClientOperation[dict[str, Any]]:
        """Send a claim until it is granted, and return the reply. `body` has the id and the waits of the last one."""
        began = self._clock()
        while True:
            attempt_at = self._clock()
            left = CLAIM_WAIT_S if max_wait_s is None else began + max_wait_s - attempt_at
            wait_s = max(0.0, min(CLAIM_WAIT_S, left))
            body |= {"wait_s": wait_s, "waited_s": attempt_at - began}
            try:
                reply = yield from self._request("POST", path, body, wait_s + GENERAL_TIMEOUT_S)
            except SwarmError as error:
                if error.code == Code.UNKNOWN_FIELD and body.pop("touches", False):
                    self._may_touch = False  # the hive is older than this client
                    continue
                if error.code != Code.OTHER_CLAIM:
                    raise
                body["claim_id"] = uuid.uuid4().hex  # the reply was lost for so long that the server took them back
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
                yield Sleep(CLAIM_PAUSE_S * (1 + self._jitter()))

    def _give_back(self, body: dict[str, Any]) -> ClientOperation[None]:
        """Abort the episodes of a claim whose caller was interrupted while the reply was on its way.

        The server grants a claim id once, so that asking again tells what the lost reply said. Each request is tried
        once: an interrupted program wants to end, and what it leaves is aborted when it is idle.
        """
        reply = yield posted("/claim_episodes", body | {"wait_s": 0.0, "waited_s": 0.0}, GIVE_BACK_S)
        if isinstance(reply, ServerReply) and reply.status < 400 and (episodes := _granted_ids(reply)):
            yield posted("/abort_episodes", self._abort_body(episodes, False, "interrupted in its claim"), GIVE_BACK_S)

    def _credentials(
        self, episode: Mapping[str, str], model: str, at: str = "", version: int | None = None
    ) -> Credentials:
        """Return what an agent needs; `at` is the address of the hive where that is not the client's own."""
        return Credentials(
            base_url=(at or self.server_url) + urlsplit(episode["openai_base_url"]).path,
            api_key=episode["openai_api_key"],
            model=model,
            episode_uuid=episode["episode_uuid"],
            policy_version=version,
        )

    def _note_begun(
        self, claimed: Sequence[Credentials], reply: Mapping[str, Any], idle_s: float | None, lifetime_s: float | None
    ) -> None:
        """Note until when these episodes may last."""
        idle_s = idle_s or float(reply.get("discard_episode_timeout", IDLE_S))
        over_at = self._clock() + (lifetime_s or LIFETIMES * idle_s)
        with self._lock:
            self.shortest_idle_s = min(self.shortest_idle_s, idle_s)
            for one in claimed:
                self._begun[one.episode_uuid] = over_at
            trim(self._begun, BEGUN_MAX)

    def begin_episode(  # noqa: PLR0913 - those of `SwarmClient.begin_episode`
        self,
        discard_episode_timeout: float | None = None,
        episode_type: EpisodeKind = "train",
        throttle_policy: ThrottlePolicy | None = None,
        max_wait_s: float | None = None,
        max_episode_time: float | None = None,
        sampler: str = "",
    ) -> ClientOperation[tuple[str, Credentials]]:
        task_id = ""
        if throttle_policy is not None and episode_type == "train":
            task_id = throttle_policy.current_task_id
            yield from self._throttled(throttle_policy)
        claimed = yield from self.begin_episodes(
            1, discard_episode_timeout, episode_type, task_id, max_wait_s, max_episode_time, sampler
        )
        return claimed[0].episode_uuid, claimed[0]

    def _throttled(self, policy: ThrottlePolicy) -> ClientOperation[None]:
        """Wait until this client may start the policy's task, and record that it has started it."""
        while True:
            stat = yield from self.get_rollout_stat()
            with self._lock:
                if not should_throttle(policy, stat, self.client_uuid, self._started_tasks):
                    if policy.current_task_id not in self._started_tasks:
                        self._started_tasks.append(policy.current_task_id)
                        kept = 3 * policy.expected_batch_size * policy.expected_num_repeat
                        del self._started_tasks[:-kept]
                    return
            yield Sleep(THROTTLE_PAUSE_S)

    # ---- ending -----------------------------------------------------------------------------------------------

    def end_episodes(self, ends: Sequence[EpisodeReport]) -> ClientOperation[None]:
        """End episodes, all or none. Those that have lasted too long are aborted instead, with a warning."""
        late = [episode for _, episode, _ in ends if self._is_late(episode)]
        if late:
            warn_of_late(map(without_secret, late))
            yield from self.abort_episodes(late, detail="over max_episode_time")
        body = [end_body(task, episode, output) for task, episode, output in ends if episode not in late]
        if body:
            yield from self._request("POST", "/end_episodes", {"client_uuid": self.client_uuid, "episodes": body})
        with self._lock:
            for _, episode, _ in ends:
                self._begun.pop(episode, None)
                if episode in self._sampled and episode not in late:
                    self._sampled[episode] = True

    def finished(self, episode: str) -> bool:
        """Note that an agent is done, and return whether it is in time.

        If so, its episode may wait for the others of its group as long as they take.
        """
        if self._is_late(episode):
            return False
        with self._lock:
            self._begun[episode] = math.inf
        return True

    def extend(self, episodes: Sequence[str], seconds: float) -> None:
        """Let episodes last longer, whose agents have begun so many seconds after their claim."""
        with self._lock:
            for episode in episodes:
                if episode in self._begun:
                    self._begun[episode] += seconds

    @property
    def now(self) -> float:
        """The seconds of the client's clock."""
        return self._clock()

    def _is_late(self, episode: str) -> bool:
        with self._lock:
            over_at = self._begun.get(episode)
        return over_at is not None and self._clock() > over_at

    def abort_episodes(self, episodes: Sequence[str], infra: bool = False, detail: str = "") -> ClientOperation[None]:
        """Abort episodes. Those that are already over stay as they are."""
        if not episodes:
            return
        yield from self._request("POST", "/abort_episodes", self._abort_body(episodes, infra, detail))
        self._note_over(episodes)

    def _note_over(self, episodes: Sequence[str]) -> None:
        with self._lock:
            for episode in episodes:
                self._begun.pop(episode, None)

    def give_up(self, episodes: Sequence[str]) -> ClientOperation[None]:
        """Abort the episodes of an interrupted program, which wants to end: there is one attempt, and a warning when it
        fails."""
        yield from self._give_up("/abort_episodes", episodes)

    def _give_up(self, path: str, episodes: Sequence[str]) -> ClientOperation[None]:
        for first in range(0, len(episodes), ABORTED_AT_ONCE):
            some = episodes[first : first + ABORTED_AT_ONCE]
            reply = yield posted(path, self._abort_body(some, False, "the client was interrupted"), GIVE_BACK_S)
            if not isinstance(reply, ServerReply) or reply.status >= 400:
                left = len(episodes) - first
                log.warning("%d open episodes could not be aborted, and will end when they are idle", left)
                break
        self._note_over(episodes)

    def begun(self) -> list[str]:
        """Return the episodes that this client has neither ended nor aborted."""
        with self._lock:
            return list(self._begun)

    def still_begun(self, episodes: Sequence[str]) -> list[str]:
        """Return those of these episodes that are `begun`."""
        with self._lock:
            return [episode for episode in episodes if episode in self._begun]

    def _abort_body(self, episodes: Sequence[str], infra: bool, detail: str) -> dict[str, Any]:
        return {
            "client_uuid": self.client_uuid,
            "episode_uuids": list(episodes),
            "infra": infra,
            "detail": detail[:1000],
        }

    # ---- what was learnt --------------------------------------------------------------------------------------

    def take_datums(
        self, episodes: Sequence[str] | None = None, estimator: Estimator | str = Estimator.DR_GRPO
    ) -> ClientOperation[list[EpisodeDatum]]:
        """See `SwarmClient.take_datums`."""
        compared = Estimator(estimator)
        datums_of((), compared)  # an estimator that cannot be used is refused before anything is taken
        with self._lock:
            wanted = [episode for episode, ended in self._sampled.items() if ended] if episodes is None else episodes
            ours = [episode for episode in dict.fromkeys(wanted) if episode not in self._taking]
            self._taking.update(ours)
        try:
            return (yield from self._taken(ours, compared))
        finally:
            with self._lock:
                self._taking.difference_update(ours)

    def _taken(self, episodes: list[str], compared: Estimator) -> ClientOperation[list[EpisodeDatum]]:
        found, lost = yield from self._read_ended(episodes)
        datums = datums_of(found, compared)
        names = [*(each.episode_uuid for each in found), *lost]
        for first in range(0, len(names), TAKEN_AT_ONCE):
            body = {"client_uuid": self.client_uuid, "episode_uuids": names[first : first + TAKEN_AT_ONCE]}
            try:
                yield from self._request("POST", "/take_ended_episodes", body)
            except SwarmError as error:  # their tokens are here: what is left there goes by itself
                log.warning("episodes whose data were read stay on the server until their time is over: %s", error)
        with self._lock:
            for name in episodes:
                self._sampled.pop(name, None)
        return datums

    def _read_ended(self, episodes: list[str]) -> ClientOperation[tuple[list[EndedEpisode], list[str]]]:
        """Read ended episodes, in as many requests as it takes, and return them, and those whose calls are lost.

        What gives no data is said with a warning.
        """
        found: list[EndedEpisode] = []
        lost: list[str] = []
        left = episodes
        while left:
            asked, later = left[:READ_AT_ONCE], left[READ_AT_ONCE:]
            body = {"client_uuid": self.client_uuid, "episode_uuids": asked}
            reply = yield from self._request("POST", "/read_ended_episodes", body, START_TIMEOUT_S)
            try:
                found += read_ended(reply["episodes"])
                missing, rest = {**dict.fromkeys(reply["gone"], "it is gone"), **reply["lost"]}, list(reply["left"])
                lost += reply["lost"]
            except (msgspec.MsgspecError, KeyError, TypeError) as error:
                raise ServerFault(f"The server's reply does not have ended episodes: {error}") from error
            if len(rest) >= len(asked):
                raise ServerFault("The server leaves all episodes for another request.")
            for episode, why in missing.items():
                log.warning("episode %s gives no data: %s", without_secret(episode), why)
            left = rest + later
        return found, lost

    def touch_episodes(self, episodes: Sequence[str]) -> ClientOperation[list[str]]:
        """Keep episodes from going idle. Returns those that are over."""
        if not episodes:
            return []
        body = {"client_uuid": self.client_uuid, "episode_uuids": list(episodes)}
        reply = yield from self._request("POST", "/touch_episodes", body)
        return list(reply["over"])

    def touch_client(self, within_s: float) -> ClientOperation[bool]:
        """Show that this client lives. Returns whether the hive has heard it: there is one attempt, and no error."""
        reply = yield posted("/touch_client", {"client_uuid": self.client_uuid}, within_s)
        return isinstance(reply, ServerReply) and reply.status < 400

    def watch_episodes(self, episodes: Sequence[str]) -> ClientOperation[dict[str, EpisodeUsage]]:
        """Keep episodes from going idle. Returns what those that are still open have used."""
        body = {"client_uuid": self.client_uuid, "episode_uuids": list(episodes)}
        reply = yield from self._request("POST", "/touch_episodes", body)
        if "used" not in reply:
            raise ServerFault("The hive is older than this client: it does not say what episodes have used.")
        return {episode: EpisodeUsage.model_validate(used) for episode, used in reply["used"].items()}

    def episode_usage(self, episode: str) -> ClientOperation[EpisodeUsage | None]:
        """Return what an episode has used, None when it is over.

        A call is answered a moment before it is counted. So this looks until nothing has changed since the last look,
        and for longer where there is no call at all.
        """
        began = self._clock()
        before: EpisodeUsage | None = None
        while True:
            used = (yield from self.watch_episodes([episode])).get(episode)
            if used is None or (used == before and (used.calls or self._clock() - began >= CALL_COUNTED_S)):
                return used
            before = used
            yield Sleep(USAGE_PAUSE_S)

    def can_continue_episode(self, episode_uuid: str) -> ClientOperation[bool]:
        body = {"client_uuid": self.client_uuid, "episode_uuid": episode_uuid}
        reply = yield from self._request("POST", "/can_continue_episode", body)
        return bool(reply["can_continue"])

    # ---- the engine -------------------------------------------------------------------------------------------

    def get_engine_status(self) -> ClientOperation[tuple[str, dict[str, Any]]]:
        """Return the phase and the whole reply; `ENGINE.CANNOT_CONNECT` when the server does not reply."""
        try:
            reply = yield from self._request("GET", "/get_engine_status", timeout_s=10.0)
        except (ServerUnreachable, ServerBusy) as error:
            return CANNOT_CONNECT, {"engine_status_detail": error.why}
        return str(reply["engine_status"]), reply

    def get_rollout_stat(self) -> ClientOperation[PoolInformation]:
        path = f"/get_current_batch_rollout_pool_information?client_uuid={quote(self.client_uuid)}"
        reply = yield from self._request("GET", path)
        return PoolInformation.model_validate(reply)

    def sync_train_config(self, job: Mapping[str, Any] | str) -> ClientOperation[None]:
        """Configure the engine, which must be OFFLINE, with a job. Raises `BadConfig`, `WrongPhase`.

        Keys of the job that have no effect are logged.
        """
        reply = yield from self._request("POST", "/sync_train_config", {"yaml_as_string": _text(job)})
        for key in reply.get("ignored") or []:
            log.warning("%s", no_effect(str(key)))

    def start_engine(self, timeout_s: float = 3600.0) -> ClientOperation[None]:
        """Start the engine and wait until it is ROLLING. Raises `WrongPhase`, `EngineOffline` with the reason.

        Raises `BadConfig` when the job cannot go on at the checkpoints that its experiment has left.
        """
        reply = yield from self._request("POST", "/start_engine", timeout_s=START_TIMEOUT_S)
        if not reply.get("success"):
            why, code = str(reply.get("error", "the engine did not start")), str(reply.get("code", ""))
            raise BadConfig(why, code, 200) if code == Code.BAD_CONFIG else WrongPhase(why, code, 200)
        if reply.get("begun"):
            log.warning("run %s begins %s", reply.get("run"), reply["begun"])
        yield from self.wait_for_status(ROLLING, timeout_s)

    def stop_engine(self) -> ClientOperation[None]:
        reply = yield from self._request("POST", "/stop_engine", timeout_s=START_TIMEOUT_S)
        if not reply.get("success"):
            raise WrongPhase(str(reply.get("failure_reason", "")), str(reply.get("code", "")), 200)
        yield from self.wait_for_status(OFFLINE)

    def resume_engine(self) -> ClientOperation[None]:
        """Let a suspended run try again. Raises `WrongPhase` when there is no run."""
        reply = yield from self._request("POST", "/resume_engine", timeout_s=START_TIMEOUT_S)
        if not reply.get("success"):
            raise WrongPhase(str(reply.get("failure_reason", "")), str(reply.get("code", "")), 200)
        self._suspended = ""

    def _warn_of_suspension(self, reply: Mapping[str, Any]) -> None:
        """Log once for each reason that the run is suspended: whoever waits for it waits for its operator."""
        why = str(reply.get("suspended", ""))
        if why not in ("", self._suspended):
            log.warning("the run is suspended: %s", why)
            log.warning("once the cause is gone, client.resume_engine() or `bombus resume` lets it go on")
        self._suspended = why

    def wait_for_status(self, wanted: str, timeout_s: float = 3600.0) -> ClientOperation[None]:
        """Wait until the engine is in this phase. Raises `EngineOffline` when it goes OFFLINE, `TimeoutError`.

        Why its run is suspended is logged, once for each reason.
        """
        began = self._clock()
        while True:
            status, reply = yield from self.get_engine_status()
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
            yield Sleep(POLL_S)

    def auto_start(self, job: Mapping[str, Any] | str, force_restart: bool = False) -> ClientOperation[None]:
        """See `SwarmClient.auto_sync_train_config_and_start_engine`."""
        if force_restart:
            yield from self.stop_engine()
        status, reply = yield from self.get_engine_status()
        if status == CANNOT_CONNECT:
            raise ServerUnreachable(f"{reply['engine_status_detail']}. Start a hive with `bombus up`.")
        if status == OFFLINE:
            try:
                yield from self.sync_train_config(job)
                yield from self.start_engine()
                status = ROLLING
            except WrongPhase as error:
                if isinstance(error, EngineOffline):
                    raise
                # Another client was faster, perhaps between our two requests: its job runs.
                log.info("the engine is being started by another client (%s)", error.why)
        elif reply.get("global_step") or reply.get("pool_episodes"):
            log.warning("%s", _where_it_goes_on(self.server_url, reply))
        if status not in (ROLLING, ROLLING_POST):
            yield from self.wait_for_status(ROLLING)
        yield from self._join(job)

    def _join(self, job: Mapping[str, Any] | str) -> ClientOperation[None]:
        """Join the job that runs. Raises `OtherModel`. Any other difference is only a warning, because the clients of
        one engine need not agree on settings that are not theirs, such as the learning rate."""
        reply = yield from self._request("POST", "/compare_train_config", {"yaml_as_string": _text(job)})
        differences: dict[str, Any] = reply["differences"]
        if not differences:
            return
        why = _describe_differences(self.server_url, differences)
        if MODEL in differences:
            raise OtherModel(why, Code.WRONG_PHASE, 200)
        log.warning("%s", why)

    def agree_sync_weight(self) -> ClientOperation[None]:
        """Say that this client has sampled enough for this batch. Raises `WrongPhase`."""
        reply = yield from self._request("POST", "/agree_sync_weight", {"client_uuid": self.client_uuid})
        if not reply.get("success"):
            raise WrongPhase(str(reply.get("failure_reason", "")), str(reply.get("code", "")), 200)

    def get_json(self, path: str) -> ClientOperation[dict[str, Any]]:
        return (yield from self._request("GET", path))

    def post_json(self, path: str, body: Mapping[str, Any]) -> ClientOperation[dict[str, Any]]:
        return (yield from self._request("POST", path, body))


def _text(job: Mapping[str, Any] | str) -> str:
    return job if isinstance(job, str) else msgspec.json.encode(job).decode()


def _where_it_goes_on(url: str, reply: Mapping[str, Any]) -> str:
    """Say at which step an engine goes on that another program has started, and what that has left."""
    left = reply.get("pool_episodes", 0)
    pool = f", and the next batch begins with {left} ended episodes of its pool" if left else ""
    return (
        f"the engine at {url} runs already: this program goes on with its run {reply.get('run', '-')} after step "
        f"{reply.get('global_step', '-')}{pool}. client.stop_engine() or `bombus stop` ends that run"
    )


def _describe_differences(url: str, differences: dict[str, Any]) -> str:
    """Say how a job differs from the one that runs, and how to train it instead."""
    first = sorted(differences, key=lambda name: name != MODEL)[:DIFFERENCES_SHOWN]
    shown = [f"{name} is {differences[name]['running']!r}, not {differences[name]['wanted']!r}" for name in first]
    more = f", and {len(differences) - len(first)} more" if len(differences) > len(first) else ""
    return (
        f"The engine at {url} goes on with the job that it runs, which is not yours: {'; '.join(shown)}{more}. "
        "To train yours, stop the engine first, with client.stop_engine() or `bombus stop`."
    )


def check_task(task: Task) -> None:
    """Raise `NoTaskId` for a task with which no episode can be ended."""
    if not task.task_id:
        raise NoTaskId("task.task_id is empty: episodes are compared within a task, so it needs an id")


def end_body(task: Task, episode: str, output: WorkflowOutput | BaseModel) -> dict[str, Any]:
    """Return how the server is told of an episode's end, as `reports` has it. Raises `NoTaskId` for a task without an
    id."""
    check_task(task)
    given = {name: getattr(output, name, None) for name in ("metadata", "log_metrics", "is_success")}
    report = msgspec.structs.asdict(read_report(**given))
    report["metadata"] |= {"task_id": task.task_id}
    body = {
        "episode_uuid": episode,
        "task_id": task.task_id,
        "workflow_output": {"reward": getattr(output, "reward", None), **report},
    }
    return {**body, "data_set": task.data_set} if task.data_set else body


def warn_of_late(episodes: Iterable[str]) -> None:
    """Log which episodes have lasted too long, by the names that may be shown."""
    log.warning(
        "%s lasted longer than max_episode_time: aborted instead of ended. Begin with a longer "
        "discard_episode_timeout, or give max_episode_time.",
        ", ".join(episodes),
    )


def object_of(reply: ServerReply) -> dict[str, Any]:
    """Return a reply's JSON object. Raises `ServerFault` where it is none."""
    try:
        return msgspec.json.decode(reply.body, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ServerFault(f"The server's reply is not a JSON object: {error}", "", reply.status) from error


def _granted_ids(reply: ServerReply) -> list[str]:
    """Return the episodes that a claim's reply grants, none where it cannot be read."""
    try:
        return [episode["episode_uuid"] for episode in object_of(reply)["episodes"]]
    except (ServerFault, KeyError):
        return []


def posted(path: str, body: Mapping[str, Any], timeout_s: float) -> ServerRequest:
    """Return a command with an id of its own, by which the server knows it again."""
    headers = JSON_HEADERS | {"Idempotency-Key": uuid.uuid4().hex}
    encoded = msgspec.json.encode(body)
    return ServerRequest(method="POST", path=path, body=encoded, headers=headers, timeout_s=timeout_s)


def _is_away(reply: ServerReply | NoReply, error: SwarmError) -> bool:
    """Return whether the server is not there for now. A fault that the hive reports has a code: a 500 without comes
    from a proxy, or from a server that is being stopped."""
    return isinstance(reply, NoReply) or reply.status in AWAY or (reply.status == 500 and not error.code)


def _error_of(reply: ServerReply | NoReply, path: str) -> SwarmError:
    if isinstance(reply, NoReply):
        return ServerUnreachable(f"{path}: {reply.why}")
    try:
        body = msgspec.json.decode(reply.body, type=dict[str, Any])
    except msgspec.MsgspecError:
        body = {"detail": reply.body[:300].decode(errors="replace")}
    why, code = body.get("detail", body), str(body.get("code", ""))
    if reply.status == 404 and not code:
        asked = (reply.url or path).partition("?")[0]
        why = f"The server has no {asked} ({why}): is this the address of a hive, and the engine one of its engines?"
    return error_for(reply.status, code, why if isinstance(why, str) else str(why))
