"""The gateway: the HTTP APIs of a hive. It turns text into tokens; replicas see only token ids."""
