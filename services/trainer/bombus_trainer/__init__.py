"""The torch trainer: batches from the log in, optimizer steps and weights out."""
