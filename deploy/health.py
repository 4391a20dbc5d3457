"""`python -m deploy.health PORT`: whether /health on this machine's port says that all is well. For the health checks of containers.

Not urllib: it would ask the proxy that the environment names.
"""

from __future__ import annotations

import http.client
import sys

TIMEOUT_SECONDS = 5


def is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_SECONDS)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(not is_healthy(int(sys.argv[1])))
