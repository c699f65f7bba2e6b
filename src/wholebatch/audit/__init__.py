"""Watch somebody's training loop for a few updates and say whether each is the one its author believes in."""
