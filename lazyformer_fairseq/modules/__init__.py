"""Pure torch modules: they receive sizes and parts, never a config, and keep no state between calls.

Shapes: B batch, T time, C embed, N heads, D head size, V vocabulary.
"""
