"""`bombus replay batch` and `train`: steps made again from the log."""
