"""What a hive is: its events, messages and records, and the fold of them. Pure: no I/O, no clock, no randomness."""
