"""Load tests with Locust."""
