"""The building blocks of reports: tables, numbers with their spread, figures in one style, and Markdown pages."""
