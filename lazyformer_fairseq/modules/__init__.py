"""Pure torch modules, which are built from sizes and parts instead of configs and keep no state between calls.

Shapes: B batch, T time, C embed, N heads, D head size, V vocabulary.
"""
