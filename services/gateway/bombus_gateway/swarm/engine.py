"""The routes of an engine: its job, its start and stop, and its progress."""

import asyncio
import logging
import os
import time
from typing import TypeVar

from fastapi import Request, Response

from bombus.config.documents import parse_job
from bombus.errors import BusUnavailable, Code, Refused
from bombus.hive import inbox
from bombus.hive.checkpoints import where_begun
from bombus.hive.state import Phase
from bombus_gateway.plain_routes import JsonResponse
from bombus_gateway.swarm import bodies, views
from bombus_gateway.swarm.context import EngineContext

log = logging.getLogger(__name__)

C = TypeVar("C", inbox.Start, inbox.Stop, inbox.Resume)

START_HOLD_S = 0.6  # contract clients cache the status for 0.5 s; after a faster reply they would still see OFFLINE
START_VISIBLE_S = 10.0
LOG_CHARACTERS_MAX = 4000
LOG_LINES_PER_S_MAX = 50


class EngineRoutes:
    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._log_second = 0
        self._log_lines = 0

    async def get_engine_status(self, request: Request) -> Response:
        """Return the engine's phase, what it is waiting for, and the number of its optimizer steps."""
        state = self._context.state
        refusing = self._context.gateway.follower.hive.refusing_of(state)
        return JsonResponse(views.engine_status(state, time.time_ns(), refusing))

    async def sync_train_config(self, request: Request) -> Response:
        """Set the engine's job, replacing any earlier one. This is possible only while the engine is OFFLINE."""
        raw, body = await self._context.read(request, bodies.SyncTrainConfig)
        config = await asyncio.to_thread(parse_job, body.yaml_as_string)
        command = self._context.command_id(request, "configure", "", raw)
        await self._context.execute(request, config.to_command(command, self._context.engine, self._by(request)))
        if config.ignored:
            log.info("keys of the job that are ignored here: %s", ", ".join(config.ignored))
        return JsonResponse({"success": True, "config_digest": config.digest, "ignored": config.ignored})

    async def compare_train_config(self, request: Request) -> Response:
        """Return the differences between a client's job and the one that the engine is running. Nothing is changed."""
        _, body = await self._context.read(request, bodies.CompareTrainConfig)
        wanted = await asyncio.to_thread(parse_job, body.yaml_as_string)
        running = self._context.state.active
        if running is None or self._context.state.phase == Phase.OFFLINE:
            raise Refused(Code.WRONG_PHASE, "The engine is not running a job to compare with; it is ENGINE.OFFLINE.")
        return JsonResponse({"differences": views.job_differences(running.config, wanted.to_json())})

    async def start_engine(self, request: Request) -> Response:
        """Start the engine with the latest job. The reply is held back until clients can see that the engine is no
        longer OFFLINE."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        command = self._command(inbox.Start, request, "start")
        try:
            answer = await self._context.execute(request, command)
            run = answer.run if isinstance(answer, inbox.Done) else 0
            await self._context.gateway.follower.wait_for(lambda _: self._context.state.run >= run, START_VISIBLE_S)
        except Refused as error:
            return _failure(error, "error")
        except TimeoutError:
            raise BusUnavailable("the engine was started, but this gateway has not seen that yet") from None
        await asyncio.sleep(max(0.0, began + START_HOLD_S - loop.time()))
        if self._context.state.phase == Phase.OFFLINE:
            why = self._context.state.failure or "the engine was stopped again"
            return JsonResponse({"success": False, "error": why, "code": Code.ENGINE_FAILED})
        started = self._context.state.started
        begun = "" if started is None or started.run != run else where_begun(started)
        return JsonResponse({"success": True, "pid": os.getpid(), "run": run, "begun": begun})

    async def stop_engine(self, request: Request) -> Response:
        """Stop the engine. Its open episodes are aborted; everything on the log is kept."""
        command = self._command(inbox.Stop, request, "stop")
        return await self._done(request, command)

    async def resume_engine(self, request: Request) -> Response:
        """Resume a suspended run. Any other run is unaffected."""
        command = self._command(inbox.Resume, request, "resume")
        return await self._done(request, command)

    async def agree_sync_weight(self, request: Request) -> Response:
        """Vote to train now, because the client has sampled enough. Only some collection methods wait for votes."""
        raw, body = await self._context.read(request, bodies.AgreeSyncWeight)
        command = inbox.AgreeSync(
            id=self._context.command_id(request, "agree", body.client_uuid, raw),
            engine=self._context.engine,
            client=body.client_uuid,
        )
        return await self._done(request, command)

    async def get_pool_information(self, request: Request) -> Response:
        """Return the progress of the next batch. If a client passes its `client_uuid`, it is shown under that id."""
        reader = request.query_params.get("client_uuid", "")
        return JsonResponse(views.pool_information(self._context.state, time.time_ns(), reader))

    async def get_server_experiment_dir(self, request: Request) -> Response:
        """Return the folder in which the trainer keeps this run's weights, or null if there are no weights yet."""
        return JsonResponse({"server_experiment_dir": views.experiment_dir(self._context.state)})

    async def sync_train_code(self, request: Request) -> Response:
        """Refuse code to be run in the trainer, which newer clients of the swarm contract upload."""
        raise Refused(
            Code.UNSUPPORTED,
            "sync_train_code is not supported: code that a client sends is never run. Install it with the trainer.",
        )

    async def push_verbose_log(self, request: Request) -> Response:
        """Write a line to this gateway's log. If there were too many in one second, reply that the line was dropped."""
        _, body = await self._context.read(request, bodies.PushVerboseLog)
        second = int(time.monotonic())
        if second != self._log_second:
            self._log_second, self._log_lines = second, 0
        self._log_lines += 1
        if self._log_lines > LOG_LINES_PER_S_MAX:
            return JsonResponse({"success": False})
        message = body.message[:LOG_CHARACTERS_MAX]
        fields = {"engine": self._context.engine, "client_tag": body.tag[:100], "client_says": message}
        log.info("a client says", extra=fields)
        return JsonResponse({"success": True})

    def _by(self, request: Request) -> str:
        return self._context.gateway.operator_of(request)

    def _command(self, kind: type[C], request: Request, name: str) -> C:
        command = self._context.command_id(request, name, "", b"")
        return kind(id=command, engine=self._context.engine, by=self._by(request))

    async def _done(self, request: Request, command: inbox.Stop | inbox.Resume | inbox.AgreeSync) -> Response:
        try:
            await self._context.execute(request, command)
        except Refused as error:
            return _failure(error, "failure_reason")
        return JsonResponse({"success": True, "failure_reason": ""})


def _failure(error: Refused, reason: str) -> Response:
    """Return a 200 with `success` false and the error's text in the field `reason`. If the error is a 503, which
    clients can retry, raise it instead."""
    if error.status == 503:
        raise error
    return JsonResponse({"success": False, reason: error.why, "code": error.code})
