"""The gateway: the HTTP APIs of a hive. Text becomes tokens here; replicas see token ids only."""
