"""One question per file: its search space and its objectives."""
