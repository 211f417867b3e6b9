"""The plain GPT: the model, its attention modules, and its router for experts."""
