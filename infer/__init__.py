"""The verified decode loop: imports nothing else of draftsmith, so it serves alone."""
