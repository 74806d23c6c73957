"""Model calls, whatever API they come by: admission, the replica's answer, and the record."""
