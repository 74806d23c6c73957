"""The debugger: reads a hive's log, wherever it lies, and shows what happened in it. Writes nothing to any hive."""
