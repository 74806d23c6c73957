"""The images that `make images` built, run without a container engine: `make test-deploy`."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

from bombus import Credentials, Job, SwarmClient, Task, WorkflowOutput
from bombus.config.streams import PAYLOAD_BYTES
from bombus.machine.process import free_port
from tests.deploy.dockerfile import ROOT, TARGETS, health_url
from tests.deploy.rooms import UID, Image, Images, Service
from tests.patience import wait_until

FOLDER = os.environ.get("BOMBUS_IMAGES", "")
pytestmark = pytest.mark.skipif(not FOLDER, reason="`make test-deploy` builds images")
ABOVE_BASE_BYTES = {"coordinator": 150_000_000, "gateway": 150_000_000}
# The services of a hive, with arguments that end with a port.
KINDS = {
    "coordinator": ["--metrics-port"],
    "trainer": ["--weights-by", "objects", "--threads", "1", "--metrics-port"],
    "inference": ["--threads", "1", "--port"],
    "gateway": ["--port"],
}
LENGTHS = {
    "max_prompt_length": 256,
    "max_response_length": 200,
    "max_response_length_in_one_turn": 64,
    "max_model_len": 512,
}


@pytest.fixture(scope="module")
def images() -> Images:
    return Images(Path(FOLDER).absolute())


@pytest.fixture(scope="module")
def mounted(images: Images) -> Iterator[dict[str, Image]]:
    with ExitStack() as stack:
        yield {target: stack.enter_context(images.mounted(target)) for target in TARGETS}


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_has_no_build_tools_and_torch_only_where_it_is_used(mounted: dict[str, Image], target: str) -> None:
    root = mounted[target].root
    folders = [root / folder for folder in ("usr/bin", "usr/local/bin", "opt/bombus/bin")]
    names = [path.name for folder in folders for path in folder.iterdir()]
    assert not [name for name in names if re.fullmatch(r"pip[\d.]*|uv|gcc.*|cc|g\+\+.*|make|ld|git", name)]
    (packages,) = (root / "opt/bombus/lib").glob("python3*/site-packages")
    assert not (packages / "pip").exists()
    assert (packages / "torch").exists() == (target in ("trainer", "inference", "all"))
    assert [*packages.glob("bombus/__pycache__/cli.*.pyc")], "it cannot be compiled later"
    left = ("src", "build", "run/secrets/registries", "run/secrets/ca", "etc/pip.conf", "opt/bombus/pip.conf")
    assert not [name for name in left if (root / name).exists()]


@pytest.mark.parametrize("target", TARGETS)
def test_the_bill_of_materials_names_every_package(mounted: dict[str, Image], target: str) -> None:
    root = mounted[target].root
    bill = json.loads((root / "opt/bombus/sbom.json").read_text())
    purls = [part["purl"] for part in bill["components"]]
    (packages,) = (root / "opt/bombus/lib").glob("python3*/site-packages")
    assert len([*packages.glob("*.dist-info")]) == sum(purl.startswith("pkg:pypi/") for purl in purls)
    debian = re.findall(r"^Package: (.*)$", (root / "var/lib/dpkg/status").read_text(), re.MULTILINE)
    assert {f"pkg:deb/debian/{name}" for name in debian} == {
        purl.partition("@")[0] for purl in purls if purl.startswith("pkg:deb/")
    }


@pytest.mark.parametrize("target", ["coordinator", "gateway", "environment"])
def test_every_extension_module_can_be_loaded_after_it_was_stripped(
    mounted: dict[str, Image], target: str, tmp_path: Path
) -> None:
    load = "import ctypes, pathlib, sys; [ctypes.CDLL(str(path)) for path in pathlib.Path(sys.prefix).rglob('*.so')]"
    os.chown(tmp_path, UID, UID)
    done = mounted[target].run(tmp_path, "python", "-c", load)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("target", ABOVE_BASE_BYTES)
def test_a_service_without_a_model_is_small(images: Images, target: str) -> None:
    above = images.size(f"localhost/bombus-{target}") - images.size("localhost/debian:bookworm")
    assert above <= ABOVE_BASE_BYTES[target]


def test_an_image_can_write_only_to_its_data_and_to_tmp(mounted: dict[str, Image], tmp_path: Path) -> None:
    os.chown(tmp_path, UID, UID)
    write = "import sys; open(sys.argv[1], 'w').write('x')"
    for place, code in (("/data/x", 0), ("/tmp/x", 0), ("/opt/bombus/x", 1), ("/etc/x", 1), ("/x", 1)):
        assert mounted["gateway"].run(tmp_path, "python", "-c", write, place).returncode == code, place


def test_the_environment_server_serves_a_class_in_its_folder(mounted: dict[str, Image], tmp_path: Path) -> None:
    port, data = free_port(), tmp_path / "data"
    data.mkdir()
    shutil.copy(ROOT / "examples/guess_number.py", data)
    words = ["env", "serve", "guess_number:GuessNumber", "--port", str(port)]
    server = Service(mounted["environment"], data, *words)
    try:
        server.until_healthy(f"http://127.0.0.1:{port}/health")
    finally:
        assert server.stop() == 0, server.log.read_text()


@pytest.fixture
def hive(mounted: dict[str, Image], tmp_path: Path) -> Iterator[tuple[dict[str, Service], str]]:
    """Yield the services of a hive, each from its own image and with its own folder, and the gateway's URL."""
    ports = {name: str(free_port()) for name in ("nats", *KINDS)}
    started: dict[str, Service] = {}
    with ExitStack() as running:

        def start(name: str, image: Image, *words: str, entry: str = "") -> None:
            variables = [f"BOMBUS_NATS=nats://127.0.0.1:{ports['nats']}"]
            started[name] = Service(image, tmp_path / name, *words, variables=variables, entry=entry)
            running.callback(started[name].kill)

        (tmp_path / "nats").mkdir()
        (tmp_path / "nats/nats.conf").write_text(f"max_payload: {PAYLOAD_BYTES}\njetstream {{store_dir: /data}}\n")
        listening = ["--config", "/data/nats.conf", "--addr", "127.0.0.1", "--port", ports["nats"]]
        start("nats", mounted["all"], *listening, entry="tini -- nats-server")
        for kind, words in KINDS.items():
            start(kind, mounted[kind], kind, *words, ports[kind])
        for kind in KINDS:
            path = urlsplit(health_url(kind)).path
            started[kind].until_healthy(f"http://127.0.0.1:{ports[kind]}{path}")
        yield started, f"http://127.0.0.1:{ports['gateway']}"


