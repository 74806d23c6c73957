"""The data of a hive: its events, messages and records, and the fold of events. No I/O, no clock, no randomness."""
