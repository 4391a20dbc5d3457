"""`foretoken bench`: measures a running server under requests of real text, with the vocabulary of `vllm bench serve`."""
