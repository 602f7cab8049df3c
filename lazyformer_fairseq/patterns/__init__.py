"""The pattern language, the kinds of sublayers and the named models. This package imports neither torch nor fairseq."""
