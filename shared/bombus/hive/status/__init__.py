"""The status of a hive as data and as text. Pure, like the fold that it is derived from."""
