"""Running a server: the launcher, the command line's `serve`, and the demonstration."""
