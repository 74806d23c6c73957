"""Models given as the folder of a LoRA run: the adapter's base model, with the adapter merged into it.

Such a folder contains an export or another adapter that peft reads, a version that a trainer has published, or all
versions of a run.
"""

import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import msgspec

from bombus.errors import EngineFault
from bombus.weights.adapters import ADAPTER_CONFIG, ADAPTER_FILE, Rounding, ScaleOf
from bombus.weights.checkpoints import STATE
from bombus.weights.deltas import DELTA_FILE, FULL_FILE, Bits, TensorFile, file_sha256, patched
from bombus.weights.shards import TensorHead, write_model

log = logging.getLogger(__name__)

CONFIG = "config.json"
FLOATS = ("BF16", "F16", "F32", "F64")
_VERSION = re.compile(r"^version-(\d+)-epoch-(\d+)$")
CHANGE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # values of peft's init_lora_weights
LOST_MAX = 0.5  # largest fraction of an adapter's norm that may be rounded away when it is merged
_NumberT = TypeVar("_NumberT", int, float)
EXPORT = "write it as a folder with `bombus export`, and name that"


class PeftConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of peft's adapter configuration that matter for merging."""

    r: int
    lora_alpha: float
    base_model_name_or_path: str | None = None
    peft_type: str = "LORA"
    bias: str = "none"
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    modules_to_save: list[str] | None = None
    init_lora_weights: bool | str = True

    @property
    def changes_base(self) -> bool:
        """Return whether training began by subtracting the adapter's initial values from the base's weights."""
        return str(self.init_lora_weights).lower().startswith(CHANGE_BASE)

    @property
    def has_patterns(self) -> bool:
        """Return whether some layers have a separate rank or alpha."""
        return bool(self.rank_pattern or self.alpha_pattern)

    def rank_of(self, layer: str) -> int:
        return _matching(self.rank_pattern, layer, self.r)

    def scale_of(self, layer: str) -> float:
        """Return the scale of a layer's product B A."""
        rank, alpha = self.rank_of(layer), _matching(self.alpha_pattern, layer, self.lora_alpha)
        return alpha / (rank**0.5 if self.use_rslora else rank)

    @property
    def obstacles(self) -> list[str]:
        """Return the names of this adapter's settings that merging does not support."""
        plain = PeftConfig(r=self.r, lora_alpha=self.lora_alpha)
        names = ("peft_type", "bias", "use_dora", "fan_in_fan_out", "modules_to_save")
        return [name for name in names if (getattr(self, name) or None) != (getattr(plain, name) or None)]


def _matching(patterns: Mapping[str, _NumberT] | None, layer: str, otherwise: _NumberT) -> _NumberT:
    """Return the value of the first pattern that matches a layer's full name or its last parts, or `otherwise` if none
    does. peft matches patterns in the same way."""
    found = (value for pattern, value in (patterns or {}).items() if re.match(rf"(.*\.)?({pattern})$", layer))
    return next(found, otherwise)


def of_a_run(folder: Path) -> Path:
    """Return the newest version in a run's folder, or any other folder unchanged."""
    if not folder.is_dir():
        return folder
    found = [(match, path) for path in folder.iterdir() if (match := _VERSION.match(path.name))]
    return max(found, key=lambda each: (int(each[0][1]), int(each[0][2])))[1] if found else folder


def is_adapter(folder: Path) -> bool:
    """Return whether the folder contains an adapter instead of a whole model."""
    return (folder / ADAPTER_FILE).is_file()


def why_no_model(folder: Path) -> str:
    """Return why a trainer's folder is not a model and what to give instead, or "" for any other folder."""
    if (folder / STATE).is_file():
        return (
            f"{folder} is a trainer's checkpoint: only a run in its own hive can start from it, with trainer.resume. "
            "For any other use, write its version as a folder with `bombus export`, and name that"
        )
    if (folder / DELTA_FILE).is_file() and not (folder / FULL_FILE).is_file():
        return f"{folder} has only the changes of a version: {EXPORT}"
    return ""


Fill = Callable[[Path], None]  # fills an empty folder


def merged_model(
    folder: Path, dtype: str, base_named: Callable[[str], Path], made: Callable[[str, Fill], Path]
) -> Path:
    """Return a folder with the base model, into which the adapter in `folder` has been merged.

    `base_named` returns a model's folder by its name. `made` creates a folder once, given its name and a function that
    fills it. The merged model has the dtypes of its base, or float32. Raises `EngineFault` if merging is impossible.
    """
    config = peft_config(folder)
    _check_base(folder)
    base = _base_beside(folder) or _base_named(folder, config, base_named)
    return made(_name(folder, base, dtype), lambda draft: _merge(base, folder, config.scale_of, dtype, draft))


def peft_config(folder: Path) -> PeftConfig:
    """Return the configuration of the adapter in `folder`.

    Raises `EngineFault` if the configuration cannot be read, or if merging does not support its settings.
    """
    try:
        config = msgspec.json.decode((folder / ADAPTER_CONFIG).read_bytes(), type=PeftConfig)
    except (OSError, msgspec.MsgspecError) as error:
        raise EngineFault(f"{folder / ADAPTER_CONFIG} does not describe the adapter next to it: {error}") from error
    ranks = [config.r, *(config.rank_pattern or {}).values()]
    if min(ranks) < 1:
        raise EngineFault(f"{folder / ADAPTER_CONFIG} has r {min(ranks)}, which is not a rank")
    for pattern in [*(config.rank_pattern or {}), *(config.alpha_pattern or {})]:
        _check_pattern(folder, pattern)
    if config.changes_base:
        raise EngineFault(
            f"the adapter in {folder} was trained with init_lora_weights {config.init_lora_weights!r}, which changes "
            "the base, so it does not fit the base as it was published: save it with peft's "
            "path_initial_model_for_weight_conversion, or merge it with peft and name the model's folder"
        )
    if config.obstacles:
        raise EngineFault(
            f"the adapter in {folder} has {', '.join(config.obstacles)} in its configuration, which is not supported "
            "here: merge it with peft, and name the model's folder"
        )
    return config


