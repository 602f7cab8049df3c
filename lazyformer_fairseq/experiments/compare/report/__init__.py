"""What a comparison found, from its results.json alone: times to a target, fronts, tables, pictures."""

BASELINE = "baseline"  # the target that is where the baseline ended
