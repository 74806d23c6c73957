"""The debugger: reads a hive's log, wherever it is kept, and shows what happened. It writes nothing to any hive."""
