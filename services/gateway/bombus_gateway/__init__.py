"""The gateway: the HTTP APIs of a hive. It turns text into tokens, so that replicas see only token ids."""
