"""The network that a search trains: every layer is a mixture of candidates."""
