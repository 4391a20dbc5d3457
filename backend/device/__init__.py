"""Decoding steps whose state lives on the device: captured once, launched ahead of what they emit."""
