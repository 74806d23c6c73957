"""A hive of real processes that are killed and stopped while clients work; then all guarantees are checked."""
