"""The search for faster patterns that start from a trained encoder, which scores single changes and trains nothing."""
