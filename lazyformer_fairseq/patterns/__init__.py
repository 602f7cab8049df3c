"""The pattern language, the kinds of sublayers and the named models. Imports neither torch nor fairseq."""
