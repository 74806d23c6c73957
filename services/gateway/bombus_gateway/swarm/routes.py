"""The swarm door: claim, end and abort episodes, start and stop an engine, ask how it is.

The routes of the swarm contract to the letter, so that its clients run unmodified, and beside them our own that take
whole groups in one request. Reads come from the folded state; commands go through the inbox (R1).
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel

from bombus.errors import Code, LogCorrupted, Refused
from bombus.hive import inbox
from bombus.hive.inbox import EpisodeResult
from bombus_gateway.access import Door, Guard
from bombus_gateway.context import Gateway
from bombus_gateway.swarm import bodies as models
from bombus_gateway.swarm import views
from bombus_gateway.swarm.bodies import parse, read_raw, result_of
from bombus_gateway.swarm.claims import ClaimRoutes
from bombus_gateway.swarm.context import EngineContext, JsonResponse
from bombus_gateway.swarm.engine import EngineRoutes
from bombus_gateway.swarm.replay import replay_call

log = logging.getLogger(__name__)

NEWS_S = 1.0  # for an episode that another gateway has just handed out

Handler = Callable[[Request], Awaitable[Response]]


def swarm_router(gateway: Gateway, engine: str | None = None) -> APIRouter:
    """All swarm routes of one engine (the first one when none is named), to be mounted under its prefix."""
    context = EngineContext(gateway, engine or gateway.settings.engines[0])
    run, claims, episodes = EngineRoutes(context), ClaimRoutes(context), EpisodeRoutes(context)
    settings = gateway.settings
    guards = {door: Depends(Guard(door, settings.keys, settings.public_url)) for door in Door}
    ready = Depends(context.ready)
    router = APIRouter(tags=["swarm"])
    routes: tuple[tuple[Door, str, str, Handler, type[BaseModel] | None], ...] = (
        (Door.CLIENT, "GET", "/get_engine_status", run.get_engine_status, None),
        (Door.CONTROL, "POST", "/sync_train_config", run.sync_train_config, models.SyncTrainConfig),
        (Door.CLIENT, "POST", "/compare_train_config", run.compare_train_config, models.CompareTrainConfig),
        (Door.CONTROL, "POST", "/start_engine", run.start_engine, None),
        (Door.CONTROL, "POST", "/stop_engine", run.stop_engine, None),
        (Door.CLIENT, "POST", "/claim_episode", claims.claim_episode, models.ClaimEpisode),
        (Door.CLIENT, "POST", "/end_episode", episodes.end_episode, models.EndEpisode),
        (Door.CLIENT, "POST", "/abort_episode", episodes.abort_episode, models.AbortEpisode),
        (Door.CLIENT, "POST", "/can_continue_episode", episodes.can_continue_episode, models.CanContinueEpisode),
        (Door.CLIENT, "POST", "/get_episode_buffer", episodes.get_episode_buffer, None),
        (Door.CLIENT, "GET", "/get_current_batch_rollout_pool_information", run.get_pool_information, None),
        (Door.CLIENT, "POST", "/replay_latest_llm_call", episodes.replay_latest_llm_call, models.ReplayLatestCall),
        (Door.CLIENT, "POST", "/agree_sync_weight", run.agree_sync_weight, models.AgreeSyncWeight),
        (Door.CLIENT, "GET", "/get_server_experiment_dir", run.get_server_experiment_dir, None),
        (Door.CONTROL, "POST", "/sync_train_code", run.sync_train_code, None),
        (Door.CLIENT, "POST", "/push_verbose_log", run.push_verbose_log, models.PushVerboseLog),
        (Door.CLIENT, "POST", "/claim_episodes", claims.claim_episodes, models.ClaimEpisodes),
        (Door.CLIENT, "POST", "/end_episodes", episodes.end_episodes, models.EndEpisodes),
        (Door.CLIENT, "POST", "/abort_episodes", episodes.abort_episodes, models.AbortEpisodes),
        (Door.CLIENT, "POST", "/touch_episodes", episodes.touch_episodes, models.TouchEpisodes),
    )
    for door, method, path, handler, body in routes:
        documented = {"requestBody": _documented(body)} if body is not None else None
        router.add_api_route(
            path,
            handler,
            methods=[method],
            dependencies=[guards[door], ready],
            response_class=JsonResponse,
            openapi_extra=documented,
        )
    return router


def _documented(body: type[BaseModel]) -> dict[str, Any]:
    """The request's schema for the OpenAPI page; bodies are read by hand, so FastAPI does not know it."""
    schema = body.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inlined(part: Any) -> Any:
        if isinstance(part, list):
            return [inlined(item) for item in part]
        if not isinstance(part, dict):
            return part
        if "$ref" in part:
            return inlined(definitions[part["$ref"].rpartition("/")[2]])
        return {name: inlined(item) for name, item in part.items()}

    return {"required": True, "content": {"application/json": {"schema": inlined(schema)}}}


