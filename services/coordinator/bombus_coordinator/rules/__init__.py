"""The coordinator's pure rules: the decisions that follow from each message and from the passing of time."""
