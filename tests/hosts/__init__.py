"""A hive on many hosts, which are network namespaces of this machine, under faults of their network and clocks."""
