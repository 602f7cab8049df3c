"""Building blocks for reports: tables, numbers with their spread, figures in a common style, and Markdown pages."""
