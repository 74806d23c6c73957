"""What an answer may be. Pure."""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from bombus.errors import STATUS, Code
from bombus.hive.generation import Fault, FrameReader, decode_request
from tests.fuzz.requests import HttpCase, Server
from tests.fuzz.sockets import Ended, HttpAnswer, Received, answers_in

# No replica, too much at once, full storage, a bus that is away, a limit of time: none of these is so while the engine
# rolls and a few clients use it. docs/storage.md and docs/log.md (R9) say when they are.
DOCUMENTED = {code for code, status in STATUS.items() if status == 503}


def wrong_with(case: HttpCase, received: Sequence[Received], settled: bool, fill: Callable[[bytes], bytes]) -> str:
    """Return what is wrong with what came back, "" for nothing. `settled`: the engine rolled all the while."""
    for request, each in zip(case.requests, received):
        if each.ended == Ended.REFUSED:
            return "no connection was made"
        try:
            answers = answers_in(each.body) if request.method != "HEAD" else _heads(each.body)
        except ValueError as error:
            return str(error)
        if case.is_owed and not (answers and answers[0].complete):
            return f"no answer within {case.within_s:.0f} s ({each.ended}, {len(each.body)} bytes)"
        for answer in answers:
            if wrong := _wrong_answer(case, answer, settled, fill):
                return f"{answer.status}: {wrong}: {answer.body[:600]!r}"
    return ""


def _heads(received: bytes) -> list[HttpAnswer]:
    """Read the answer to a HEAD, which has no body whatever its head says."""
    status = received[:12].removeprefix(b"HTTP/1.1 ")
    return [HttpAnswer(int(status), b"", b"\r\n\r\n" in received)] if status.isdigit() else []


def _wrong_answer(case: HttpCase, answer: HttpAnswer, settled: bool, fill: Callable[[bytes], bytes]) -> str:
    if b"Traceback (most" in answer.body:
        return "it shows a traceback"
    if case.api == Server.GATEWAY and b'"code":"internal"' in answer.body.replace(b" ", b""):
        return "it tells of a fault inside"
    if answer.status < 500:
        return ""
    target = case.requests[0].target.removeprefix("/e/main")
    code = Code.NO_REPLICA if target.startswith(("/health", "/ready")) else _code(answer.body)
    is_cut = not answer.complete and not answer.body  # by a client that left after the head
    if answer.status != 503 or (code not in DOCUMENTED and not is_cut):
        return "a fault of the server"
    if case.api == Server.REPLICA:
        return "" if not settled or _is_for_another(fill(case.requests[0].body)) else "503 while it serves"
    return "503 while the engine rolls" if settled else ""


def _code(body: bytes) -> str:
    """Return the code of a refusal, of any API."""
    with suppress(ValueError, AttributeError):
        found = json.loads(body)
        return str(found.get("error", found).get("code", ""))
    with suppress(ValueError):
        return next((frame.code for frame in FrameReader().feed(body) if isinstance(frame, Fault)), "")
    return ""


def _is_for_another(body: bytes) -> bool:
    """Whether a request is for another engine than the replica's, which has to refuse it by 503."""
    try:
        return decode_request(body).engine != "main"
    except msgspec.MsgspecError:
        return False
