"""The front door: one thin file per verb."""
