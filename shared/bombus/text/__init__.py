"""The text files of a model: its tokenizer, its chat template, and whether a gateway can use them."""
