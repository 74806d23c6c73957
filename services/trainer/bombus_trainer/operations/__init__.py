"""Executes training operations on several models with one base, each with an adapter, a gradient and an optimizer."""
