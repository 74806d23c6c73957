"""What a loss is computed of, and what it gives: forward and forward_backward in both dialects."""
