"""The rules for claims and ends of multi-model episodes, which are one episode on each of several engines."""
