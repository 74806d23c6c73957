"""A hive of real processes that are killed and stopped at random while clients work; then all guarantees are checked."""
