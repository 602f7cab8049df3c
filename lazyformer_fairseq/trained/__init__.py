"""A trained model without fairseq: its checkpoint, read safely; its dictionary; what it says of text; its export."""