def test_a_hive_of_images_trains_a_model_and_each_service_ends_cleanly_when_its_container_is_stopped(
    hive: tuple[dict[str, Service], str],
) -> None:
    services, url = hive
    with SwarmClient(url) as client:
        job = Job(model="tiny", batch_size=2, num_repeat=4, lr=1e-3, bombus={"rollout": LENGTHS})
        client.auto_sync_train_config_and_start_engine(job)
        tasks = [Task(task_id="a", main_query="a="), Task(task_id="b", main_query="b=")]

        def agent(task: Task, credentials: Credentials) -> WorkflowOutput:
            model = OpenAI(base_url=credentials.base_url, api_key=credentials.api_key)
            question: ChatCompletionMessageParam = {"role": "user", "content": task.main_query}
            reply = model.chat.completions.create(model="any", messages=[question], max_tokens=4)
            return WorkflowOutput(reward=float((reply.choices[0].message.content or "").count(task.task_id)))

        for _ in range(2):
            client.run_episodes_until_all_complete(tasks, lambda task: client.run_group(task, agent, 4))
        wait_until(lambda: client.get_global_step() == 2, 120)
    for name, service in services.items():
        inside = [service.first, *service.first.children(recursive=True)]
        assert all(process.uids().real == UID for process in inside), f"{name} is not root"
        assert service.first.name() == "tini"
    for name, service in reversed(services.items()):
        code = service.stop()
        assert code == 0 or name == "nats", (name, code, service.log.read_text())
