"""What ``make demo`` runs: text that is at hand without a network, and the way from it to a table and a picture."""
