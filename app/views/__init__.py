"""One module per page, and what they share: `shell` (state, sidebar) and `parts` (pieces of a page)."""
