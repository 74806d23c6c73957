"""Every decoder of what comes from outside a process: valid bytes for it, and the errors that it declares."""

import asyncio
import gzip
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from pydantic import BaseModel

from bombus.bus import Stored, snapshots
from bombus.bus.follow import read_event
from bombus.config.documents import parse_job
from bombus.config.job import RunConfig
from bombus.environments.openenv import messages as openenv
from bombus.errors import EngineFault, LogCorrupted, NewerLevel, Refused
from bombus.hive import events, generation, inbox, records
from bombus.hive.records import pack_tokens
from bombus.hive.trajectories.records import decode_group, encode_group
from bombus.hive.trajectories.training import why_not_trained
from bombus.operations import CheckpointKind, kinds
from bombus.operations.arrays import Array, DType
from bombus.replay import archive
from bombus.replay.source import NotOnLog
from bombus.telemetry import traceparent_of
from bombus.weights import adapters, deltas
from bombus.weights.checkpoints import FORMAT, MANIFEST, CheckpointLost, Seal, read_checkpoint
from bombus_gateway.anthropic.request import read_messages
from bombus_gateway.atropos.compression import inflated
from bombus_gateway.atropos.requests import read_environment, read_environment_id, read_trainer
from bombus_gateway.atropos.scored_data import read_scored_data, read_scored_data_list
from bombus_gateway.atropos.vllm_generate import read_vllm
from bombus_gateway.generate.dialect import GenerateDialect
from bombus_gateway.keys import Keys
from bombus_gateway.openai.request import read_chat, read_completion
from bombus_gateway.openai.tokenizing import read_tokenize
from bombus_gateway.operations.rest.searching import read_search
from bombus_gateway.operations_wire.checkpoints import read_load, read_save, read_weights_info
from bombus_gateway.operations_wire.data.json_data import read_json_data
from bombus_gateway.operations_wire.dialects import TrainingDialect
from bombus_gateway.operations_wire.futures import read_retrieve
from bombus_gateway.operations_wire.generate import read_generate
from bombus_gateway.operations_wire.models import AdapterDefaults, read_create_model
from bombus_gateway.operations_wire.sampling import read_sample, read_sampling_session
from bombus_gateway.operations_wire.steps import read_optim_step
from bombus_gateway.responses.request import read_response_request
from bombus_gateway.swarm import bodies
from bombus_inference.model_files import read_shapes
from bombus_overwatch.service import read_sent
from bombus_trainer.operations.checkpoints import ModelFacts
from bombus_trainer.publish.step_checkpoint import StepFacts
from tests.fuzz.corpus import (
    CHATS,
    COMPLETIONS,
    GENERATED,
    JOB,
    MESSAGES,
    RESPONSES,
    SAMPLING,
    SCORED,
    SWARM,
    TOKENIZE,
    TRACEPARENT,
    TRAINING,
    VLLM,
)
from tests.fuzz.examples import examples
from tests.fuzz.values import Tree, to_json, to_msgpack

KEYS = Keys(b"a secret of 16 bytes or more")
WEIGHTS = {"format": "safetensors", "where": "/w", "sha256": "0" * 64, "bytes": 80}


@dataclass(frozen=True)
class Decoder:
    """`read` decodes bytes, in a folder of its own, and raises nothing but `declared`.

    `write` makes bytes of a tree, which is one of `valid` or a changed one.
    """

    name: str
    read: Callable[[bytes, Path], object]
    declared: tuple[type[Exception], ...]
    valid: Sequence[Tree]
    write: Callable[[Tree], bytes] = field(default=to_msgpack)


def _plain(decode: Callable[[bytes], object]) -> Callable[[bytes, Path], object]:
    return lambda body, _: decode(body)


def _text(decode: Callable[[str], object]) -> Callable[[bytes, Path], object]:
    return lambda body, _: decode(body.decode("utf-8", "replace"))


def _latin(tree: Tree) -> bytes:
    return tree.encode("utf-8", "replace") if isinstance(tree, str) else to_json(tree)


# ---- the bus -------------------------------------------------------------------------------------------------------


def _event(body: bytes) -> object:
    with suppress(NewerLevel):  # the example of `epoch.opened` has any level
        return read_event(Stored(1, "bombus.h.event.e.kind", body, {}, 0))
    return events.decode_event(body)


def _frames(body: bytes) -> object:
    reader = generation.FrameReader()
    return [frame for start in range(0, len(body), 37) for frame in reader.feed(body[start : start + 37])]


