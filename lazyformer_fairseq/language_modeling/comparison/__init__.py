"""Models that differ in their pattern alone, side by side."""
