"""Optimizers and schedules, of plain torch: Adam, LAMB, Muon; warm-up, then decay."""