def _framed(tree: Tree) -> bytes:
    body = to_msgpack(tree)
    return struct.pack("<I", len(body)) + body


def _sent(tree: Tree) -> bytes:
    return b"id: 7\ndata: " + to_json(tree)


def _snapshot(tree: Tree) -> bytes:
    return b"bombus snapshot\n" + to_msgpack(tree)


# ---- archives ------------------------------------------------------------------------------------------------------


def _archived(frames: Tree) -> bytes:
    parts = map(_framed, frames) if isinstance(frames, list) else [_framed(frames)]
    return gzip.compress(b"".join(parts), compresslevel=1)


async def _read_archive(file: Path) -> None:
    with archive.FileSource.open(file) as source:
        await source.base()
        async for _ in source.stored():
            pass
        await source.bodies([records.CallRef(3, "text", b"d")])


def _archive(body: bytes, folder: Path) -> None:
    file = folder / "log.bombuslog"
    file.write_bytes(body)
    asyncio.run(_read_archive(file))


def _archive_examples() -> list[Tree]:
    (header,) = examples(archive.ArchiveHeader)
    frames = examples(archive.ArchiveFrame)
    return [[{**header, "format": 1, "last": 9, "base": b""}, *frames]]


# ---- weights and checkpoints ---------------------------------------------------------------------------------------


def _tensor(dtype: str, shape: list[int], start: int, end: int) -> Tree:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


FULL = {"__metadata__": {"format": "pt"}, "a": _tensor("F32", [2, 4], 0, 32), "b": _tensor("BF16", [4], 32, 40)}
DELTA = {
    "__metadata__": {"format": "bombus-delta", "base": to_json(WEIGHTS).decode()},
    "a": _tensor("F32", [3], 0, 12),
    "gaps:a": _tensor("U8", [3], 12, 15),
    "b": _tensor("BF16", [4], 16, 24),
}
ADAPTER_CONFIG = to_json({"r": 4, "lora_alpha": 8.0, "target_modules": ["q"], "peft_type": "LORA"}).decode()
ADAPTER = {"__metadata__": {adapters.ADAPTER_CONFIG: ADAPTER_CONFIG}, "a": _tensor("F32", [2], 0, 8)}


def _safetensors(head: Tree) -> bytes:
    text = to_json(head)
    return struct.pack("<Q", len(text)) + text + bytes(range(1, 13)) + bytes(28)


