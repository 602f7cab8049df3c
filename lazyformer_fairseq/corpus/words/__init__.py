"""From sentences to words, from words to a vocabulary and to ids."""
