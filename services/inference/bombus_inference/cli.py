"""`bombus inference`: one replica of one engine."""

import argparse
import sys
from pathlib import Path

from pydantic import ValidationError

from bombus import logs
from bombus.cli import add_hive_arguments, add_torch_arguments
from bombus.process import run_service
from bombus_inference.settings import EngineSettings, InferenceSettings, OpenAISettings, ServerSettings, VllmSettings

MB = 1 << 20


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
    parser.add_argument("--port", type=int, default=0, help="0: any that is free (default: %(default)s)")
    parser.add_argument("--advertise-url", default="", help="how gateways reach it, when that is another address")
    parser.add_argument("--replica", default="", help="its name; made up when not given")
    parser.add_argument(
        "--cache",
        type=Path,
        metavar="DIR",
        help="for weights that come in parts or as objects (default: a temporary one)",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--kv-cache-mb", type=int, default=2048, help="memory for keys and values (%(default)s)")
    parser.add_argument("--max-model-len", type=int, default=8192, help="tokens of a sequence (%(default)s)")
    parser.add_argument("--max-running", type=int, default=128, help="sequences at once (default: %(default)s)")
    vllm = parser.add_argument_group("--backend vllm", "needs `bombus install vllm` once; docs/inference.md says more")
    vllm.add_argument("--vllm-python", type=Path, metavar="PATH", help="an interpreter with vLLM of your own instead")
    vllm.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="GPUs that share it (%(default)s)")
    vllm.add_argument("--vllm-eager", action="store_true", help="no compilation: starts sooner, decodes slower")
    openai = parser.add_argument_group(
        "--backend openai", "a vLLM or SGLang that somebody runs, and that sees the trainer's folder"
    )
    openai.add_argument("--url", default="", help="of the server, such as http://10.0.0.7:8000")
    openai.add_argument("--api-key-env", default="", metavar="NAME", help="the variable that holds its key")
    openai.add_argument("--model", default="", help="its name there (default: the first that it lists)")


def run(arguments: argparse.Namespace) -> int:
    try:
        settings = InferenceSettings(
            hive=arguments.hive,
            engine=arguments.engine,
            bus_url=arguments.nats,
            replica=arguments.replica,
            advertise_url=arguments.advertise_url,
            cache=arguments.cache,
            backend=arguments.backend,
            compute=EngineSettings(
                dtype=arguments.dtype,
                device=arguments.device,
                threads=arguments.threads,
                kv_cache_bytes=arguments.kv_cache_mb * MB,
                max_model_len=arguments.max_model_len,
                max_running=arguments.max_running,
            ),
            vllm=VllmSettings(
                python=arguments.vllm_python, tensor_parallel=arguments.tensor_parallel, eager=arguments.vllm_eager
            ),
            openai=OpenAISettings(url=arguments.url, api_key_env=arguments.api_key_env, model=arguments.model),
            http=ServerSettings(host=arguments.host, port=arguments.port),
        )
    except ValidationError as error:
        print(f"bombus inference: {error}", file=sys.stderr)
        return 2
    logs.configure("inference", arguments.log_level, hive=arguments.hive, engine=arguments.engine)
    from bombus_inference import service  # it takes a while to import: not before the arguments are right

    return run_service(service.run(settings))