class EpisodeRoutes:
    """Routes about episodes that are claimed."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context

    async def end_episode(self, request: Request) -> Response:
        """End an episode with its reward. The same end again is a success; a different one is a 409."""
        raw = await read_raw(request)
        body = parse(models.EndEpisode, raw)
        results = (result_of(body.episode_uuid, body.task_id, body.workflow_output),)
        await self._end(request, raw, body.client_uuid, results, body.declare_client_active)
        return JsonResponse({"success": True})

    async def end_episodes(self, request: Request) -> Response:
        """End a whole group, all or none."""
        raw = await read_raw(request)
        body = parse(models.EndEpisodes, raw)
        results = tuple(result_of(end.episode_uuid, end.task_id, end.workflow_output) for end in body.episodes)
        await self._end(request, raw, body.client_uuid, results)
        return JsonResponse({"success": True})

    async def _end(
        self, request: Request, raw: bytes, client: str, results: tuple[EpisodeResult, ...], active: bool = True
    ) -> None:
        command = inbox.End(
            id=self._context.command_id(request, "end", client, raw),
            engine=self._context.engine,
            client=client,
            results=results,
            client_active=active,
        )
        await self._context.ask(request, command)

    async def abort_episode(self, request: Request) -> Response:
        """Give an episode up. One that is over already stays as it is."""
        raw = await read_raw(request)
        body = parse(models.AbortEpisode, raw)
        command = inbox.Abort(
            id=self._context.command_id(request, "abort", body.client_uuid, raw),
            engine=self._context.engine,
            client=body.client_uuid,
            episodes=(body.episode_uuid,),
        )
        await self._context.ask(request, command)
        return JsonResponse({"success": True})

    async def abort_episodes(self, request: Request) -> Response:
        """Give episodes up, all or none; `infra` when no model is to blame."""
        raw = await read_raw(request)
        body = parse(models.AbortEpisodes, raw)
        command = inbox.Abort(
            id=self._context.command_id(request, "abort", body.client_uuid, raw),
            engine=self._context.engine,
            client=body.client_uuid,
            episodes=tuple(body.episode_uuids),
            infra=body.infra,
            detail=body.detail,
        )
        await self._context.ask(request, command)
        return JsonResponse({"success": True})

    async def can_continue_episode(self, request: Request) -> Response:
        """Whether this episode is still this client's, so that it is worth going on."""
        body = parse(models.CanContinueEpisode, await read_raw(request))
        await self._hear_of(body.episode_uuid)
        return JsonResponse({"can_continue": self._is_held(body.client_uuid, body.episode_uuid)})

    async def touch_episodes(self, request: Request) -> Response:
        """Signs of life for episodes whose agents are busy elsewhere. The reply says which ones are over."""
        body = parse(models.TouchEpisodes, await read_raw(request))
        await self._hear_of(body.episode_uuids[-1])
        touched = [episode for episode in body.episode_uuids if self._is_held(body.client_uuid, episode)]
        for episode in touched:
            self._context.gateway.heartbeats.touch(self._context.engine, episode)
        held = set(touched)
        return JsonResponse({"touched": touched, "over": [one for one in body.episode_uuids if one not in held]})

    async def get_episode_buffer(self, request: Request) -> Response:
        """Every open episode, without its key."""
        return JsonResponse(views.episode_buffer(self._context.state, self._context.base_url(request)))

    async def replay_latest_llm_call(self, request: Request) -> Response:
        """The newest complete call, of the episode that the body names or of all: `{input, output}`."""
        body = parse(models.ReplayLatestCall, await read_raw(request))
        ref = views.latest_call(self._context.state, body.episode_uuid)
        if ref is None:
            raise Refused(Code.NO_CALLS, "There is no complete call to replay.")
        try:
            return JsonResponse(await replay_call(self._context.gateway.bus, ref, views.model_of(self._context.state)))
        except LogCorrupted as error:
            log.warning("a call cannot be read back", extra={"call": ref.id, "why": str(error)})
            raise Refused(Code.NO_CALLS, f"The log no longer holds call {ref.id}: {error}") from error

    async def _hear_of(self, episode: str) -> None:
        """Wait a moment for an episode of this run that this gateway's fold does not know yet."""
        state = self._context.state
        if episode in state.open or state.is_over(episode):
            return
        try:
            await self._context.gateway.follower.wait_for(lambda _: episode in self._context.state.open, NEWS_S)
        except TimeoutError:
            pass  # then it is not open

    def _is_held(self, client: str, episode: str) -> bool:
        state = self._context.state
        held = state.open.get(episode)
        return held is not None and held.client == client and state.rolling
