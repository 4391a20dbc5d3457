"""What others are told of the supervisor: `/health`, `/live` and `/metrics`."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import prometheus_client

from deploy.supervision.supervisor import Supervisor


def make_metrics(supervisor: Supervisor) -> prometheus_client.CollectorRegistry:
    """Per model: whether it is up and how often it went down; how often the server was started anew."""
    registry = prometheus_client.CollectorRegistry()

    class Collector:
        def collect(self) -> Iterator[prometheus_client.Metric]:
            families = prometheus_client.metrics_core
            up = families.GaugeMetricFamily("foretoken_model_up", "1: the model answers; 0: it is loading or down", labels=["model"])
            restarts = families.CounterMetricFamily("foretoken_model_restarts", "Times a model that was up went down", labels=["model"])
            for state in supervisor.states:
                up.add_metric([state.name], float(state.state == "up"))
                restarts.add_metric([state.name], state.num_restarts)
            yield up
            yield restarts
            limit = float(supervisor.max_server_memory or "inf")
            yield families.GaugeMetricFamily("foretoken_server_memory_bytes", "Memory of tritonserver itself", value=supervisor.server_memory)
            yield families.GaugeMetricFamily("foretoken_server_memory_limit_bytes", "Beyond it the server is drained and restarted", value=limit)
            yield families.CounterMetricFamily("foretoken_server_restarts", "Times the server was started anew", value=supervisor.num_server_restarts)

    registry.register(Collector())  # type: ignore[arg-type]
    return registry


def serve_status(supervisor: Supervisor, host: str, port: int) -> None:
    """`/health` (200 while requests are answered, else 503; JSON), `/live` (200 while this process runs) and `/metrics`, in threads."""
    registry = make_metrics(supervisor)

    class Handler(BaseHTTPRequestHandler):
        timeout = 10.0

        def do_GET(self) -> None:
            kind, status, path = "application/json", 200, self.path.partition("?")[0]
            if path == "/health":
                body = json.dumps(supervisor.describe()).encode()
                status = 200 if supervisor.status == "ready" else 503
            elif path == "/live":
                body = b"{}"
            elif path == "/metrics":
                kind, body = prometheus_client.CONTENT_TYPE_LATEST, prometheus_client.generate_latest(registry)
            else:
                status, body = 404, json.dumps({"error": "known paths: /health, /live, /metrics"}).encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_GET  # of load balancers and `wget --spider`

        def log_message(self, format: str, *args: object) -> None:
            pass

    class StatusServer(ThreadingHTTPServer):
        daemon_threads = True
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        def handle_error(self, request: Any, client_address: Any) -> None:
            if not isinstance(sys.exc_info()[1], ConnectionError):  # a probe that did not wait: no news, and no traceback for each
                super().handle_error(request, client_address)

    server = StatusServer((host, port), Handler)
    threading.Thread(target=server.serve_forever, name="status", daemon=True).start()