def _tensors(body: bytes, folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(body)
    with deltas.TensorFile(file) as tensors:
        for name in tensors.names:
            tensors.bits(name)


def _delta(body: bytes, folder: Path) -> None:
    base, delta = folder / "base.safetensors", folder / "delta.safetensors"
    base.write_bytes(_safetensors(FULL))
    delta.write_bytes(body)
    with deltas.DeltaFile(delta) as file:
        file.base()
        for _, patch in file.patches():
            elements = len(patch.values) if patch.gaps is None else 8
            deltas.apply_patch(patch, np.zeros(elements, dtype=patch.values.dtype))
    deltas.rebuild(base, [delta], folder / "rebuilt")


def _adapter(body: bytes, folder: Path) -> None:
    (folder / adapters.ADAPTER_FILE).write_bytes(body)
    (folder / adapters.ADAPTER_CONFIG).write_text(ADAPTER_CONFIG)
    adapters.read_adapter_config(folder)


def _shapes(body: bytes, folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(body)
    read_shapes(file)


def _manifest(facts: type[msgspec.Struct], body: bytes, folder: Path) -> None:
    (folder / MANIFEST).write_bytes(body)
    read_checkpoint(folder, facts)


# ---- APIs ---------------------------------------------------------------------------------------------------------


def _end(body: bytes) -> None:
    end = bodies.parse(bodies.EndEpisode, body)
    bodies.result_of("e", end.task_id, end.workflow_output)


def _bodies() -> list[Decoder]:
    """Return the decoder of every body of the swarm API."""
    kinds = [kind for kind in vars(bodies).values() if isinstance(kind, type) and issubclass(kind, BaseModel)]
    valid = [body for found in SWARM.values() for body in found]
    own = [kind for kind in kinds if kind.__module__ == bodies.__name__]
    return [
        Decoder(f"body {kind.__name__}", _plain(partial(bodies.parse, kind)), (Refused,), valid, to_json)
        for kind in own
    ]


def all_decoders() -> tuple[Decoder, ...]:
    """Return every decoder."""
    broken = (msgspec.MsgspecError,)
    key = KEYS.sign("main", 1, "e-1", 1 << 62)
    return (
        Decoder("inbox message", _plain(inbox.decode_message), broken, examples(inbox.AnyMessage)),
        Decoder("inbox answer", _plain(inbox.decode_answer), broken, examples(inbox.AnyAnswer)),
        Decoder("event", _plain(_event), (LogCorrupted,), examples(events.AnyEvent)),
        Decoder("server-sent event", _plain(read_sent), broken, examples(events.AnyEvent), _sent),
        Decoder("call record", _plain(records.decode_record), (LogCorrupted,), examples(records.CallRecord)),
        Decoder("operation", _plain(kinds.decode_operation), broken, _operations()),
        Decoder("result", _plain(kinds.decode_result), broken, _results()),
        Decoder("generate", _plain(generation.decode_request), broken, examples(generation.Generate)),
        Decoder("frames", _plain(_frames), (ValueError,), examples(generation.Frame), _framed),
        Decoder("snapshot", _plain(snapshots.decode), (LogCorrupted,), examples(snapshots.Snapshot), _snapshot),
        Decoder("archive", _archive, (LogCorrupted, NotOnLog), _archive_examples(), _archived),
        Decoder("safetensors", _tensors, (EngineFault,), [FULL], _safetensors),
        Decoder("delta", _delta, (EngineFault,), [DELTA], _safetensors),
        Decoder("adapter", _adapter, (EngineFault,), [ADAPTER], _safetensors),
        Decoder("shapes", _shapes, (EngineFault,), [FULL], _safetensors),
        Decoder("checkpoint", partial(_manifest, StepFacts), (CheckpointLost,), _manifests(StepFacts), to_json),
        Decoder("model", partial(_manifest, ModelFacts), (CheckpointLost,), _manifests(ModelFacts), to_json),
        Decoder("key", _text(lambda text: KEYS.verify(text, 0)), (Refused,), [key], _latin),
        Decoder("claimed id", _text(KEYS.episode_of), (Refused,), [KEYS.claimed_id("e-1")], _latin),
        Decoder("link", _text(KEYS.linked), (Refused,), [KEYS.sign_link(b"a checkpoint")], _latin),
        Decoder("traceparent", _text(traceparent_of), (), [TRACEPARENT], _latin),
        Decoder("job", _text(parse_job), (Refused,), [JOB], to_json),
        Decoder("configuration", _text(RunConfig.from_json), (Refused,), [_configuration()], to_json),
        Decoder("chat", _plain(read_chat), (Refused,), CHATS, to_json),
        Decoder("message", _plain(read_messages), (Refused,), MESSAGES, to_json),
        Decoder("completion", _plain(read_completion), (Refused,), COMPLETIONS, to_json),
        Decoder("responses", _plain(read_response_request), (Refused,), RESPONSES, to_json),
        *_training(),
        *_atropos(),
        *_environments(),
        Decoder("tokenize", _plain(read_tokenize), (Refused,), TOKENIZE, to_json),
        Decoder("end of an episode", _plain(_end), (Refused,), SWARM["/end_episode"], to_json),
        *_bodies(),
    )


def _training() -> list[Decoder]:
    """Return what reads the bodies of training clients. What is wrong with an operation is a result, not an error."""
    tinker, xorl = TrainingDialect.TINKER, TrainingDialect.XORL
    readers: dict[str, tuple[Callable[[bytes], object], Sequence[Tree]]] = {
        "create_model": (lambda body: read_create_model(_dialect(body), body, AdapterDefaults()), _of("create_model")),
        "forward": (partial(read_json_data, forward_only=False), _of("forward_backward")),
        "optim_step": (partial(read_optim_step, xorl), _of("optim_step")),
        "save": (lambda body: read_save(xorl, CheckpointKind.SAMPLER, body), _of("save_weights")),
        "load": (partial(read_load, xorl), _of("load_weights")),
        "future": (read_retrieve, _of("retrieve_future")),
        "weights_info": (read_weights_info, _of("weights_info")),
        "sampling session": (partial(read_sampling_session, tinker), _of("create_sampling_session")),
        "sample": (read_sample, _of("asample")),
        "search": (read_search, _of("sessions/search")),
        "sglang": (read_generate, GENERATED),
    }
    return [
        Decoder(f"training {name}", _plain(read), (Refused,), valid, to_json) for name, (read, valid) in readers.items()
    ]


def _atropos() -> list[Decoder]:
    """Return what reads the bodies of Atropos's environments and trainers, and the record that a group becomes."""
    readers: dict[str, tuple[Callable[[bytes], object], Sequence[Tree]]] = {
        "trainer": (read_trainer, SCORED["/register"]),
        "environment": (read_environment, SCORED["/register-env"]),
        "number": (read_environment_id, SCORED["/disconnect-env"]),
        "group": (read_scored_data, SCORED["/scored_data"]),
        "trained group": (lambda body: why_not_trained(read_scored_data(body), 4096), SCORED["/scored_data"]),
        "groups": (read_scored_data_list, SCORED["/scored_data_list"]),
        "generate": (read_vllm, VLLM),
        "call": (lambda body: GenerateDialect().read(body, {}), [*GENERATED, *VLLM]),
    }
    decoders = [
        Decoder(f"atropos {name}", _plain(read), (Refused,), valid, to_json) for name, (read, valid) in readers.items()
    ]
    packed = Decoder("atropos gzip", _plain(_inflated), (Refused,), SCORED["/scored_data"], _gzipped)
    return [*decoders, packed, Decoder("rollout group", _plain(decode_group), (LogCorrupted,), _groups())]


def _environments() -> list[Decoder]:
    """Return what reads the messages of an environment server's clients."""
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "guess", "arguments": {"number": 5}}}
    messages: list[Tree] = [
        {"type": "reset", "data": {"seed": 3, "episode_id": "e1", "task": {"main_query": "find it"}}},
        {"type": "step", "data": {"tool": "guess", "arguments": {"number": 5}}},
        {"type": "mcp", "data": call},
        {"type": "state"},
        {"type": "close"},
    ]
    requests: list[Tree] = [
        {**call, "params": {"name": "add", "session_id": "s", "arguments": {}}},
        {"jsonrpc": "2.0", "id": "a", "method": "openenv/session/create"},
    ]
    return [
        Decoder("environment message", _plain(openenv.decode), (openenv.NotAMessage,), messages, to_json),
        Decoder("environment request", _plain(openenv.decode_rpc), (openenv.NotARequest,), requests, to_json),
    ]


