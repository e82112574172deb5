"""What the target teaches: prompts, responses, tokens and masks, features, objectives."""
