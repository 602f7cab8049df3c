"""Registrations with fairseq, and the parts that keep its trainer safe."""
