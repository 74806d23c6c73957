"""The protobuf messages of Tinker's wire format, built at import from a table, in a separate pool and package.

Names of packages and files are not sent, so these classes can be loaded alongside the SDK's and vLLM's, with any
installed version of protobuf. Parts that we never read, such as images, are declared as `bytes` here.
"""

from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

from bombus.errors import Code, Refused
from bombus_gateway import limits

Message: TypeAlias = Any  # instance of a class below, whose fields are known only at run time
MessageType: TypeAlias = Any

PACKAGE = "bombus.tinker_wire"


class WireDType(IntEnum):
    """Number types, with the values that the SDK uses."""

    UNSPECIFIED = 0
    FLOAT32 = 1
    INT64 = 2
    INT32 = 3
    BFLOAT16 = 4


class WireStop(IntEnum):
    """Why a sample ended, with the SDK's values."""

    STOP = 0
    LENGTH = 1


class _Field(NamedTuple):
    """A field of a message. `kind` is a proto3 type or the name of a message; `key` makes the field a map."""

    name: str
    number: int
    kind: str
    many: bool = False
    optional: bool = False
    oneof: str = ""
    key: str = ""


_TABLE: dict[str, tuple[_Field, ...]] = {
    "SampleResponse": (
        _Field("sequences", 1, "SampledSequence", many=True),
        _Field("prompt_logprobs", 2, "bytes", optional=True),
        _Field("topk_prompt_logprobs", 3, "TopkLogprobs", optional=True),
        _Field("prompt_cache_hit_tokens", 4, "int32"),
    ),
    "SampledSequence": (
        _Field("stop_reason", 1, "int32"),  # an enum, which is encoded the same way
        _Field("tokens", 2, "bytes"),
        _Field("logprobs", 3, "bytes", optional=True),
        _Field("topk_sampled_logprobs", 4, "TopkLogprobs", optional=True),
    ),
    "TopkLogprobs": (
        _Field("token_ids", 1, "bytes"),
        _Field("logprobs", 2, "bytes"),
        _Field("k", 3, "uint32"),
        _Field("length", 4, "uint32"),
    ),
    "SparseCsr": (
        _Field("values", 1, "bytes"),
        _Field("crow_indices", 2, "bytes"),
        _Field("col_indices", 3, "bytes"),
    ),
    "Tensor": (
        _Field("dense", 1, "bytes", oneof="encoding"),
        _Field("sparse_csr", 2, "SparseCsr", oneof="encoding"),
        _Field("dtype", 3, "int32"),
        _Field("shape", 4, "int64", many=True),
    ),
    "BatchedTensor": (
        _Field("data", 1, "bytes"),
        _Field("offsets", 2, "bytes"),
        _Field("dtype", 3, "int32"),
        _Field("trailing_shape", 4, "int64", many=True),
    ),
    "ArrayRecord": (
        _Field("type_tag", 1, "string"),
        _Field("fields", 2, "BatchedTensor", key="string"),
        _Field("num_datums", 3, "int64"),
    ),
    "ForwardBackwardOutput": (
        _Field("loss_fn_output_type", 1, "string"),
        _Field("loss_fn_outputs", 2, "ArrayRecord", many=True),
        _Field("metrics", 3, "double", key="string"),
    ),
    "ForwardBackwardRequest": (
        _Field("model_id", 1, "string"),
        _Field("seq_id", 2, "int32"),
        _Field("data", 3, "Datum", many=True),
        _Field("loss_fn", 4, "string"),
        _Field("loss_fn_config", 5, "double", key="string"),
        _Field("forward_only", 6, "bool"),
        _Field("loss_fn_config_v2", 7, "LossConfigValue", key="string"),
    ),
    "LossConfigValue": (
        _Field("number", 1, "double", oneof="value"),
        _Field("text", 2, "string", oneof="value"),
    ),
    "Datum": (
        _Field("model_input", 1, "Chunk", many=True),
        _Field("loss_fn_inputs", 2, "Tensor", key="string"),
    ),
    "Chunk": (
        _Field("encoded_text", 1, "EncodedTextChunk", oneof="chunk"),
        _Field("image", 2, "bytes", oneof="chunk"),
        _Field("dmel", 3, "bytes", oneof="chunk"),
    ),
    "EncodedTextChunk": (_Field("tokens", 1, "bytes"),),
}

_Proto = descriptor_pb2.FieldDescriptorProto
_SCALARS: dict[str, int] = {
    "bytes": _Proto.TYPE_BYTES,
    "string": _Proto.TYPE_STRING,
    "int32": _Proto.TYPE_INT32,
    "int64": _Proto.TYPE_INT64,
    "uint32": _Proto.TYPE_UINT32,
    "bool": _Proto.TYPE_BOOL,
    "double": _Proto.TYPE_DOUBLE,
}


