"""`python -m deploy.health PORT...`: whether /health on this machine's port says that all is well. For the health checks of containers.

Of several ports those count that somebody listens on: of 8003 and 8080 the first is a server's, the second a gateway's or that of a server with one.

Not urllib: it would ask the proxy that the environment names.
"""

from __future__ import annotations

import http.client
import sys

TIMEOUT_SECONDS = 5


def status_of(port: int) -> int | None:
    """What /health answers; 0: nothing that is HTTP, or not in time; None: nobody listens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_SECONDS)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    except ConnectionRefusedError:
        return None
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def is_healthy(ports: list[int]) -> bool:
    found = {status_of(port) for port in ports} - {None}
    return found == {200}


if __name__ == "__main__":
    sys.exit(not is_healthy([int(port) for port in sys.argv[1:]]))
