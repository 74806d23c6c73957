"""Programs of ours in namespaces of their own, whoever starts them."""

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from bombus.environments.backends.shell import NAMESPACES, NOBODY
from bombus.tasks.isolation import SETUP, why_no_isolation


def test_an_ordinary_user_has_isolation_too() -> None:
    user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"] if os.getuid() == 0 else []
    if why_no_isolation() or subprocess.run([*user, "unshare", *NAMESPACES, "true"], check=False).returncode:
        pytest.skip("this kernel allows no namespaces")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "root"
        root.mkdir()
        if user:
            for path in (folder, root):
                os.chown(path, NOBODY, NOBODY)
        script = ["/bin/sh", "-c", SETUP.read_text(), "isolation", str(root), os.devnull]
        command = "touch here || echo no; touch /mine 2>/dev/null || echo read-only; ls /bombus"
        ran = subprocess.run([*user, "unshare", *NAMESPACES, *script, command], capture_output=True, text=True)
    assert (ran.stdout, ran.stderr) == ("read-only\nconfig\nhome\nold\n", "")
