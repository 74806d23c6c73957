"""The routes that claim episodes. A claim waits in slices of time, and is confirmed once the response is written
(R13)."""

import asyncio
import itertools
import time
import uuid
from collections.abc import Callable

import msgspec
from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from bombus.errors import Code, Refused
from bombus.hive import inbox
from bombus.hive.events import EpisodeType
from bombus.hive.inbox import Granted, MultiModelGranted
from bombus.hive.records import digest
from bombus.hive.steps import idle_limit_s
from bombus.sdk.throttle import should_throttle
from bombus.sdk.types import PoolInformation
from bombus_gateway.call.admission import check_storage
from bombus_gateway.operations_wire.paths import read_path
from bombus_gateway.plain_routes import JsonResponse
from bombus_gateway.swarm import bodies, views
from bombus_gateway.swarm.bodies import throttle_policy
from bombus_gateway.swarm.context import EngineContext

CLAIM_OVER = "The episodes of this claim have already ended. Use a fresh id for each claim."
CLAIM_SLICE_S = 2.0
CLAIM_ANSWER_S = 10.0  # time beyond the slice, in case another coordinator has to take over


class Confirmed(JsonResponse):
    """A response that calls `confirm` once it has been written to a live connection (R13)."""

    def __init__(self, content: object, request: Request, confirm: Callable[[], None]) -> None:
        super().__init__(content)
        self._request = request
        self._confirm = confirm

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if await self._request.is_disconnected():
            return
        await super().__call__(scope, receive, send)
        self._confirm()


def sampler_of(text: str) -> str:
    """Return the log's name for the saved model that episodes sample from. Raises `Refused` for an invalid path."""
    return text if text in ("", inbox.BASE_SAMPLER) else str(read_path(text))


class SlicedClaims:
    """Sends claims that wait, each of them in slices under one claim id (R13)."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._gateway = context.gateway

    def idle_limit_s(self, request: Request, wanted_s: float) -> float:
        """Return a claim's idle limit: what the client wants, but at most the limit of the client's key."""
        return min(wanted_s, self._gateway.key_of(request).idle_max_s or wanted_s)

    def claim_id(self, request: Request, chosen: str) -> str:
        """Return the claim's id on the log. Clients with different keys never share an id, whatever ids they choose."""
        owner = self._gateway.holder_of(request)
        return f"c-{digest((f'{owner}//{chosen}' if owner else chosen).encode()).hex()}"

    async def claim(
        self, request: Request, claim: inbox.Claim, wait_s: float, waited_s: float = 0.0
    ) -> Granted | MultiModelGranted | Refused:
        """Retry a claim until it is granted, `wait_s` is over, the client hangs up, or the gateway is stopping.

        Return the refusal if no episode is available. Raises `Refused` for a claim that could never be granted.
        """
        check_storage(self._context.gateway.follower.hive)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        holder = self._gateway.key_of(request)
        claim = msgspec.structs.replace(
            claim,
            first_asked_ns=time.time_ns() - int(waited_s * 1e9),
            owner=holder.name,
            open_max=holder.open_max,
            waiting_max=holder.waiting_max,
            admin=holder.admin,
        )
        message_id = uuid.uuid4().hex
        for number in itertools.count():
            started = loop.time()
            slice_s = max(0.0, min(CLAIM_SLICE_S, deadline - started))
            message = msgspec.structs.replace(claim, id=f"{message_id}.{number}", wait_s=slice_s)
            try:
                answer = await self._context.execute(request, message, slice_s, CLAIM_ANSWER_S)
            except Refused as refused:
                if refused.code not in (Code.NO_EPISODES, Code.WRONG_PHASE):
                    raise
                waited = loop.time() - started >= slice_s / 2  # if not, waiting is useless: the engine is OFFLINE
                if waited and loop.time() < deadline and await self._goes_on(request):
                    continue
                return refused
            assert isinstance(answer, Granted | MultiModelGranted)
            return answer
        raise AssertionError("unreachable")

    async def _goes_on(self, request: Request) -> bool:
        """Return whether a claim may keep waiting: its client is connected, and this gateway is not stopping."""
        return self._context.gateway.ready and not await request.is_disconnected()


