"""How one model is spread over processes."""
