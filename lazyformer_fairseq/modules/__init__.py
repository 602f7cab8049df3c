"""Pure torch modules, which receive sizes and parts but never a config, and keep no state between calls.

Shapes: B batch, T time, C embed, N heads, D head size, V vocabulary.
"""
