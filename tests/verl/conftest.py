"""These tests run only in verl's environment (`make test-verl`)."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("verl") else ["test_*.py"]
