"""Training objectives, independent of the trainer that runs them."""
