"""Patterns side by side on a diagnostic, self-pretrained first and from scratch."""
