"""The routes of Atropos's trajectory API, for unmodified Atropos environments and trainers.

Refusals have the form that Atropos's server uses. A request that only has to wait is answered with a 5xx, after which
its client retries.
"""

import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from bombus.errors import BusUnavailable, Code, LogCorrupted, Refused
from bombus.hive import inbox
from bombus.hive.operations.owners import may_use
from bombus.hive.state import Phase
from bombus.hive.trajectories.queue import no_environment
from bombus.hive.trajectories.queue_status import environment_status
from bombus.hive.trajectories.records import RolloutGroup, decode_group
from bombus.hive.trajectories.state import HandedOut
from bombus_gateway.access import Access, Guard
from bombus_gateway.atropos import answers
from bombus_gateway.atropos.answers import JoinAnswer
from bombus_gateway.atropos.batches import NO_BATCH, write_batch, write_latest
from bombus_gateway.atropos.compression import sent
from bombus_gateway.atropos.refusals import write_batch_refusal, write_refusal
from bombus_gateway.atropos.requests import read_after, read_environment, read_environment_id, read_trainer
from bombus_gateway.atropos.scored_data import read_scored_data, read_scored_data_list
from bombus_gateway.bodies import TRAJECTORIES
from bombus_gateway.context import Gateway
from bombus_gateway.plain_routes import Handler, PlainRoute, checked
from bombus_gateway.refusals import ERROR_HEADERS
from bombus_gateway.rollout_groups.direct import DirectRoute
from bombus_gateway.rollout_groups.group_log import GroupLog
from bombus_gateway.rollout_groups.reading import RecordReader

log = logging.getLogger(__name__)

JSON = "application/json"
UUID_BITS = 128
PIECE_BYTES = 1 << 18  # minimum size of a piece of a batch
IDEMPOTENCY_KEY, BATCH_NUMBER = "x-idempotency-key", "x-batch-number"
BATCH, RESET_DATA = "/batch", "/reset_data"
DIRECT = ("/scored_data", "/scored_data_list", "/status-env")
ATTEMPTS_MAX = 4  # attempts to get a batch without lost groups

RefusalWriter = Callable[[Refused], tuple[int, bytes]]


def group_routes(gateway: Gateway, engine: str, others: ASGIApp) -> tuple[list[PlainRoute], dict[str, ASGIApp]]:
    """Return one engine's routes, and the applications, by path, that answer some of these routes directly.

    The applications pass requests that they do not answer to `others`, which serves the routes. Routes that begin or
    end a run need the admin key, if there is one.
    """
    routes = GroupRoutes(gateway, GroupLog(gateway, engine))
    direct: dict[str, ASGIApp] = {}
    ring, public_url = gateway.key_ring, gateway.settings.public_url
    found: list[PlainRoute] = []
    table: tuple[tuple[str, str, Handler], ...] = (
        ("POST", "/register", routes.register),
        ("GET", RESET_DATA, routes.reset_data),
        ("GET", "/", routes.welcome),
        ("GET", "/wandb_info", routes.wandb_info),
        ("GET", "/info", routes.info),
        ("GET", "/status", routes.status),
        ("POST", "/register-env", routes.register_environment),
        ("POST", "/disconnect-env", routes.disconnect_environment),
        ("GET", "/status-env", routes.environment_status),
        ("POST", "/scored_data", routes.scored_data),
        ("POST", "/scored_data_list", routes.scored_data_list),
        ("GET", BATCH, routes.batch),
        ("GET", "/latest_example", routes.latest_example),
    )
    for method, path, handler in table:
        access = Access.CONTROL if path in ("/register", RESET_DATA) else Access.CLIENT
        guard = Guard(access, ring, public_url, changing_get=path in (BATCH, RESET_DATA))
        write = write_batch_refusal if path == BATCH else write_refusal
        answer = _refusing(gateway, handler, write)
        found += checked([PlainRoute(method, path, answer)], guard)
        if path in DIRECT:
            direct[path] = DirectRoute(method, guard, answer, others)
    return found, direct


def _refusing(gateway: Gateway, handler: Handler, write: RefusalWriter) -> Handler:
    """Return a handler that reports refusals the way Atropos's server does."""

    async def answer(request: Request) -> Response:
        try:
            await gateway.check_ready()
            return await handler(request)
        except BusUnavailable as error:
            return _refused(Refused(Code.BUS_DOWN, f"The log cannot be reached right now; try again. ({error})"), write)
        except Refused as refusal:
            return _refused(refusal, write)

    return answer


def _refused(refusal: Refused, write: RefusalWriter) -> Response:
    status, body = write(refusal)
    return Response(body, status, media_type=JSON, headers=ERROR_HEADERS.get(status))


def _answered(request: Request, body: bytes, media_type: str = JSON) -> Response:
    headers, parts = sent([body], request.headers.get("accept-encoding", ""))
    return Response(b"".join(parts), media_type=media_type, headers=headers)


