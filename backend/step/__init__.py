"""The step program: every token of every request is computed by it, on any rank and any device."""
