"""Behind reverse proxies: what an answer says to them, the page below a prefix, and the examples of deploy/proxies where the proxy is installed."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import shutil
import ssl
import subprocess
import threading
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from client import Client, HttpClient, Tls
from client.gateway import cli
from deploy.demo import free_ports
from tests.certificates import Certificates, make_certificates
from tests.pages import fill, open_page, wait_for_answers
from tests.servers import RunningServer, wait_until
from tests.test_gateway import LONG, LOOPS, PROMPT, ask

PREFIX = "/llm"
SHORT = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True}


class _BelowPrefix(BaseHTTPRequestHandler):
    """Hands on what comes below PREFIX, without that, as proxies do, and knows nothing else; by HTTP/1.0, which is nginx's default."""

    behind: str
    """HOST:PORT."""

    def do_GET(self) -> None:
        if not self.path.startswith(PREFIX + "/"):
            self.send_error(404)
            return
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        connection = http.client.HTTPConnection(self.behind, timeout=60)
        kept = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection", "content-length")}
        connection.request(self.command, self.path.removeprefix(PREFIX), body, kept)
        with connection.getresponse() as answer, contextlib.suppress(OSError):
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("connection", "transfer-encoding", "content-length", "date", "server"):
                    self.send_header(name, value)
            self.end_headers()
            while part := answer.read1():
                self.wfile.write(part)
        connection.close()

    do_POST = do_GET

    def log_message(self, *_: object) -> None: ...


@contextlib.contextmanager
def below_prefix(behind: str) -> Iterator[str]:
    """The address, with the prefix, of a proxy before HOST:PORT."""
    handler = type("Handler", (_BelowPrefix,), {"behind": behind})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as proxy:
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{proxy.server_port}{PREFIX}"
        finally:
            proxy.shutdown()
            thread.join()


def test_what_a_stream_says_to_proxies(gateway):
    """Compressed, some hold it back to its end (Caddy's `encode gzip` did); nginx collects it unless it is told."""
    for path, more in (("/v1/completions", {"prompt": "x"}), ("/v1/responses", {"input": "x"})):
        limit = "max_output_tokens" if "input" in more else "max_tokens"
        headers = ask(gateway, path, {**more, limit: 2, "stream": True})[1]
        assert {part.strip() for part in headers["cache-control"].split(",")} == {"no-store", "no-transform"}, path
        assert headers["x-accel-buffering"] == "no" and headers["content-type"].startswith("text/event-stream")


def test_connections_are_kept_for_longer_than_by_proxies():
    """What a proxy sends on one that is closed meanwhile is lost: it may not send it again. Google's keep them for longest."""
    assert cli.KEEP_ALIVE_SECONDS > 600


def test_the_page_below_a_prefix(chromium, bundled_gateway, bundled_server):
    bundled_server.wait_until_ready()
    with below_prefix(bundled_gateway.removeprefix("http://")) as address, open_page(chromium, f"{address}/") as page:
        expect(page.locator("#health")).to_have_text("The server is ready.")
        fill(page, LOOPS, 8)
        page.get_by_role("button", name="Run").click()
        wait_for_answers(page)
        expect(page.locator("#verdict")).to_have_text(re.compile("same text"))
        page.locator("#code summary").click()
        expect(page.locator("#snippet")).to_contain_text(f"curl {address}/v1/completions")
        page.locator("#language").select_option("python")
        expect(page.locator("#snippet")).to_contain_text(f'base_url="{address}/v1"')
        kept = page.evaluate("""async () => {
            const { keep } = await import("./page/kept.js");
            keep({ turns: [] });
            return Object.keys(sessionStorage);
        }""")
        assert kept == [f"foretoken-conversation-1{PREFIX}"], "another gateway's, below another prefix, is another's"


def test_the_http_client_below_a_prefix(servers):
    server = servers.get()
    with below_prefix(server.http) as address:
        assert HttpClient(address).generate(PROMPT, **SHORT)[0].text == HttpClient(server.http).generate(PROMPT, **SHORT)[0].text
        assert HttpClient(f"{address.removeprefix('http://')}/").generate_once(PROMPT, **SHORT)["text_output"]


@pytest.mark.parametrize("url", ["127.0.0.1:x", "http://127.0.0.1:80x/llm"])
def test_an_address_that_is_none(url):
    with pytest.raises(ValueError, match=re.escape(f"url {url!r} is no HOST:PORT")):
        HttpClient(url)


