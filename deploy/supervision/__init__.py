"""Keeps a tritonserver and its models' processes alive.

The server never restarts a Python model's process that died: its streams stay open for ever without a word, while the server goes on
calling itself ready (measured, release 24.10). So each model is asked once a second for a real answer, and what has died or hangs is
brought back:

- `tokenizer`, `mtp_drafter`: loaded again through the server's repository API; running answers go on.
- `decode`: the server is ended and started anew. Every open stream is of this model, and no unloading ends one whose process is gone;
  a closed connection does, at once and for every kind of client.
- what does not run for a moment, stopped or on a busy machine, goes on where it stood: the server alone would give it up after a second, and
  be ended by it.
- what does not come back after `max_restarts` attempts ends this process with status 1, so that whoever runs it can decide.

`processes` finds the models' processes, `patience` has the server wait for them, `probe` asks a model whether it lives, `watch` does so all
the time and brings the model back, `supervisor` has the server's life from start to drain, `status` tells others.
"""
