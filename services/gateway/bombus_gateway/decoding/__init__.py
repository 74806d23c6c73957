"""Decodes the JSON bodies of model calls, for all dialects."""