def _inflated(body: bytes) -> object:
    return inflated("gzip", body, 1 << 16)


def _gzipped(tree: Tree) -> bytes:
    return gzip.compress(to_json(tree), compresslevel=1)


def _groups() -> list[Tree]:
    groups = [read_scored_data(to_json(body)) for body in SCORED["/scored_data"]]
    return [msgspec.msgpack.decode(encode_group(each)) for each in groups]


def _of(route: str) -> Sequence[Tree]:
    return {**TRAINING, **SAMPLING}[route]


def _dialect(body: bytes) -> TrainingDialect:
    return TrainingDialect.TINKER if b"model_seq_id" in body else TrainingDialect.XORL


def _operations() -> list[Tree]:
    """Return operations, whose arrays have the bytes that their shapes say."""
    two = Array.of(DType.FLOAT32, [1.0, 2.0])
    data = (kinds.Datum(pack_tokens([1, 2]), {"weights": two}),)
    known: list[kinds.Operation] = [
        kinds.ForwardBackward(loss=kinds.LossSpec("cross_entropy", {"eps": 0.1}), data=data),
        kinds.OptimStep(adam=kinds.AdamParams(learning_rate=0.1), reduction=kinds.Reduction.SUM),
    ]
    others = examples(kinds.CreateModel | kinds.SaveWeights | kinds.LoadWeights | kinds.EndModel | kinds.AbortEpoch)
    return [msgspec.msgpack.decode(kinds.encode_operation(each)) for each in known] + others


def _results() -> list[Tree]:
    scores = kinds.Scores(outputs=({"logprobs": Array.of(DType.FLOAT32, [1.0, 2.0])},), loss=1.0, tokens=2)
    others = examples(kinds.StepTaken | kinds.CheckpointSaved | kinds.ModelReady | kinds.Failed | kinds.ModelEnded)
    return [msgspec.msgpack.decode(kinds.encode_result(scores)), *others]


def _configuration() -> Tree:
    return msgspec.json.decode(parse_job(JOB).to_json())


def _manifests(facts: type[msgspec.Struct]) -> list[Tree]:
    seals = {"state.safetensors": Seal(7, "aa")}
    return [{"format": FORMAT, "facts": each, "files": msgspec.to_builtins(seals)} for each in examples(facts)]
