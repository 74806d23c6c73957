"""Task folders in Harbor's format, for `bombus rollout`: read, played in a sandbox, and judged by their own tests."""
