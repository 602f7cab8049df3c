"""From raw text to ids: normalisation, words, pieces."""
