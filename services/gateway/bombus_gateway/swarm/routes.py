"""The swarm API: claim, end and abort episodes, start and stop an engine, and read its state.

It serves the swarm contract's routes to the letter, so that clients of the contract run unmodified. It also serves our
own routes, which take whole groups in one request. Reads are answered from the folded state; commands go through the
inbox (R1).
"""

import logging
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

from fastapi import Request, Response
from pydantic import BaseModel

from bombus.errors import Code, LogCorrupted, Refused
from bombus.hive import inbox
from bombus.hive.events import HIVE
from bombus.hive.inbox import EpisodeResult
from bombus_gateway.access import Access
from bombus_gateway.bodies import SIGN
from bombus_gateway.context import Gateway
from bombus_gateway.plain_routes import Handler, JsonResponse, PlainRoute, checked
from bombus_gateway.swarm import bodies, views
from bombus_gateway.swarm.bodies import result_of, result_of_end
from bombus_gateway.swarm.claims import ClaimRoutes
from bombus_gateway.swarm.context import EngineContext
from bombus_gateway.swarm.ended import EndedEpisodes
from bombus_gateway.swarm.engine import EngineRoutes
from bombus_gateway.swarm.event_stream import EventStream
from bombus_gateway.swarm.multi_model import MultiModelRoutes
from bombus_gateway.swarm.replay import call_record, replay_call

log = logging.getLogger(__name__)


class SwarmRoute(NamedTuple):
    """A route of the swarm API. `body` is the type of the request's body, which the OpenAPI document describes."""

    access: Access
    method: str
    path: str
    handler: Handler
    body: type[BaseModel] | None = None


_client, _control = partial(SwarmRoute, Access.CLIENT), partial(SwarmRoute, Access.CONTROL)


def plain(gateway: Gateway, routes: Iterable[SwarmRoute]) -> list[PlainRoute]:
    """Return the routes with two checks added: that the caller's key may use them, and that the log is folded."""
    guards = {Access.CLIENT: gateway.clients, Access.CONTROL: gateway.control}
    found: list[PlainRoute] = []
    for access, method, path, handler, _ in routes:
        found += checked([PlainRoute(method, path, handler)], guards[access], gateway.check_ready)
    return found


def swarm_routes(gateway: Gateway, engine: str) -> list[SwarmRoute]:
    """Return all swarm routes of one engine, to be mounted under its prefix."""
    context = EngineContext(gateway, engine)
    engine_routes, claims, episodes = EngineRoutes(context), ClaimRoutes(context), EpisodeRoutes(context)
    ended = EndedEpisodes(context)
    return [
        _client("GET", "/get_engine_status", engine_routes.get_engine_status),
        _control("POST", "/sync_train_config", engine_routes.sync_train_config, bodies.SyncTrainConfig),
        _client("POST", "/compare_train_config", engine_routes.compare_train_config, bodies.CompareTrainConfig),
        _control("POST", "/start_engine", engine_routes.start_engine),
        _control("POST", "/stop_engine", engine_routes.stop_engine),
        _control("POST", "/resume_engine", engine_routes.resume_engine),
        _control("POST", "/stop_episode", episodes.stop_episode, bodies.StopEpisode),
        _client("POST", "/claim_episode", claims.claim_episode, bodies.ClaimEpisode),
        _client("POST", "/end_episode", episodes.end_episode, bodies.EndEpisode),
        _client("POST", "/abort_episode", episodes.abort_episode, bodies.NamedEpisode),
        _client("POST", "/can_continue_episode", episodes.can_continue_episode, bodies.NamedEpisode),
        _client("POST", "/get_episode_buffer", episodes.get_episode_buffer),
        _client("GET", "/get_current_batch_rollout_pool_information", engine_routes.get_pool_information),
        _client("POST", "/replay_latest_llm_call", episodes.replay_latest_llm_call, bodies.ReplayLatestCall),
        _client("POST", "/agree_sync_weight", engine_routes.agree_sync_weight, bodies.AgreeSyncWeight),
        _client("GET", "/get_server_experiment_dir", engine_routes.get_server_experiment_dir),
        _control("POST", "/sync_train_code", engine_routes.sync_train_code),
        _client("POST", "/push_verbose_log", engine_routes.push_verbose_log, bodies.PushVerboseLog),
        _client("POST", "/claim_episodes", claims.claim_episodes, bodies.ClaimEpisodes),
        _client("POST", "/end_episodes", episodes.end_episodes, bodies.EndEpisodes),
        _client("POST", "/abort_episodes", episodes.abort_episodes, bodies.AbortEpisodes),
        _client("POST", "/touch_episodes", episodes.touch_episodes, bodies.NamedEpisodes),
        _client("POST", "/touch_client", episodes.touch_client, bodies.TouchClient),
        _client("POST", "/read_ended_episodes", ended.read, bodies.NamedEpisodes),
        _client("POST", "/take_ended_episodes", ended.take, bodies.NamedEpisodes),
    ]


def hive_routes(gateway: Gateway) -> list[SwarmRoute]:
    """Return the routes that belong to no engine, to be mounted at the root: the hive's events and calls, and
    multi-model episodes, which span several engines."""
    context = EngineContext(gateway, HIVE)
    multi = MultiModelRoutes(context)
    return [
        _control("GET", "/events", EventStream(gateway).read),
        _control("GET", "/call_record", partial(call_record, gateway)),
        _client("POST", "/claim_multi_model_episodes", multi.claim, bodies.ClaimMultiModelEpisodes),
        _client("POST", "/end_multi_model_episodes", multi.end, bodies.EndMultiModelEpisodes),
        _client("POST", "/abort_multi_model_episodes", multi.abort, bodies.AbortEpisodes),
        _client("POST", "/touch_multi_model_episodes", multi.touch, bodies.NamedEpisodes),
    ]


