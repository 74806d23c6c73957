"""The torch backend: transformers' models on packed tries, with the whole model on each rank's device."""