def _written(records: RecordReader, accepted: str) -> tuple[dict[str, str], Iterator[bytes]]:
    """Return the headers and parts of a batch. This waits for records, so call it outside the event loop's thread."""
    return sent(write_batch(map(decode_group, records.in_thread())), accepted)


def _piece(parts: Iterator[bytes]) -> bytes:
    """Return the next parts, joined up to at least `PIECE_BYTES` if enough are left, or b"" after the last part."""
    piece = bytearray()
    for part in parts:
        piece += part
        if len(piece) >= PIECE_BYTES:
            break
    return bytes(piece)


class DeliveredBatch(StreamingResponse):
    """A batch. It counts as delivered once all of it has been written to a connection that is still open."""

    def __init__(
        self,
        request: Request,
        records: RecordReader,
        headers: dict[str, str],
        next_piece: Callable[[], Awaitable[bytes]],
        delivered: Callable[[], Awaitable[None]],
    ) -> None:
        super().__init__(self._sent(next_piece), media_type=JSON, headers=headers)
        self._request = request
        self._records = records
        self._delivered = delivered
        self._is_whole = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except LogCorrupted as error:
            log.error("a batch was cut off", extra={"why": str(error)})
            raise
        finally:
            self._records.close()
        if self._is_whole:
            await self._delivered()

    async def _sent(self, next_piece: Callable[[], Awaitable[bytes]]) -> AsyncIterator[bytes]:
        """Yield the pieces, then check that the client is still connected.

        Pieces are slow to make, so they are made in threads. The check has to be made here: once an answer has ended,
        the server reports its client as disconnected.
        """
        while piece := await next_piece():
            yield piece
        self._is_whole = not await self._request.is_disconnected()