class EpisodeRoutes:
    """The routes for claimed episodes. Requests name an episode by the id that its claim returned."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context

    async def end_episode(self, request: Request) -> Response:
        """End an episode with its reward. Repeating the same end succeeds; a different end is answered with 409."""
        raw, body = await self._context.read(request, bodies.EndEpisode)
        episode = self._context.gateway.keys.episode_of(body.episode_uuid)
        results = (result_of(episode, body.task_id, body.workflow_output),)
        await self._end(request, raw, body.client_uuid, results, body.declare_client_active)
        return JsonResponse({"success": True})

    async def end_episodes(self, request: Request) -> Response:
        """End a group of episodes, all or none."""
        raw, body = await self._context.read(request, bodies.EndEpisodes)
        name = self._context.gateway.keys.episode_of
        results = tuple(result_of_end(name(end.episode_uuid), end) for end in body.episodes)
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
        await self._context.execute(request, command)

    async def abort_episode(self, request: Request) -> Response:
        """Abort an episode. An episode that has already ended does not change."""
        raw, body = await self._context.read(request, bodies.NamedEpisode)
        command = inbox.Abort(
            id=self._context.command_id(request, "abort", body.client_uuid, raw),
            engine=self._context.engine,
            client=body.client_uuid,
            episodes=(self._context.gateway.keys.episode_of(body.episode_uuid),),
        )
        await self._context.execute(request, command)
        return JsonResponse({"success": True})

    async def abort_episodes(self, request: Request) -> Response:
        """Abort episodes, all or none. Set `infra` if no model is to blame."""
        raw, body = await self._context.read(request, bodies.AbortEpisodes)
        command = inbox.Abort(
            id=self._context.command_id(request, "abort", body.client_uuid, raw),
            engine=self._context.engine,
            client=body.client_uuid,
            episodes=tuple(map(self._context.gateway.keys.episode_of, body.episode_uuids)),
            infra=body.infra,
            detail=body.detail,
            failure=body.failure,
        )
        await self._context.execute(request, command)
        return JsonResponse({"success": True})

    async def stop_episode(self, request: Request) -> Response:
        """Abort any client's episode, by its name in the log. An episode that is already over does not change."""
        raw, body = await self._context.read(request, bodies.StopEpisode)
        episode = self._context.state.open.get(body.episode)
        if episode is not None:
            command = inbox.Abort(
                id=self._context.command_id(request, "stop_episode", "", raw),
                engine=self._context.engine,
                client=episode.client,
                episodes=(episode.id,),
                detail=inbox.BY_OPERATOR,
                by=self._context.gateway.operator_of(request),
            )
            await self._context.execute(request, command)
        return JsonResponse({"success": True})

    async def can_continue_episode(self, request: Request) -> Response:
        """Return whether this client still holds the episode, so that it makes sense to continue."""
        _, body = await self._context.read(request, bodies.NamedEpisode)
        held = await self._context.held(body.client_uuid, [body.episode_uuid])
        return JsonResponse({"can_continue": bool(held)})

    async def touch_episodes(self, request: Request) -> Response:
        """Keep episodes alive while their agents make no calls.

        The reply lists the episodes that are over and, for those that are not, the usage of their calls so far.
        """
        _, body = await self._context.read(request, bodies.NamedEpisodes)
        held = await self._context.held(body.client_uuid, body.episode_uuids)
        for episode in held.values():
            self._context.gateway.heartbeats.touch(self._context.engine, episode)
        over = [claimed_id for claimed_id in body.episode_uuids if claimed_id not in held]
        episodes = self._context.state.open
        used = {claimed_id: views.used(episodes[episode]) for claimed_id, episode in held.items()}
        return JsonResponse({"touched": list(held), "over": over, "used": used})

    async def touch_client(self, request: Request) -> Response:
        """Keep alive all episodes that the client claimed with `touches`, on any engine."""
        _, body = await self._context.read(request, bodies.TouchClient, SIGN)
        self._context.gateway.heartbeats.touch_client(body.client_uuid)
        return JsonResponse({"success": True})

    async def get_episode_buffer(self, request: Request) -> Response:
        """List the open episodes, without their ids and keys."""
        return JsonResponse(views.episode_buffer(self._context.state, self._context.base_url(request)))

    async def replay_latest_llm_call(self, request: Request) -> Response:
        """Return `{input, output}` for the newest complete call of an episode or, with the admin key, of all episodes
        together."""
        _, body = await self._context.read(request, bodies.ReplayLatestCall)
        ref = views.latest_call(self._context.state, self._replayed(request, body.episode_uuid))
        if ref is None:
            raise Refused(Code.NO_CALLS, "There is no complete call to replay.")
        try:
            return JsonResponse(await replay_call(self._context.gateway.bus, ref, views.model_of(self._context.state)))
        except LogCorrupted as error:
            log.warning("a call cannot be read back", extra={"call": ref.id, "why": str(error)})
            raise Refused(Code.NO_CALLS, f"The log no longer holds call {ref.id}: {error}") from error

    def _replayed(self, request: Request, claimed_id: str) -> str:
        """Return the name of the episode whose call is requested, or "" for any episode.

        Only a request with the hive's admin key may read the calls of all episodes. If the hive has no admin key, no
        request may read them.
        """
        if claimed_id:
            return self._context.gateway.keys.episode_of(claimed_id)
        gateway = self._context.gateway
        if gateway.settings.keys.admin and gateway.control.refusal(request.scope["headers"]) is None:
            return ""
        raise Refused(
            Code.NO_CALLS,
            "Name the episode whose call you want, by the `episode_uuid` that its claim returned; only the hive's "
            "admin key can read all calls. `bombus replay episode` shows them on the hive's own machine.",
        )
