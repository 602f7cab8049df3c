"""Shared parts of reports: tables, numbers with their spread, figures in one style, pages of Markdown."""
