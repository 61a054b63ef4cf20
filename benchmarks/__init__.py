"""Programs that print the README's speed and memory tables; run them from the repository root."""
