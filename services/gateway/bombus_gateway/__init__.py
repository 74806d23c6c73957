"""The gateway: every front door of a hive. It owns text; the engines behind it only see token ids."""
