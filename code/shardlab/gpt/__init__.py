"""The plain GPT: its model, how its tokens attend, and who of its experts gets a token."""
