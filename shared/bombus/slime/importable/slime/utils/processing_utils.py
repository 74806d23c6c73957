"""Names of `slime.utils.processing_utils`."""

from bombus.slime.generation import load_tokenizer as load_tokenizer
