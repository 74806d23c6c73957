"""Carries out the messages of a session in its environment: one at a time, each within a time limit."""

import asyncio
from typing import Any

from bombus.environments.kinds import AgentEnvironment
from bombus.environments.openenv.messages import WireError, WireMessage, error_message
from bombus.environments.serving.served_session import EnvironmentSource, ServedSession
from bombus.sdk.errors import InfraError, failure_of


class SessionWork:
    """Carries out messages until `end`, or until a message takes longer than `step_s` seconds or breaks the
    environment."""

    def __init__(
        self,
        environment: AgentEnvironment,
        session: str,
        source: EnvironmentSource,
        step_s: float,
        over: asyncio.Future[None],
    ) -> None:
        """Take an environment made by `source`. `end` resolves the future `over`, from which the session can tell that
        it was stopped."""
        self.over = over
        self.step: asyncio.Task[Any] | None = None  # the task that is carrying out a message
        self.was_cut = False  # a message was cancelled: its code may still be running, even if the message has ended
        self.is_broken = False  # a message took too long, or broke the environment: no other message follows
        self._session = ServedSession(environment, session, source, self.over.done)
        self._step_s = step_s
        self._turn = asyncio.Lock()
        self._late: tuple[asyncio.Task[Any], WireMessage] | None = None  # the task that took too long, and its answer

    async def carry_out(self, message: WireMessage, is_posted: bool = False) -> WireMessage | None:
        """Carry out a message once the previous messages are done. Returns None if the message came too late or took
        too long.

        Each message has its own task, which only `end` cancels. Any other cancellation in the task must therefore come
        from the environment's code, so that code does not need a task of its own.
        """
        async with self._turn:
            if self.is_broken or self.over.done():
                return None
            self.step = asyncio.current_task()
            limit = asyncio.get_running_loop().call_later(self._step_s, self._cut_off, message.type)
            try:
                answer = await self._session.answer(message, is_posted)
            except InfraError as error:
                why = f"the environment failed, so the session has ended: {error}"
                answer = error_message(WireError.SESSION_ERROR, why, failure_of(error))
            finally:
                limit.cancel()
                self.step = None
            self.is_broken |= ends_session(answer)
            return None if self.over.done() else answer

    def late_answer(self, step: asyncio.Task[Any] | None) -> WireMessage | None:
        """Return the answer to a task's message if that message took too long, else None."""
        return self._late[1] if self._late is not None and self._late[0] is step else None

    def end(self) -> None:
        """Cancel the message that is being carried out. No further messages are carried out."""
        self.was_cut |= self.step is not None
        if not self.over.done():
            self.over.set_result(None)
            if self.step is not None:
                self.step.cancel()

    def _cut_off(self, kind: str) -> None:
        if self.step is not None and not self.over.done():
            why = f"the {kind} took longer than {self._step_s:g} s, so the session has ended"
            self._late = (self.step, error_message(WireError.SESSION_ERROR, why))
            self.is_broken = True
            self.end()


def ends_session(answer: WireMessage) -> bool:
    """Return whether an answer is the last one of its session."""
    return answer.type == "error" and answer.data.get("code") == WireError.SESSION_ERROR