class ClaimRoutes:
    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._claims = SlicedClaims(context)

    async def claim_episode(self, request: Request) -> Response:
        """Claim one episode. A claim that fails is answered with status 200 and the reason in `fail_cause`."""
        raw, body = await self._context.read(request, bodies.ClaimEpisode)
        throttle = body.throttle_policy or bodies.ThrottlePolicyBody()
        claim = inbox.Claim(
            id="",
            engine=self._context.engine,
            claim=self._context.command_id(request, "claim", body.client_uuid, raw),
            client=body.client_uuid,
            type=EpisodeType(body.episode_type),
            discard_timeout_s=self._idle_limit_s(request, body.discard_episode_timeout),
            task_hint=throttle.current_task_id or "",
        )
        outcome: Granted | Refused | None = self._throttled(claim, throttle)
        if outcome is None:
            outcome = await self._claim(request, claim, self._context.gateway.settings.claim_wait_s)
        reply = {
            "success": False,
            "client_uuid": body.client_uuid,
            "episode_uuid": "",
            "openai_base_url": "",
            "openai_api_key": "",
            "fail_cause": "",
        }
        if isinstance(outcome, Refused):
            return JsonResponse(reply | self._failure(outcome))
        episode, *_ = self._episodes(request, outcome)
        reply |= {"success": True} | episode | self._terms(outcome)
        return Confirmed(reply, request, lambda: self._confirm(claim.claim))

    async def claim_episodes(self, request: Request) -> Response:
        """Claim `count` episodes, all or none, waiting up to `wait_s` on the server."""
        _, body = await self._context.read(request, bodies.ClaimEpisodes)
        claim = inbox.Claim(
            id="",
            engine=self._context.engine,
            claim=self._claims.claim_id(request, f"{body.client_uuid}/{body.claim_id}"),
            client=body.client_uuid,
            count=body.count,
            type=EpisodeType(body.episode_type),
            discard_timeout_s=self._idle_limit_s(request, body.discard_episode_timeout),
            task_hint=body.task_id,
            sampler=sampler_of(body.sampler),
            touches=body.touches,
        )
        outcome = await self._claim(request, claim, body.wait_s, body.waited_s)
        reply = {"success": False, "client_uuid": body.client_uuid, "claim_id": body.claim_id, "episodes": []}
        if isinstance(outcome, Refused):
            return JsonResponse(reply | self._failure(outcome))
        reply |= {"success": True, "fail_cause": "", "episodes": self._episodes(request, outcome)}
        reply |= self._terms(outcome) | {"client_silence_s": self._context.state.collection.client_silence_s}
        return Confirmed(reply, request, lambda: self._confirm(claim.claim))

    def _idle_limit_s(self, request: Request, wanted_s: float | None) -> float:
        limit_s = idle_limit_s(self._context.state.steps) if wanted_s is None else wanted_s
        return self._claims.idle_limit_s(request, limit_s)

    def _throttled(self, claim: inbox.Claim, wanted: bodies.ThrottlePolicyBody) -> Refused | None:
        """Return a refusal if the client's own policy makes the claim wait. Clients that implement the swarm contract
        retry when they see the refusal's text."""
        policy = throttle_policy(wanted)
        if policy is None or claim.type != EpisodeType.TRAIN:
            return None
        pool = views.pool_information(self._context.state, time.time_ns(), claim.client)
        if not should_throttle(policy, PoolInformation.model_validate(pool), claim.client, ()):
            return None
        return Refused(
            Code.NO_EPISODES,
            "No available episodes to claim. This client already works on as many tasks as its throttle_policy allows.",
        )

    async def _claim(
        self, request: Request, claim: inbox.Claim, wait_s: float, waited_s: float = 0.0
    ) -> Granted | Refused:
        outcome = await self._claims.claim(request, claim, wait_s, waited_s)
        assert not isinstance(outcome, MultiModelGranted)
        if isinstance(outcome, Granted):
            self._check_not_over(outcome)
        return outcome

    def _confirm(self, claim: str) -> None:
        self._context.gateway.heartbeats.confirm(self._context.engine, claim)

    def _check_not_over(self, granted: Granted) -> None:
        """Raise `Refused` for a claim that is repeated after all of its episodes have ended (R13)."""
        state = self._context.state
        if all(state.is_over(episode) for episode in granted.episodes):
            raise Refused(Code.OTHER_CLAIM, CLAIM_OVER)

    def _failure(self, refused: Refused) -> views.JsonObject:
        state = self._context.state
        status = {"engine_status": state.phase, "suspended": state.suspended}
        return {"fail_cause": refused.why, "code": refused.code} | status

    def _episodes(self, request: Request, granted: Granted) -> list[dict[str, str]]:
        """Return, for each episode, the fields that its client and its agent need to use it."""
        expires_ns = self._context.key_expires_ns(granted.claimed_ns)
        return [
            self._context.access(request, self._context.engine, granted.run, episode, expires_ns)
            for episode in granted.episodes
        ]

    def _terms(self, granted: Granted) -> views.JsonObject:
        """Return the terms of a claim. Times are in seconds since the epoch.

        `discard_at` is the time at which the episode is aborted if it shows no sign of life; each call and touch
        postpones this time.
        """
        return {
            "discard_at": granted.claimed_ns / 1e9 + granted.discard_timeout_s,
            "discard_episode_timeout": granted.discard_timeout_s,
            "key_expires_at": self._context.key_expires_ns(granted.claimed_ns) / 1e9,
            "policy_version": granted.version,
            "model": views.model_of(self._context.state),
        }
