"""Pure torch modules, built from sizes and parts instead of configs, without state between calls.

Shapes: B batch, T time, C embed, N heads, D head size, V vocabulary.
"""
