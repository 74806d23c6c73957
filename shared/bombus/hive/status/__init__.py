"""The status of a hive: what it has, as data and as text. Pure, as the fold is that it is derived from."""
