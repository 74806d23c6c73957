"""The coordinator's pure rules: which decisions follow from each message, and which from the passing of time."""
