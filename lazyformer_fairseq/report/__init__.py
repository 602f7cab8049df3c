"""Parts that all reports share: tables, numbers with their spread, figures in one style, pages of Markdown and LaTeX."""
