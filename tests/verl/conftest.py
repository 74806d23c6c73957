"""These tests need verl, which lives in an environment of its own: elsewhere they are not collected."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("verl") else ["test_*.py"]
