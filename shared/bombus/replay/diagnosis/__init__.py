"""Diagnosis: what is wrong with the learning of a run, found in its events. Pure."""
