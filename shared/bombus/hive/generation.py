"""The protocol between a gateway and an inference replica: token ids in, token ids out.

`POST /generate` takes a msgpack `Generate` and answers with frames. Each frame is a little-endian uint32 length,
followed by a msgpack `Tokens`, `PromptScores`, `Finished` or `Fault`. Closing the connection aborts the request. A
gateway sends the key that replicas accept as `Authorization: Bearer KEY`.
"""

import struct
from collections.abc import Iterator
from hashlib import blake2b

import msgspec

from bombus.hive.decoding import decoded
from bombus.hive.records import SamplingParams

CONTENT_TYPE = "application/x-bombus-frames"
FRAME_BYTES_MAX = 64 << 20
SCORES_A_FRAME_MAX = 1 << 16  # the most prompt tokens in one `PromptScores`: with 20 alternatives each, 11 MB


def replica_key(secret: bytes) -> str:
    """Return the key that replicas accept from gateways, derived from the secret that signs the hive's keys."""
    return blake2b(b"key for replicas", key=secret, digest_size=32).hexdigest()


class CallShape(msgspec.Struct, frozen=True, array_like=True):
    """A tool call as the model writes it: first `head`, which contains the tool's name, and then arguments as JSON that
    matches `schema`."""

    head: str
    schema: str


class Constraint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The form that an answer must have, from its first token to its end: JSON, tool calls, or either of them.

    `schema`, if given, is the schema of the JSON; schemas are JSON Schema, as JSON text. Tool calls are written as
    `opens`, one of `calls`, any further calls each preceded by `between`, and `closes`; without `between`, only one
    call is allowed. Reasoning may come first. It begins with `thinks` (or in the prompt, if `thinks` is empty) and ends
    with `thought`.
    """

    schema: str = ""
    calls: tuple[CallShape, ...] = ()
    opens: str = ""
    between: str = ""
    closes: str = ""
    thinks: str = ""
    thought: str = ""


class Generate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request to generate. `prompt` is int32 token ids.

    With `stream` false, each choice is sent in as few frames as its versions allow. `traceparent` is the trace (W3C
    trace context). A replica refuses the request if it serves a run other than `run`, or if it cannot enforce the
    `constraint`.

    `adapter` is the address of a LoRA adapter, the SHA-256 of its `adapter_model.safetensors` in hex; "" means the
    engine's own policy. A replica that does not have the adapter answers `unknown_model`; the adapter can then be sent
    to it with `POST /adapters`.

    With `prompt_logprobs` the prompt is scored too, and `top_prompt` alternatives are reported for each of its tokens.
    A `max_tokens` of 0 then means that nothing is generated; otherwise 0 means no limit. With `plain_logprobs`, the
    logprobs of sampled tokens and their alternatives come from the model's own distribution: at temperature 1, before
    bias, penalties and truncation.
    """

    id: str
    engine: str
    run: int
    prompt: bytes
    sampling: SamplingParams
    n: int = 1
    stream: bool = False
    episode: str = ""
    traceparent: str = ""
    constraint: Constraint | None = None
    adapter: str = ""
    prompt_logprobs: bool = False
    top_prompt: int = 0
    plain_logprobs: bool = False


class Tokens(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="tokens", tag_field="kind"):
    """Tokens of one choice, all sampled under one policy version.

    If alternatives were requested, `top` contains the most likely ones for each token, as [(id, logprob), ...].
    """

    choice: int = 0
    version: int
    tokens: bytes  # int32
    logprobs: bytes  # float32, under the distribution from which the tokens were sampled
    top: tuple[tuple[tuple[int, float], ...], ...] = ()


class PromptScores(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="prompt_scores", tag_field="kind"
):
    """Logprobs of the prompt's tokens from index `start`, at temperature 1 and all under one policy version.

    They are sent once, before any frame of choice 0, with at most `SCORES_A_FRAME_MAX` tokens in a frame. The logprob
    of the prompt's first token is NaN, because no token precedes it. `top_tokens` and `top_logprobs` have `width`
    alternatives for each token, the most likely first. For the first token, every alternative is token 0 with the
    logprob NaN.
    """

    start: int = 0
    version: int
    logprobs: bytes  # float32
    width: int = 0
    top_tokens: bytes = b""  # int32
    top_logprobs: bytes = b""  # float32


class Finished(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="finished", tag_field="kind"):
    """A choice is complete. `reason` is `stop` if the last token reported is a stop token, and otherwise `length`.

    An answer that ended for any other reason has no `Finished`.
    """

    choice: int = 0
    reason: str
    cached_prompt_tokens: int = 0


class Fault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="fault", tag_field="kind"):
    """The whole request failed. `retry` says whether another replica may succeed."""

    why: str
    code: str = "internal"
    retry: bool = False


Frame = Tokens | PromptScores | Finished | Fault

_header = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
_frames: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)
_requests = msgspec.msgpack.Decoder(Generate)


def encode_request(request: Generate) -> bytes:
    return _encoder.encode(request)


def decode_request(body: bytes) -> Generate:
    """Decode a request. Raises `msgspec.MsgspecError` if the bytes are not a request."""
    return decoded(_requests.decode, body)


def encode_frame(frame: Frame) -> bytes:
    body = _encoder.encode(frame)
    return _header.pack(len(body)) + body


class FrameReader:
    """Splits a byte stream into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that `data` completes.

        Raises `ValueError` for a frame over the size limit, and `msgspec.MsgspecError` for a frame that cannot be
        decoded.
        """
        kept = self._buffer
        kept += data if kept else b""
        buffer = kept or data  # most portions are whole frames, which need not be put together
        at, size, head = 0, len(buffer), _header.size
        try:
            while size - at >= head:
                (length,) = _header.unpack_from(buffer, at)
                if length > FRAME_BYTES_MAX:
                    raise ValueError(f"a frame of {length} bytes is over the limit of {FRAME_BYTES_MAX}")
                end = at + head + length
                if size < end:
                    break
                yield _frames.decode(buffer[at + head : end])
                at = end
        except (UnicodeDecodeError, RecursionError) as error:  # as in `decoded`, which costs as much as a frame
            raise msgspec.DecodeError(str(error)) from error
        if kept:
            del kept[:at]
        else:
            kept += data[at:]