def _add_field(owner: Message, field: _Field, oneofs: dict[str, int]) -> None:
    """Add a field to the descriptor of its message. A map is added in its wire form: as repeated pairs."""
    added = owner.field.add(name=field.name, number=field.number)
    added.label = _Proto.LABEL_REPEATED if field.many or field.key else _Proto.LABEL_OPTIONAL
    kind = field.kind
    if field.key:
        entry = owner.nested_type.add(name="".join(word.title() for word in field.name.split("_")) + "Entry")
        entry.options.map_entry = True
        _add_field(entry, _Field("key", 1, field.key), {})
        _add_field(entry, _Field("value", 2, field.kind), {})
        kind = f"{owner.name}.{entry.name}"
    if kind in _SCALARS:
        added.type = _SCALARS[kind]
    else:
        added.type = _Proto.TYPE_MESSAGE
        added.type_name = f".{PACKAGE}.{kind}"
    if field.oneof:
        added.oneof_index = oneofs[field.oneof]
    elif field.optional:
        added.proto3_optional = True
        added.oneof_index = oneofs[f"_{field.name}"]


def _file() -> Message:
    """Return the table as the descriptor of a protobuf file."""
    described = descriptor_pb2.FileDescriptorProto(name="bombus/tinker_wire.proto", package=PACKAGE, syntax="proto3")
    for name, fields in _TABLE.items():
        owner = described.message_type.add(name=name)
        shared = dict.fromkeys(field.oneof for field in fields if field.oneof)
        alone = [f"_{field.name}" for field in fields if field.optional]  # last, as protoc orders them
        oneofs = {each: index for index, each in enumerate([*shared, *alone])}
        for each in oneofs:
            owner.oneof_decl.add(name=each)
        for field in fields:
            _add_field(owner, field, oneofs)
    return described


_pool = descriptor_pool.DescriptorPool()
_pool.AddSerializedFile(_file().SerializeToString())


def _class_of(name: str) -> MessageType:
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))


FORWARD_BACKWARD_REQUEST = _class_of("ForwardBackwardRequest")
FORWARD_BACKWARD_OUTPUT = _class_of("ForwardBackwardOutput")
ARRAY_RECORD = _class_of("ArrayRecord")
SAMPLE_RESPONSE = _class_of("SampleResponse")
TENSOR = _class_of("Tensor")

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types


def parsed(kind: MessageType, body: bytes) -> Message:
    """Return the message in a body.

    Raises `Refused`: MALFORMED if the body is not such a message, and TOO_LARGE if it has too many fields. An empty
    message takes two bytes in a body but a hundred in memory, so fields are counted before parsing.
    """
    budget = _Budget(limits.TRAINING_FIELDS)
    _count(body, 0, len(body), kind.DESCRIPTOR, budget)
    try:
        return kind.FromString(body)
    except (message.DecodeError, UnicodeDecodeError) as error:  # pure-Python protobuf raises the second
        raise Refused(Code.MALFORMED, f"The body is not a protobuf {kind.DESCRIPTOR.name}: {error}.") from None


class _Budget:
    """How many more fields a body may have."""

    def __init__(self, fields: int) -> None:
        self.left = fields

    def spend(self, fields: int) -> None:
        self.left -= fields
        if self.left < 0:
            why = f"The body has more than {limits.TRAINING_FIELDS} fields; send less data in one request."
            raise Refused(Code.TOO_LARGE, why)


def _count(body: bytes, at: int, end: int, descriptor: Message, budget: _Budget) -> None:
    """Count the fields between two offsets of a body, including those of nested messages."""
    known = descriptor.fields_by_number
    while at < end:
        budget.spend(1)
        tag, at = _varint(body, at, end)
        wire = tag & 7
        if wire == _VARINT:
            _, at = _varint(body, at, end)
        elif wire == _BYTES:
            length, at = _varint(body, at, end)
            if at + length > end:
                raise _torn(at)
            field = known.get(tag >> 3)
            if field is not None and field.message_type is not None:
                _count(body, at, at + length, field.message_type, budget)
            elif field is not None and field.type == _Proto.TYPE_INT64:
                budget.spend(length)  # packed: each number takes at least one byte
            at += length
        elif wire in (_FIXED32, _FIXED64):
            at += 4 if wire == _FIXED32 else 8
        else:
            raise _torn(at)
    if at > end:
        raise _torn(at)


def _varint(body: bytes, at: int, end: int) -> tuple[int, int]:
    """Return the varint that begins at an offset, and the offset where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= end:
            raise _torn(at)
        byte = body[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise _torn(at)


def _torn(at: int) -> Refused:
    return Refused(Code.MALFORMED, f"The body is not protobuf: a field before byte {at} is incomplete.")
