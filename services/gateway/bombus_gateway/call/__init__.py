"""Model calls, whatever door they come through: admission, the replica's answer, and the record."""
