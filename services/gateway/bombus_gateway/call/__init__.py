"""Model calls, through whichever API they come: admission, the replica's answer, and the record."""
