"""One model call, whatever door it came through: admission, the replica's answer, and its record."""
