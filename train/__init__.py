"""One training loop for every drafter."""
