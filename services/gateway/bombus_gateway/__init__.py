"""The gateway: the HTTP doors of a hive. Text becomes tokens here; replicas see token ids only."""
