"""The torch backend: transformers' models on packed tries, whole on the device of each rank."""
