"""A hive of real processes under requests and messages that are wrong in every way, from one seed."""