class GroupRoutes:
    def __init__(self, gateway: Gateway, groups: GroupLog) -> None:
        self._gateway = gateway
        self._groups = groups

    async def welcome(self, request: Request) -> Response:
        """Identify this server. Clients of several APIs check different fields of this answer."""
        running = self._groups.state.phase != Phase.OFFLINE
        return _answered(request, answers.write_welcome(running))

    # ---- the trainer ----------------------------------------------------------------------------------------------

    async def register(self, request: Request) -> Response:
        """Begin a run for a trainer. The batches and groups of the previous run are dropped."""
        given = read_trainer(await self._gateway.bodies.small(request))
        uuid = secrets.randbits(UUID_BITS)
        await self._gateway.carry_out(
            inbox.RegisterTrainer(
                id=f"register-{uuid:032x}",
                engine=self._groups.engine,
                trainer=str(uuid),
                batch_size=given.batch_size,
                max_token_len=given.max_token_len,
                checkpoint_dir=given.checkpoint_dir,
                save_checkpoint_interval=given.save_checkpoint_interval,
                starting_step=given.starting_step,
                num_steps=given.num_steps,
                wandb_group=given.wandb_group,
                wandb_project=given.wandb_project,
                owner=self._gateway.key_of(request).share,
                by=self._gateway.operator_of(request),
            )
        )
        return _answered(request, answers.write_registered(uuid))

    async def wandb_info(self, request: Request) -> Response:
        trainer = self._groups.trajectories.trainer
        if trainer is None:
            return _answered(request, answers.write_wandb_info())
        return _answered(request, answers.write_wandb_info(trainer.wandb_group, trainer.wandb_project))

    async def info(self, request: Request) -> Response:
        trainer = self._groups.trajectories.trainer
        if trainer is None:
            return _answered(request, answers.write_info())
        return _answered(request, answers.write_info(trainer.batch_size, trainer.max_token_len))

    async def status(self, request: Request) -> Response:
        state = self._groups.trajectories
        queued = len(state.queue.groups) - state.queue.held_groups
        return _answered(request, answers.write_status(state.current_step, queued))

    async def batch(self, request: Request) -> Response:
        """Hand out the next batch. A batch that was not fully sent is handed out again.

        A trainer that says which batch it has (`after`) keeps getting the same next batch until it says that it has
        that one. Lost groups are given up, and the next batch is made from the remaining ones. A client whose key is
        not the trainer's is answered as if no trainer had registered.
        """
        trainer = self._groups.trajectories.trainer
        if trainer is not None and not may_use(trainer.owner, self._gateway.holder_of(request)):
            return _answered(request, answers.NOT_REGISTERED)
        after = read_after(request.query_params.get("after"))
        accepted = request.headers.get("accept-encoding", "")
        for _ in range(ATTEMPTS_MAX):
            try:
                batch = await self._groups.take(after)
            except Refused as refusal:
                if refusal.code is not Code.WRONG_PHASE:
                    raise
                return _answered(request, answers.NOT_REGISTERED)
            if batch is None:
                return _answered(request, NO_BATCH)
            try:
                records = await self._groups.records(batch.groups)
                headers, parts = await self._groups.written(_written, records, accepted)
            except LogCorrupted as error:
                if batch.delivered:
                    raise Refused(
                        Code.INTERNAL,
                        f"Batch {batch.number} was delivered before, but cannot be read again: {error}. Ask for the "
                        f"next one with after={batch.number}.",
                    ) from None
                log.error("groups of batch %d are lost and dropped: %s", batch.number, error)
                await self._groups.give_up_lost(batch)
                continue
            headers = {**headers, BATCH_NUMBER: str(batch.number)}
            pieces, delivered = partial(self._groups.written, _piece, parts), partial(self._delivered, batch, after)
            return DeliveredBatch(request, records, headers, pieces, delivered)
        raise Refused(Code.OVERLOADED, "Groups of the next batches are lost, and are being dropped: ask again.")

    async def _delivered(self, batch: HandedOut, after: int | None) -> None:
        if after is not None:
            return  # the trainer itself confirms the batch with its next request
        try:
            await self._groups.delivered(batch)
        except (BusUnavailable, Refused) as error:  # the batch will be handed out again
            log.warning("could not record that a batch was delivered", extra={"why": str(error)})

    async def latest_example(self, request: Request) -> Response:
        try:
            latest = await self._groups.latest(self._gateway.holder_of(request))
        except LogCorrupted as error:
            why = f"The group that was pushed last cannot be read: {error}. The next push replaces it."
            raise Refused(Code.INTERNAL, why) from None
        return _answered(request, write_latest(latest))

    async def reset_data(self, request: Request) -> Response:
        """End the run, and delete its groups and environments."""
        await self._gateway.carry_out(
            inbox.ResetGroups(
                id=f"reset-{secrets.token_hex(16)}",
                engine=self._groups.engine,
                by=self._gateway.operator_of(request),
            )
        )
        return _answered(request, answers.RESET, "text/plain")

    # ---- environments ---------------------------------------------------------------------------------------------

    async def register_environment(self, request: Request) -> Response:
        """Let an environment join, or tell it to wait until the trainer asks for its first batch."""
        given, key = read_environment(await self._gateway.bodies.small(request)), self._gateway.key_of(request)
        answer = await self._gateway.carry_out(
            inbox.JoinEnvironment(
                id=f"join-{secrets.token_hex(16)}",
                engine=self._groups.engine,
                desired_name=given.desired_name,
                max_tokens=given.max_token_length,
                weight=given.weight,
                group_size=given.group_size,
                minimum=given.min_batch_allocation,
                owner=key.name,
                admin=key.admin,
            )
        )
        assert isinstance(answer, inbox.Joined)
        state = self._groups.trajectories
        if answer.environment is None or state.trainer is None:
            return _answered(request, answers.WAIT_FOR_TRAINER)
        environment = state.queue.environments.get(answer.environment)
        joined = JoinAnswer(
            env_id=answer.environment,
            wandb_name=given.desired_name if environment is None else environment.name,
            checkpoint_dir=state.trainer.checkpoint_dir,
            starting_step=state.current_step,
            checkpoint_interval=state.trainer.save_checkpoint_interval,
            num_steps=state.trainer.num_steps,
        )
        return _answered(request, answers.write_joined(joined))

    async def disconnect_environment(self, request: Request) -> Response:
        environment = read_environment_id(await self._gateway.bodies.small(request))
        if not self._groups.may_act_for(environment, self._gateway.holder_of(request)):
            return _answered(request, answers.write_disconnect_failed(no_environment(environment)))
        leave = inbox.LeaveEnvironment(
            id=f"leave-{secrets.token_hex(16)}", engine=self._groups.engine, environment=environment
        )
        try:
            await self._gateway.carry_out(leave)
        except Refused as refusal:
            if refusal.code is not Code.UNKNOWN_ENVIRONMENT:
                raise
            return _answered(request, answers.write_disconnect_failed(refusal.why))
        return _answered(request, answers.DISCONNECTED)

    async def environment_status(self, request: Request) -> Response:
        number = read_environment_id(await self._gateway.bodies.small(request), request.query_params.get("env_id"))
        state = self._groups.trajectories
        environment = state.queue.environments.get(number)
        if environment is None or not may_use(environment.owner, self._gateway.holder_of(request)):
            raise Refused(Code.UNKNOWN_ENVIRONMENT, no_environment(number))
        self._groups.touch(number)
        status = environment_status(state.queue, environment, state.current_step)
        return _answered(request, answers.write_environment_status(status))

    async def scored_data(self, request: Request) -> Response:
        group = await self._gateway.bodies.read(request, TRAJECTORIES, read_scored_data)
        (held,) = await self._push([group], request)
        return _answered(request, answers.write_pushed(held))

    async def scored_data_list(self, request: Request) -> Response:
        groups = await self._gateway.bodies.read(request, TRAJECTORIES, read_scored_data_list)
        if not groups:
            return _answered(request, answers.write_pushed_list(()))
        return _answered(request, answers.write_pushed_list(await self._push(groups, request)))

    async def _push(self, groups: Sequence[RolloutGroup], request: Request) -> tuple[int | None, ...]:
        return await self._groups.push(groups, request.headers.get(IDEMPOTENCY_KEY, ""), self._gateway.key_of(request))
