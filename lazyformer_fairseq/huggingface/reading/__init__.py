"""BERT, RoBERTa and their like in a folder of the Hub's format -> options and weights of our model, exactly."""
