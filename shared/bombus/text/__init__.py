"""The text files of a model: its tokenizer, its chat template, and checks that a gateway can use them."""