# -- the examples ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def running_proxy(name: str, root: Path, folder: Path, made: Certificates, places: dict[str, str]) -> Iterator[None]:
    """An example as it is, but for addresses and files. places: by what stands there."""
    file = {"nginx": "nginx.conf", "haproxy": "haproxy.cfg", "caddy": "Caddyfile"}[name]
    text = (root / "deploy" / "proxies" / file).read_text()
    both = folder / "both.pem"
    both.write_text(Path(made.server).read_text() + Path(made.server_key).read_text())
    for old, new in {
        **places,
        "/etc/ssl/foretoken-with-key.pem": str(both),
        "/etc/ssl/foretoken-key.pem": made.server_key,
        "/etc/ssl/foretoken.pem": made.server,
    }.items():
        text = text.replace(old, new)
    if name == "nginx":
        kinds = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
        text = f"pid {folder}/pid; daemon off; events {{}} http {{ access_log off; gzip on; gzip_types *; {kinds} {text} }}"
    if name == "caddy":
        text = f"{{\n\tadmin off\n\tauto_https off\n}}\n{text}"
    (folder / file).write_text(text)
    commands = {
        "nginx": ["nginx", "-p", folder, "-e", folder / "error.log", "-c", folder / file],
        "haproxy": ["haproxy", "-f", folder / file],
        "caddy": ["env", f"HOME={folder}", "caddy", "run", "--adapter", "caddyfile", "--config", folder / file],
    }
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(commands[name], stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        process.wait(20)


def read_event(answer: http.client.HTTPResponse) -> None:
    """Returns once the first event of a stream has come, compressed or not: nginx compresses what asks for it not to be."""
    decompress = zlib.decompressobj(31).decompress if answer.getheader("content-encoding") == "gzip" else bytes
    seen = b""
    while b"data: " not in seen:
        part = answer.read1()
        assert part, seen
        seen += decompress(part)


@pytest.mark.parametrize("name", ["nginx", "haproxy", "caddy"])
def test_an_example(name: str, root: Path, servers: Any, gateway: str, tmp_path: Path) -> None:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    server: RunningServer = servers.get()
    server.wait_until_ready()
    made, (web, grpc) = make_certificates(tmp_path), free_ports(2)
    places = {"127.0.0.1:8080": gateway.removeprefix("http://"), "127.0.0.1:8000": server.http, "127.0.0.1:8001": server.grpc}
    places |= {
        "https://localhost:443": f"https://localhost:{web}",
        "listen 443": f"listen 127.0.0.1:{web}",
        "listen 8443": f"listen 127.0.0.1:{grpc}",
    }
    places |= {"bind :443": f"bind 127.0.0.1:{web}", "bind :8443": f"bind 127.0.0.1:{grpc}"}
    context = ssl.create_default_context(cafile=made.ca)

    def status(path: str) -> int:
        with contextlib.closing(http.client.HTTPSConnection("localhost", web, context=context, timeout=30)) as connection:
            try:
                connection.request("GET", path)
                return connection.getresponse().status
            except OSError:
                return 0

    with running_proxy(name, root, tmp_path, made, places):
        assert wait_until(lambda: status("/llm/health") == 200, 60), (tmp_path / "log").read_text()
        assert status("/llm/page/page.js") == 200 and status("/llm") in (301, 308) and status("/triton/v2/health/ready") == 200
        # Parts come while the engine computes, and who hangs up ends it, whether it is streamed or whole.
        for is_streamed in (True, False):
            connection = http.client.HTTPSConnection("localhost", web, context=context, timeout=60)
            with server.cancels(), contextlib.closing(connection):
                body = json.dumps({**LONG, "prompt": PROMPT, "stream": is_streamed})
                connection.request("POST", "/llm/v1/completions", body, {"content-type": "application/json", "accept-encoding": "gzip"})
                if is_streamed:
                    read_event(answer := connection.getresponse())
                    answer.close()
                assert wait_until(lambda: server.metric("foretoken_requests_running") == 1)
        over_http = HttpClient(f"https://localhost:{web}/triton", tls=Tls(made.ca))
        expected = HttpClient(server.http).generate(PROMPT, **SHORT)[0].text
        assert over_http.generate(PROMPT, **SHORT)[0].text == expected
        with server.cancels():
            stream = over_http.stream(PROMPT, **LONG)
            assert next(iter(stream)).token_ids
            stream.close()  # type: ignore[attr-defined]
        if name != "caddy":
            with Client(f"grpcs://localhost:{grpc}", tls=Tls(made.ca)) as client:
                assert client.generate(PROMPT, **SHORT)[0].text == expected
