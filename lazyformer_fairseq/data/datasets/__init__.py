"""Datasets that turn token ids into training samples: packing, masking, streams."""
