"""The pattern language, the sublayer kinds and the named models. This package imports neither torch nor fairseq."""
