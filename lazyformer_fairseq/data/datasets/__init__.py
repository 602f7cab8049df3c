"""From ids to training samples: packing, masking, streams."""
