"""The text files of a model: its tokenizer, its chat template, and checks of whether a gateway can use them."""
