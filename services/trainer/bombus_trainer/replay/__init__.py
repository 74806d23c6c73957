"""`bombus replay batch` and `train`: steps retrained from the log."""
