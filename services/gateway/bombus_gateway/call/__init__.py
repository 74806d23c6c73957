"""Model calls from any API: admission, the replica's answer, and the record."""
