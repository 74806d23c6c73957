"""Paths of checkpoints, `tinker://RUN/weights/NAME` or `xorl://MODEL/sampler_weights/NAME`, and the names in them."""

import re

import msgspec

from bombus.errors import Code, Refused
from bombus.operations import CheckpointKind
from bombus_gateway.operations_wire.dialects import TrainingDialect

_FOLDERS = {
    "weights": CheckpointKind.TRAINING,
    "sampler_weights": CheckpointKind.SAMPLER,
    "external_weights": CheckpointKind.EXTERNAL,
}
_NAMES_OF_KINDS = {kind: folder for folder, kind in _FOLDERS.items()}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:=+@-]{0,127}")
_SCHEME = re.compile(r"(\w+)://(.*)", re.DOTALL)


class CheckpointPath(msgspec.Struct, frozen=True):
    """A checkpoint of a model. `str()` gives the form used in operations: `MODEL/KIND/NAME`."""

    model: str
    kind: CheckpointKind
    name: str

    def __str__(self) -> str:
        return f"{self.model}/{self.kind}/{self.name}"

    @property
    def id(self) -> str:
        """The checkpoint's id as clients know it, such as `weights/NAME`."""
        return f"{_NAMES_OF_KINDS[self.kind]}/{self.name}"

    def uri(self, dialect: TrainingDialect) -> str:
        return f"{dialect}://{self.model}/{self.id}"


def read_path(text: str, model: str = "") -> CheckpointPath:
    """Return the checkpoint that a client names by a path of either scheme or, if `model` is given, by a part of a
    path."""
    found = _SCHEME.fullmatch(text)
    if found and found[1] not in list(TrainingDialect):
        raise _no_path(text)
    parts = (found[2] if found else text).split("/")
    if model and not found:
        parts = [model, *([] if len(parts) > 1 else ["weights"]), *parts] if len(parts) < 3 else parts
    if len(parts) != 3 or parts[1] not in _FOLDERS or not all(map(_NAME.fullmatch, (parts[0], parts[2]))):
        raise _no_path(text)
    return CheckpointPath(parts[0], _FOLDERS[parts[1]], parts[2])


def read_loaded_path(text: str, model: str) -> CheckpointPath:
    """Return the checkpoint to load into a `model`, by any name that xorl's server accepts.

    In addition to the forms that `read_path` accepts, these are paths below xorl's checkpoint folder, `MODEL/NAME` and
    `FOLDER/MODEL/NAME` (where FOLDER is, for example, `sampler_weights`), and paths below our own checkpoint folder,
    `MODEL/KIND/NAME`. Raises `Refused` for any other name.
    """
    match text.split("/"):
        case [other, name] if other not in _FOLDERS:
            return read_path(f"{other}/weights/{name}", model)
        case [kind, other, name] if kind in _FOLDERS:
            return read_path(f"{other}/{kind}/{name}", model)
        case [other, kind, name] if kind in list(CheckpointKind):
            return read_path(f"{other}/{_NAMES_OF_KINDS[CheckpointKind(kind)]}/{name}", model)
    return read_path(text, model)


def path_of_operation(text: str) -> CheckpointPath:
    """Return the checkpoint that an operation names as `MODEL/KIND/NAME`."""
    model, kind, name = text.split("/")
    return CheckpointPath(model, CheckpointKind(kind), name)


def checked_name(name: str, what: str) -> str:
    """Return the name of a checkpoint or a model. Raises `Refused` if it is not safe as a file name."""
    if not _NAME.fullmatch(name):
        why = f"{name[:140]!r} cannot be the name of a {what}: use 1 to 128 letters, digits and _.:=+@-, and begin with"
        raise Refused(Code.MALFORMED, f"{why} a letter, a digit or _.")
    return name


def _no_path(text: str) -> Refused:
    why = f"{text[:300]!r} is not the path of a checkpoint: send tinker://RUN/weights/NAME or xorl://RUN/weights/NAME"
    return Refused(Code.MALFORMED, f"{why}, with weights, sampler_weights or external_weights before the name.")
