"""The pattern language, the kinds of sublayers and the named models. Knows neither torch nor fairseq."""
