"""What a comparison asks of a task: how it trains, what is measured, and how large models are unless told."""
