"""The routes through which clients of training operations read the tokens of their ended episodes, and release them."""

import asyncio
import logging
from collections.abc import Sequence

from fastapi import Request, Response

from bombus.config.job import RunConfig
from bombus.datums.episodes import EndedEpisode, learnt_sequences
from bombus.datums.reading import BusCallReader, ancestors
from bombus.errors import Code, LogCorrupted, Refused
from bombus.hive import inbox
from bombus.hive.state import Completed
from bombus_gateway.operations_wire.dialects import TrainingDialect, is_tinkers
from bombus_gateway.operations_wire.paths import path_of_operation
from bombus_gateway.plain_routes import JsonResponse
from bombus_gateway.swarm import bodies
from bombus_gateway.swarm.context import EngineContext

log = logging.getLogger(__name__)

CATCH_UP_S = 2.0  # time to wait for the end of an episode, which another gateway may have reported
READS_MAX = 4  # maximum number of concurrent requests
ANSWER_BYTES_MAX = 16 << 20  # maximum size of sequences in one answer; the other episodes are left for the next request


class EndedEpisodes:
    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._reading = asyncio.Semaphore(READS_MAX)

    async def read(self, request: Request) -> Response:
        """Return the sequences of ended episodes. Episodes that do not fit into one answer are listed as `left`.

        Episodes in `gone` were taken, aborted or dropped. For episodes in `lost`, the log no longer has all calls.
        """
        _, body = await self._context.read(request, bodies.NamedEpisodes)
        names = {claimed_id: self._context.gateway.keys.episode_of(claimed_id) for claimed_id in body.episode_uuids}
        self._check_run()
        async with self._reading:
            await self._until_ended(list(names.values()))
            return JsonResponse(await self._read(body.client_uuid, names))

    async def take(self, request: Request) -> Response:
        """Release ended episodes. Skip episodes that are already gone."""
        raw, body = await self._context.read(request, bodies.NamedEpisodes)
        command = inbox.Take(
            id=self._context.command_id(request, "take", body.client_uuid, raw),
            engine=self._context.engine,
            client=body.client_uuid,
            episodes=tuple(map(self._context.gateway.keys.episode_of, body.episode_uuids)),
        )
        await self._context.execute(request, command)
        return JsonResponse({"success": True})

    def _check_run(self) -> None:
        state = self._context.state
        if not state.clients_take_episodes:
            raise Refused(
                Code.UNSUPPORTED,
                f"Engine {state.name} itself trains on the episodes of run {state.run}: clients can read only the "
                "episodes of a run of training operations.",
            )

    async def _until_ended(self, episodes: Sequence[str]) -> None:
        """Wait up to `CATCH_UP_S` for episodes to end. Raises `Refused` if one is still open."""
        state = self._context.state
        try:
            await self._context.gateway.follower.wait_for(
                lambda _: all(map(self._context.state.is_over, episodes)), CATCH_UP_S
            )
        except TimeoutError:
            state = self._context.state
            name = next(episode for episode in episodes if not state.is_over(episode))
            raise Refused(Code.NO_EPISODES, f"Episode {name} has not ended: end it first, with its reward.") from None

    async def _read(self, client: str, names: dict[str, str]) -> dict[str, object]:
        found: list[EndedEpisode] = []
        gone: list[str] = []
        lost: dict[str, str] = {}
        left = list(names)
        size = 0
        while left and size < ANSWER_BYTES_MAX:
            claimed_id = left.pop(0)
            completed = self._context.state.pool.get(names[claimed_id])
            if completed is None:
                gone.append(claimed_id)
                continue
            if completed.client != client:
                why = f"Episode {completed.episode} was claimed by a different client."
                raise Refused(Code.NOT_YOUR_EPISODE, why)
            try:
                found.append(await self._episode(claimed_id, completed))
            except LogCorrupted as error:
                log.warning("an episode cannot be read", extra={"episode": completed.episode, "why": str(error)})
                lost[claimed_id] = str(error)
                continue
            size += sum(sequence.size for sequence in found[-1].sequences)
        return {"episodes": found, "left": left, "gone": gone, "lost": lost}

    async def _episode(self, claimed_id: str, completed: Completed) -> EndedEpisode:
        """Read the calls of an episode. If the job does not train on auxiliary calls, these serve only as context for
        other calls."""
        calls = BusCallReader(self._context.gateway.bus)
        records = await calls.records(completed.calls)
        context = await ancestors(calls, records)
        if not self._trains_auxiliary_calls():
            context = (*context, *(record for record in records if record.auxiliary_call))
            records = [record for record in records if not record.auxiliary_call]
        return EndedEpisode(
            episode_uuid=claimed_id,
            task_id=completed.task,
            reward=completed.reward,
            calls=len(records),
            sequences=await asyncio.to_thread(learnt_sequences, records, context),
            sampler=path_text(completed.sampler),
            call_rewards=completed.call_rewards,
        )

    def _trains_auxiliary_calls(self) -> bool:
        active = self._context.state.active
        return active is not None and RunConfig.from_json(active.config).rollout.trains_auxiliary_calls


def path_text(checkpoint: str) -> str:
    """Return the path by which clients know a saved model, or "" for the base."""
    if not checkpoint:
        return ""
    path = path_of_operation(checkpoint)
    return path.uri(TrainingDialect.TINKER if is_tinkers(path.model) else TrainingDialect.XORL)
