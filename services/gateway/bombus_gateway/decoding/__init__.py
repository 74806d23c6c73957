"""How the JSON bodies of model calls are read, for all dialects."""
