"""`bombus inference`: one replica of one engine."""

import argparse
from pathlib import Path

from bombus import logs
from bombus.cli import add_hive_arguments, add_torch_arguments
from bombus.config.flags import check_range, made_of_flags
from bombus.host.process import run_service
from bombus_inference.settings import InferenceSettings

MB = 1 << 20
KV_CACHE_MB_MAX = 1 << 22


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_hive_arguments(parser)
    add_torch_arguments(parser)
    parser.add_argument(
        "--backend",
        choices=("torch", "vllm", "openai"),
        default="torch",
        help="torch in this process, vLLM as a child of it, or a server elsewhere (default: %(default)s)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="where it listens (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="of its own; 0: any that is free (default: %(default)s)")
    parser.add_argument(
        "--advertise-url",
        default="",
        metavar="URL",
        help="how gateways reach it, such as http://10.0.0.7:8000 (default: where it listens)",
    )
    parser.add_argument("--replica", default="", metavar="NAME", help="what it is called (default: a new name)")
    parser.add_argument(
        "--cache",
        type=Path,
        metavar="DIR",
        help="a folder for weights that come in parts or as objects (default: a temporary one)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of weights, keys and values (default: the job's; for auto float32 on a CPU, the model's own on a GPU)",
    )
    parser.add_argument(
        "--kv-cache-mb",
        type=int,
        metavar="MB",
        default=0,
        help="memory for keys and values, in MiB; 0: 2048, or what vLLM finds free on its GPUs (default: %(default)s)",
    )
    parser.add_argument(
        "--max-model-len",
        type=int,
        metavar="TOKENS",
        default=0,
        help="the longest sequence, prompt and answer; 0: the job's, as far as the cache goes (default: %(default)s)",
    )
    parser.add_argument(
        "--max-running", type=int, metavar="N", default=128, help="sequences at once (default: %(default)s)"
    )
    vllm = parser.add_argument_group("--backend vllm", "needs `bombus install vllm` once; docs/inference.md says more")
    vllm.add_argument(
        "--vllm-python",
        type=Path,
        metavar="PATH",
        help="a Python with vLLM of your own (default: that of `bombus install vllm`)",
    )
    vllm.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="N", help="GPUs that share the model (default: %(default)s)"
    )
    vllm.add_argument("--vllm-eager", action="store_true", help="no compilation: starts sooner, decodes slower")
    vllm.add_argument(
        "--gpu-memory-utilization",
        type=float,
        metavar="SHARE",
        help="of each GPU's memory, more than 0 and at most 1 (default: vLLM's own)",
    )
    openai = parser.add_argument_group(
        "--backend openai", "a vLLM or SGLang that somebody runs, and that sees the trainer's folder"
    )
    openai.add_argument("--url", default="", help="of the server, such as http://10.0.0.7:8000; it has no default")
    openai.add_argument(
        "--api-key-env", default="", metavar="NAME", help="the variable that holds its key (default: it needs none)"
    )
    openai.add_argument("--model", default="", metavar="NAME", help="its name there (default: the first that it lists)")


def settings_of(arguments: argparse.Namespace) -> InferenceSettings:
    """Raises `Refused(BAD_CONFIG)`."""
    check_range("--kv-cache-mb", arguments.kv_cache_mb, 0, KV_CACHE_MB_MAX)
    given = {
        "hive": arguments.hive,
        "engine": arguments.engine,
        "bus_url": arguments.nats,
        "replica": arguments.replica,
        "advertise_url": arguments.advertise_url,
        "cache": arguments.cache,
        "backend": arguments.backend,
        "compute": {
            "dtype": arguments.dtype,
            "device": arguments.device,
            "threads": arguments.threads,
            "kv_cache_bytes": arguments.kv_cache_mb * MB or None,
            "max_model_len": arguments.max_model_len or None,
            "max_running": arguments.max_running,
        },
        "vllm": {
            "python": arguments.vllm_python,
            "tensor_parallel": arguments.tensor_parallel,
            "eager": arguments.vllm_eager,
            "gpu_memory_utilization": arguments.gpu_memory_utilization,
        },
        "openai": {"url": arguments.url, "api_key_env": arguments.api_key_env, "model": arguments.model},
        "http": {"host": arguments.host, "port": arguments.port},
    }
    return made_of_flags(InferenceSettings, given, {"bus_url": "--nats", "": "--url"})


def run(arguments: argparse.Namespace) -> int:
    settings = settings_of(arguments)
    logs.configure("inference", arguments.log_level, hive=arguments.hive, engine=arguments.engine)
    from bombus_inference import service  # it takes a while to import: not before the arguments are right

    return run_service(service.run(settings))
