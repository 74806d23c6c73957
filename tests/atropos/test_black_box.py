"""The black-box tests of Atropos's own repository, run unmodified against a hive.

They are in no package: BOMBUS_ATROPOS_CHECKOUT names a clone of https://github.com/NousResearch/atropos. They look for
a server at port 8000, and start their own only where nobody answers there.
"""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.atropos.run_api import run_api

CHECKOUT = os.environ.get("BOMBUS_ATROPOS_CHECKOUT", "")
TESTS = "atroposlib/tests"
FILES = tuple(f"{TESTS}/test_api_{name}.py" for name in ("compression", "legacy", "messages_handling"))
PASSED = 36
PORT = 8000
LIMIT_S = 300

pytestmark = pytest.mark.skipif(not CHECKOUT, reason="needs BOMBUS_ATROPOS_CHECKOUT, a clone of Atropos's repository")


def test_the_black_box_tests_of_atropos_pass_against_a_hive(tmp_path: Path) -> None:
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", PORT)) != 0, f"something else answers at port {PORT}: end it first"
    with run_api(tmp_path, port=PORT) as hive:
        ours = hive.services("gateway")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", *FILES]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        found = subprocess.run(
            command,
            cwd=CHECKOUT,
            env=inherited | {"PYTHONPATH": CHECKOUT, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert hive.services("gateway") == ours  # it has answered all the while
        assert "engine_running" in httpx.get(f"{hive.url}/").json()
    passed = re.search(r"(\d+) passed", found.stdout)
    assert found.returncode == 0, found.stdout[-4000:]
    assert passed is not None, found.stdout
    assert int(passed[1]) == PASSED
