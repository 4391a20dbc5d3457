"""A long storm on a real server and its gateway: `python -m tests.soak`, or `make soak`. Not collected by pytest.

Clients of every kind ask valid things with known answers and all sorts of nonsense, hang up, cancel, read slowly or not at all; in the
second half processes are killed, stopped and told to end meanwhile. Asserted: a valid answer is always the same; every request is answered or its
connection closed within 30 s; nothing fails while nothing is disturbed; a disturbance is over within a minute; pages and memory come back;
nothing is left at the end.

`questions` has the valid requests and their answers, `nonsense` the others; `grpc_clients` and `http_clients` are who sends them, and `storm` lets
them loose; `disturbances` kills and stops, `system` is what is tested, `checks` looks at it in quiet, and `book` counts and judges.

Each exchange has a name, WORKER/NUMBER, and is made from it and the seed alone: `--seed S --repeat WORKER/NUMBER` does it once more.
"""
