"""Tests of the door of scored groups, on a real bus."""
