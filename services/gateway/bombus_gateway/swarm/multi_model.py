"""The routes of multi-model episodes, at the root. Each multi-model episode is one episode on each of several
engines."""

from collections.abc import Sequence

from fastapi import Request, Response

from bombus.errors import Code, Refused
from bombus.hive import inbox
from bombus.hive.episodes import without_secret
from bombus.hive.events import EpisodeType
from bombus.hive.inbox import EpisodeResult, MultiModelGranted
from bombus.hive.state import EngineState, Phase, engine_of
from bombus.hive.steps import idle_limit_s
from bombus_gateway.plain_routes import JsonResponse
from bombus_gateway.swarm import bodies, views
from bombus_gateway.swarm.bodies import result_of_end
from bombus_gateway.swarm.claims import CLAIM_OVER, Confirmed, SlicedClaims
from bombus_gateway.swarm.context import EngineContext


class MultiModelRoutes:
    """The routes of multi-model episodes. `context` has the name `HIVE` instead of an engine's name."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._claims = SlicedClaims(context)
        self._engines = {name: EngineContext(context.gateway, name) for name in context.gateway.settings.engines}

    async def claim(self, request: Request) -> Response:
        """Claim `count` multi-model episodes, all or none, waiting up to `wait_s` on the server."""
        _, body = await self._context.read(request, bodies.ClaimMultiModelEpisodes)
        states = [self._state(name) for name in body.engines]
        wanted_s = body.discard_episode_timeout
        if wanted_s is None:
            wanted_s = max(idle_limit_s(state.steps) for state in states)
        claim = inbox.MultiModelClaim(
            id="",
            claim=self._claims.claim_id(request, f"joint/{body.client_uuid}/{body.claim_id}"),
            client=body.client_uuid,
            count=body.count,
            type=EpisodeType(body.episode_type),
            discard_timeout_s=self._claims.idle_limit_s(request, wanted_s),
            task_hint=body.task_id,
            engines=tuple(body.engines),
            touches=body.touches,
        )
        outcome = await self._claims.claim(request, claim, body.wait_s, body.waited_s)
        reply = {
            "success": False,
            "client_uuid": body.client_uuid,
            "claim_id": body.claim_id,
            "multi_model_episodes": [],
        }
        if isinstance(outcome, Refused):
            return JsonResponse(reply | self._failure(outcome, body.engines))
        assert isinstance(outcome, MultiModelGranted)
        self._check_not_over(outcome)
        reply |= {"success": True, "fail_cause": ""} | self._granted(request, outcome)
        first = outcome.grants[0].engine
        return Confirmed(reply, request, lambda: self._context.gateway.heartbeats.confirm(first, claim.claim))

    async def end(self, request: Request) -> Response:
        """End multi-model episodes with a reward for each of their episodes, all or none.

        Repeating the same end succeeds; a different end is answered with 409.
        """
        raw, body = await self._context.read(request, bodies.EndMultiModelEpisodes)
        command = inbox.MultiModelEnd(
            id=self._context.command_id(request, "end", body.client_uuid, raw),
            client=body.client_uuid,
            results=tuple(map(self._results, body.multi_model_episodes)),
        )
        await self._context.execute(request, command)
        return JsonResponse({"success": True})

    async def abort(self, request: Request) -> Response:
        """Abort multi-model episodes, each named by one or more of its episodes. Episodes that are already over do not
        change."""
        raw, body = await self._context.read(request, bodies.AbortEpisodes)
        command = self._context.command_id(request, "abort", body.client_uuid, raw)
        by_engine: dict[str, list[str]] = {}
        for name in map(self._context.gateway.keys.episode_of, body.episode_uuids):
            by_engine.setdefault(engine_of(name), []).append(name)
        for engine, names in by_engine.items():
            await self._context.execute(
                request,
                inbox.Abort(
                    id=f"{command}-{engine}",
                    engine=engine,
                    client=body.client_uuid,
                    episodes=tuple(names),
                    infra=body.infra,
                    detail=body.detail,
                    failure=body.failure,
                ),
            )
        return JsonResponse({"success": True})

    async def touch(self, request: Request) -> Response:
        """Keep episodes alive, along with all other episodes of the same multi-model episodes.

        The reply lists the episodes that are over and, for those that are not, the usage of their calls so far.
        """
        _, body = await self._context.read(request, bodies.NamedEpisodes)
        by_engine: dict[str, list[str]] = {}
        for claimed_id in body.episode_uuids:
            by_engine.setdefault(engine_of(without_secret(claimed_id)), []).append(claimed_id)
        used: dict[str, views.JsonObject] = {}
        for engine, claimed_ids in by_engine.items():
            context = self._engines.get(engine)
            for claimed_id, name in (await context.held(body.client_uuid, claimed_ids)).items() if context else ():
                self._context.gateway.heartbeats.touch(engine, name)
                used[claimed_id] = views.used(self._state(engine).open[name])
        over = [claimed_id for claimed_id in body.episode_uuids if claimed_id not in used]
        return JsonResponse({"touched": list(used), "over": over, "used": used})

    def _state(self, engine: str) -> EngineState:
        """Return the state of an engine. Raises `Refused` if this hive does not have the engine."""
        context = self._engines.get(engine)
        if context is None:
            known = ", ".join(self._engines)
            raise Refused(Code.MALFORMED, f"engines: {engine} is not an engine of this hive, which has {known}.")
        return context.state

    def _results(self, ends: Sequence[bodies.EpisodeEndBody]) -> dict[str, EpisodeResult]:
        """Return the results of a multi-model episode, by engine. Raises `Refused` if there are several for one
        engine."""
        names = [self._context.gateway.keys.episode_of(end.episode_uuid) for end in ends]
        found = {engine_of(name): result_of_end(name, end) for name, end in zip(names, ends, strict=True)}
        if len(found) < len(ends):
            why = "a multi-model episode must have one episode on each of its engines, but this one has several on one"
            raise Refused(Code.MALFORMED, f"multi_model_episodes: {why}.")
        return found

    def _check_not_over(self, granted: MultiModelGranted) -> None:
        """Raise `Refused` for a claim that is repeated after all of its episodes have ended (R13)."""
        first = granted.grants[0]
        if all(self._state(first.engine).is_over(episode) for episode in first.episodes):
            raise Refused(Code.OTHER_CLAIM, CLAIM_OVER)

    def _failure(self, refused: Refused, engines: Sequence[str]) -> views.JsonObject:
        """Return why a claim failed, along with the status of the engine that is furthest from granting episodes."""
        states = [self._state(name) for name in engines]
        held_up = min(states, key=lambda state: (state.phase != Phase.OFFLINE, state.granting))
        status = {"engine_status": held_up.phase, "suspended": held_up.suspended}
        return {"fail_cause": refused.why, "code": refused.code} | status

    def _granted(self, request: Request, granted: MultiModelGranted) -> views.JsonObject:
        expires_ns = self._context.key_expires_ns(granted.claimed_ns)
        count = len(granted.grants[0].episodes)
        return {
            "multi_model_episodes": [
                {
                    each.engine: self._context.access(request, each.engine, each.run, each.episodes[number], expires_ns)
                    for each in granted.grants
                }
                for number in range(count)
            ],
            "engines": {
                each.engine: {"policy_version": each.version, "model": views.model_of(self._state(each.engine))}
                for each in granted.grants
            },
            "discard_at": granted.claimed_ns / 1e9 + granted.discard_timeout_s,
            "discard_episode_timeout": granted.discard_timeout_s,
            "client_silence_s": min(self._state(each.engine).collection.client_silence_s for each in granted.grants),
            "key_expires_at": expires_ns / 1e9,
        }
