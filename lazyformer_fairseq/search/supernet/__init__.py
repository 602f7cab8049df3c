"""The network that is searched: every layer a mixture of candidates."""
