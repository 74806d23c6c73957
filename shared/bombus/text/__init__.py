"""A model's text files: its tokenizer, its chat template, and checks of whether a gateway can use them."""
