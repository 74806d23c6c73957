"""These tests run in verl's environment (`make test-verl`), and only there."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("verl") else ["test_*.py"]
