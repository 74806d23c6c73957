"""The data of a hive: its events, messages and records, and their fold. Pure: no I/O, no clock, no randomness."""
