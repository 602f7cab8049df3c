"""The exported model, in parts that need torch and transformers alone.

``huggingface/export/merge.py`` makes one file of them, with the sublayers and kinds of attention that a pattern has.
So parts import nothing else of this package, each other by ``from .part import name``, and their names differ.
"""