def _check_pattern(folder: Path, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        why = f"has {pattern!r} as the pattern of a layer's name, which is not a regular expression: {error}"
        raise EngineFault(f"{folder / ADAPTER_CONFIG} {why}") from error


def _check_base(folder: Path) -> None:
    """Raise `EngineFault` if an adapter is its own base, directly or through other adapters. A base may be an adapter
    too."""
    each, seen = folder, set[Path]()
    while is_adapter(each) and _base_beside(each) is None:
        if each.resolve() in seen:
            raise EngineFault(
                f"the adapter in {folder} has itself as its base: give the model that it was trained on as "
                f"base_model_name_or_path in its {ADAPTER_CONFIG}"
            )
        seen.add(each.resolve())
        each = of_a_run(Path(peft_config(each).base_model_name_or_path or ""))


def _base_beside(folder: Path) -> Path | None:
    """Return the base that a trainer has published next to its adapters, or None if there is none."""
    found = sorted(folder.absolute().parent.glob("base-epoch-*"))
    if len(found) > 1:
        raise EngineFault(f"{folder.parent} has {len(found)} base models, so the adapter's is unknown: {EXPORT}")
    return found[0] if found else None


def _base_named(folder: Path, config: PeftConfig, base_named: Callable[[str], Path]) -> Path:
    name = config.base_model_name_or_path
    if not name:
        raise EngineFault(
            f"the adapter in {folder} does not name its base model: set base_model_name_or_path in its {ADAPTER_CONFIG}"
        )
    try:
        return base_named(name)
    except EngineFault as error:
        raise EngineFault(f"the adapter in {folder} is for the model {name}: {error}") from error


def _tensor_files(base: Path) -> list[Path]:
    return sorted(base.glob("*.safetensors"))


def _name(folder: Path, base: Path, dtype: str) -> str:
    """Return a name that depends on the adapter, its base, the precision and all copied files."""
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in _tensor_files(base)]
    read = [file_sha256(folder / name) for name in (ADAPTER_FILE, ADAPTER_CONFIG)]
    texts = [(str(name), file_sha256(source / name)) for source in (base, folder) for name in _texts(source)]
    parts = (read, str(base.resolve()), stats, texts, dtype == "float32")
    return f"lora-{sha256(repr(parts).encode()).hexdigest()[:16]}"


def _merge(base: Path, folder: Path, scale_of: ScaleOf, dtype: str, draft: Path) -> None:
    from bombus.weights.merging import Adapter, merge_each

    files = _tensor_files(base)
    if not files:
        raise EngineFault(f"{base} has no safetensors files to merge the adapter in {folder} into")
    for source in (base, folder):
        _copy_texts(source, draft)
    wanted = "F32" if dtype == "float32" else ""
    if wanted:
        config = msgspec.json.decode((draft / CONFIG).read_bytes(), type=dict[str, object])
        (draft / CONFIG).write_bytes(msgspec.json.encode(config | {"dtype": "float32"}))
    adapter, rounding = Adapter(folder, scale_of), Rounding()

    def tensors(opened: list[TensorFile]) -> Iterator[tuple[str, Bits]]:
        for source in opened:
            yield from merge_each(source, patched(source, ()), adapter, wanted, rounding)
        adapter.check_all_merged()

    with ExitStack() as stack:
        opened = [stack.enter_context(TensorFile(file)) for file in files]
        write_model(draft, [head for source in opened for head in _heads(source, wanted)], tensors(opened))
    lost = f"{100 * rounding.share_lost:.0f} % of the adapter in {folder}"
    if rounding.share_lost > LOST_MAX:
        raise EngineFault(f"{lost} would be rounded away in the precision of its base: set model.dtype to float32")
    log.info("%s is rounded away in the precision of its base, %s", lost, base)


def _heads(source: TensorFile, dtype: str) -> list[TensorHead]:
    owns = {name: source.dtype(name) for name in source.names}
    return [
        TensorHead(name, dtype if dtype and own in FLOATS else own, source.shape(name)) for name, own in owns.items()
    ]


def _texts(source: Path) -> list[Path]:
    """Return the relative paths of the files to copy: text files in the folder and its subfolders.

    The adapter's configuration and tensor indexes are left out. Files may be symlinks, as in the hub's cache, but
    symlinked subfolders are not followed, since they could lead anywhere.
    """
    folders = [source, *(each for each in source.iterdir() if each.is_dir() and not each.is_symlink())]
    return sorted(file.relative_to(source) for folder in folders for file in folder.iterdir() if _is_text(file))


def _is_text(file: Path) -> bool:
    named = file.suffix in (".json", ".jinja", ".model", ".txt") and not file.name.endswith(".index.json")
    return named and file.name != ADAPTER_CONFIG and file.is_file()


def _copy_texts(source: Path, draft: Path) -> None:
    for name in _texts(source):
        (draft / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, draft / name)
