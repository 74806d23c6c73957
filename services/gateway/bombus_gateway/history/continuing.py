"""Requests that name earlier calls of their episode instead of repeating those calls' conversations or answers.

The conversations are rebuilt from the log: each record has the messages that its parent's conversation lacks.
"""

from collections import OrderedDict

import msgspec

from bombus.errors import Code
from bombus.hive.records import CallRecord, CallRef, CallStatus
from bombus_gateway.call.request import CallRequest, InvalidField
from bombus_gateway.history.histories import Histories
from bombus_gateway.keys import KeyClaims
from bombus_gateway.text.message import ChatMessage
from bombus_gateway.text.words import strings

KEPT_CHARACTERS_MAX = 32 << 20
OVERHEAD_CHARACTERS = 1000  # size of a call's objects in addition to their text
_UNKNOWN = "There is no call {!r} in episode {}: a request can name only calls of its own episode."
_NO_ANSWER = "Call {!r} has no chat answer to continue: it was cut off, or it is a plain completion."


class _Earlier(msgspec.Struct, frozen=True):
    """The messages that one choice of a call adds to the conversation that the call continues (`parent`). The last of
    them is the choice's answer."""

    messages: tuple[ChatMessage, ...]
    characters: int
    parent: CallRef | None
    parent_choice: int


class EarlierCalls:
    """Finds earlier calls. Caches the conversations that requests have continued by naming a call, and drops the least
    recently used."""

    def __init__(self, histories: Histories) -> None:
        self._histories = histories
        self._kept: OrderedDict[tuple[str, int], _Earlier] = OrderedDict()  # by call id and choice
        self.characters = 0  # size of all cached messages

    async def continued(self, request: CallRequest) -> CallRequest:
        """Return the request, preceded by the conversation that it continues, with the answers that it names filled in.

        A leading system message in that conversation is left out, since it instructed only the earlier request. Raises
        `InvalidField` UNKNOWN_CALL if a named call is not known, and `Refused` if the log cannot be read.
        """
        if request.completion.answers:
            request = await self._answered(request)
        completion = request.completion
        if not completion.continues:
            return request
        ref = await self._ref(request.claims, completion.continues, request.traceparent)
        earlier = await self._conversation(request.claims, ref)
        given, kept = completion.messages, [message for each in earlier for message in each.messages]
        instructions = given[:1] if given and given[0]["role"] == "system" else ()
        if kept[0]["role"] == "system":
            kept = kept[1:]
        messages = (*instructions, *kept, *given[len(instructions) :])
        return msgspec.structs.replace(
            request,
            completion=msgspec.structs.replace(completion, messages=messages),
            body_bytes=request.body_bytes + sum(each.characters for each in earlier),
        )

    async def _answered(self, request: CallRequest) -> CallRequest:
        """Return the request with the answers of the calls that it names filled in. Raises the same errors as
        `continued`."""
        completion, claims = request.completion, request.claims
        calls = set(completion.answers.values())
        found = self._histories.conversation(claims).answers_of(calls)
        if len(found) < len(calls):
            await self._histories.read_log(claims, request.traceparent)
            found = self._histories.conversation(claims).answers_of(calls)
        missing = next((call for call in completion.answers.values() if call not in found), None)
        if missing is not None:
            raise InvalidField(Code.UNKNOWN_CALL, "messages", _UNKNOWN.format(missing, claims.episode))
        messages, characters = list(completion.messages), 0
        for at, call in completion.answers.items():
            messages[at] = _named(found[call], call, 0)
            characters += sum(map(len, strings(found[call])))
        return msgspec.structs.replace(
            request,
            completion=msgspec.structs.replace(completion, messages=tuple(messages), answers={}),
            body_bytes=request.body_bytes + characters,
        )

    async def records(self, claims: KeyClaims, call: str) -> list[CallRecord]:
        """Return the record of an answered chat call, preceded by the records of the calls that it continues.

        Raises the same errors as `continued`.
        """
        ref: CallRef | None = await self._ref(claims, call)
        found: list[CallRecord] = []
        while ref is not None:
            (record,) = await self._histories.records(claims, [ref])
            found.append(record)
            ref = record.parent
        _answer(found[0], 0)
        return found[::-1]

    async def _ref(self, claims: KeyClaims, call: str, traceparent: str = "") -> CallRef:
        """Return the reference to a call, which another gateway may have recorded."""
        conversation = self._histories.conversation(claims)
        ref = conversation.ref_of(call)
        if ref is None:
            await self._histories.read_log(claims, traceparent)
            ref = conversation.ref_of(call)
        if ref is None:
            raise InvalidField(Code.UNKNOWN_CALL, "continues", _UNKNOWN.format(call, claims.episode))
        return ref

    async def _conversation(self, claims: KeyClaims, ref: CallRef) -> list[_Earlier]:
        """Return the conversation up to the first choice of a call. Parts that are not cached are read from the log."""
        place: CallRef | None = ref
        choice, found = 0, list[_Earlier]()
        while place is not None:
            earlier = self._kept.get((place.id, choice)) or await self._read(claims, place, choice)
            self._keep((place.id, choice), earlier)
            found.append(earlier)
            place, choice = earlier.parent, earlier.parent_choice
        return found[::-1]

    async def _read(self, claims: KeyClaims, ref: CallRef, choice: int) -> _Earlier:
        (record,) = await self._histories.records(claims, [ref])
        messages = (*record.messages, _named(_answer(record, choice), record.id, choice))
        characters = sum(map(len, strings(messages)))
        return _Earlier(messages, characters, record.parent, record.parent_choice)

    def _keep(self, key: tuple[str, int], earlier: _Earlier) -> None:
        """Cache an entry as the most recently used. Drop the least recently used entries while over the limit."""
        if key not in self._kept:
            self.characters += earlier.characters + OVERHEAD_CHARACTERS
        self._kept[key] = earlier
        self._kept.move_to_end(key)
        while self.characters > KEPT_CHARACTERS_MAX:
            _, dropped = self._kept.popitem(last=False)
            self.characters -= dropped.characters + OVERHEAD_CHARACTERS


def _answer(record: CallRecord, choice: int) -> ChatMessage:
    """Return the message of a choice. Raises `InvalidField` if there is none."""
    message = record.choices[choice].message if choice < len(record.choices) else None
    if message is None or record.status != CallStatus.COMPLETE:
        raise InvalidField(Code.UNKNOWN_CALL, "continues", _NO_ANSWER.format(record.id))
    return message


def _named(message: ChatMessage, call: str, choice: int) -> ChatMessage:
    """Return an answer with its name added, which distinguishes it from answers with the same text."""
    return {**message, "answer_of": (call, choice)}
