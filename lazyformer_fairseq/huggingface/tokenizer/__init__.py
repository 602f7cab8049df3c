"""Our tokenizer as one of the ``tokenizers`` library: the same ids, and offsets beside them."""
