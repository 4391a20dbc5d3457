"""Prefill and decode apart: nodes that find each other in Redis, a queue of prompts, and pages that are read over NIXL."""
