"""Several servers behind one gateway: who takes what, and what a client sees when one of them is held, drained or killed."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from client import Chunk, GenerateError
from client.gateway import fleet, upstream
from client.gateway.beginnings import Beginnings, cut
from client.gateway.errors import from_server
from client.gateway.fleet import Fleet, Member, find_addresses, is_fleet, split_addresses
from client.gateway.metrics import Metrics
from client.gateway.upstream import Corpus, Upstream
from deploy.cli import main
from deploy.demo import running_gateway
from tests.servers import RunningServer, serve, wait_until
from tests.test_gateway import LONG, PROMPT, ask, send_request

OPTIONS = ('--speculative-config={"method": "none"}', "--drain-seconds=20", "--max-batch-size=8")
LONG_HEAD = "You are a helpful assistant. " * 40


# -- who takes what -------------------------------------------------------------------------------------------------------------


def make_fleet(*loads: int) -> Fleet:
    found = Fleet([], "decode", Metrics())
    for number, load in enumerate(loads):
        found._members[f"s{number}"] = Member(f"s{number}", None, num_open=load)  # type: ignore[arg-type]
    return found


def chosen(servers: Fleet, prompts: list[str]) -> Counter[str]:
    return Counter(member.url for prompt in prompts if (member := servers.choose({"text_input": prompt}, set())) is not None)


def test_equal_beginnings_go_to_one_server_while_it_has_room() -> None:
    servers, head = make_fleet(0, 0, 0), LONG_HEAD
    (own,) = chosen(servers, [f"{head}{i}" for i in range(20)])
    assert len(chosen(servers, [f"{i} {head}" for i in range(60)])) == 3, "other beginnings have other servers"
    for member in servers.members:
        member.num_open = 6
    assert set(chosen(servers, [head] * 20)) == {own}, "as full as the others"
    for member in servers.members:
        member.num_open = 6 if member.url == own else 0
    (other,) = chosen(servers, [head] * 20)
    assert other != own, "it is full beside the others; and the one that took its place keeps it"
    servers._members[own].num_open = 0
    servers._members[other].note({"num_running": 4, "num_waiting": 3}, 0)
    assert other not in chosen(servers, [head] * 20), "with other gateways' requests"


def test_what_a_server_told_of_requests_that_have_ended_since_does_not_count() -> None:
    (member,) = make_fleet(6).members
    member.note({"num_running": 5, "num_waiting": 3}, 6)
    assert member.load == 8
    member.num_open = 0
    assert member.load == 2, "others'"
    member.num_open = 3
    member.note({"num_running": 2}, 1)
    assert member.load == 3, "begun while it was asked"


def test_a_server_that_was_held_has_its_beginnings_and_one_that_was_started_anew_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class Told:
        answers: list[dict[str, object] | Exception] = [{"process": "a"}, GenerateError("held", "TIMEOUT"), {"process": "a"}, {"process": "b"}]

        async def describe(self, limit: float) -> dict[str, object]:
            if isinstance(answer := self.answers.pop(0), Exception):
                raise answer
            return answer

    monkeypatch.setattr(fleet, "PAUSE_SECONDS", 0)
    servers = make_fleet(0, 0)
    (own,) = chosen(servers, [LONG_HEAD])
    member = servers._members[own]
    member.upstream = Told()  # type: ignore[assignment]
    member.description = {"process": "a"}
    known: list[list[str]] = []
    monkeypatch.setattr(servers, "_set_up", lambda *_: known.append(servers._beginnings.find(cut({"text_input": LONG_HEAD}), [own])))
    with pytest.raises(IndexError):
        asyncio.run(servers._keep_asking(member))
    assert known == [[own], [own], [own], []]


def test_a_gateway_that_stood_still_blames_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """It left out all of them at once: their answers had come, and were not read yet."""

    class Prompt:
        async def describe(self, limit: float) -> dict[str, object]:
            time.sleep(10 * limit)
            for _ in range(9):
                await asyncio.sleep(0)
            return {"process": "a"}

    monkeypatch.setattr(fleet, "PROBE_SECONDS", 0.001)
    servers = make_fleet(0)
    (member,) = servers.members
    member.upstream = Prompt()  # type: ignore[assignment]

    def tell(member: Member, is_up: bool, reason: str = "") -> None:
        raise EOFError(is_up)

    monkeypatch.setattr(servers, "_set_up", tell)
    with pytest.raises(EOFError, match="True"):
        asyncio.run(servers._keep_asking(member))


@pytest.mark.parametrize("is_held", [True, False], ids=["the gateway", "the server"])
def test_whose_silence_it_is(monkeypatch: pytest.MonkeyPatch, is_held: bool) -> None:
    """Of /health, while nothing comes for longer than it waits."""

    async def check() -> None:
        own = Upstream("127.0.0.1:1", "decode")

        async def stream(*_: object, **__: object) -> AsyncGenerator[Chunk, None]:
            if is_held:
                for _ in range(5):
                    time.sleep(0.3)
                    await asyncio.sleep(0)
            else:
                await asyncio.sleep(60)
            yield Chunk(token_ids=[5])

        monkeypatch.setattr(own._client, "stream", stream)
        await own.check()
        await own.close()

    monkeypatch.setattr(upstream, "PROBE_SECONDS", 1.0)
    if is_held:
        asyncio.run(check())
    else:
        with pytest.raises(GenerateError, match="no token within 1 s"):
            asyncio.run(check())


def test_others_go_to_the_less_loaded_of_two() -> None:
    found = chosen(make_fleet(9, 0, 0), ["x"] * 60)
    assert "s0" not in found and len(found) == 2


def test_those_that_are_left_out_come_last() -> None:
    servers = make_fleet(0, 0, 0)
    tried: set[Member] = set()
    servers._members["s1"].is_up = servers._members["s2"].is_up = False
    order = []
    while (member := servers.choose({"text_input": "x"}, tried)) is not None:
        tried.add(member)
        order.append(member.url)
    assert order[0] == "s0" and sorted(order) == ["s0", "s1", "s2"]


def test_what_is_asked_of_another_is_counted() -> None:
    class Loser:
        async def stream(self, request_id: str, parameters: dict[str, object]) -> AsyncGenerator[Chunk, None]:
            raise GenerateError("down", "UNAVAILABLE")
            yield

    async def ask_all(servers: Fleet) -> None:
        async for _ in servers.stream("r", {"text_input": "x"}):
            pass

    for count in (1, 3):
        servers = make_fleet(*[0] * count)
        for member in servers.members:
            member.upstream = Loser()  # type: ignore[assignment]
        with pytest.raises(GenerateError, match="down"):
            asyncio.run(ask_all(servers))
        assert f"foretoken_gateway_retries_total {count - 1}.0" in servers._metrics.render().decode()


def test_a_corpus_is_for_all_of_them() -> None:
    class Taker:
        def __init__(self, count: int | GenerateError) -> None:
            self.count = count

        async def add_suffix_corpus(self, request_id: str, corpus: Corpus) -> dict[str, int]:
            if isinstance(self.count, GenerateError):
                raise self.count
            self.count += len(corpus)
            return {"num_all_tokens": self.count}

    servers = make_fleet(0, 0, 0)
    takers = [Taker(4), Taker(9), Taker(0)]
    for member, taker in zip(servers.members, takers):
        member.upstream = taker  # type: ignore[assignment]
    assert asyncio.run(servers.add_suffix_corpus("r", ["a", [1]])) == {"num_all_tokens": 11}, "of the fullest"
    assert [taker.count for taker in takers] == [6, 11, 2]
    takers[1].count = GenerateError("request 'r': it is full", "INVALID_ARG")
    with pytest.raises(GenerateError, match=r"s1: request 'r': it is full \(2 of 3 servers took it\)") as caught:
        asyncio.run(servers.add_suffix_corpus("r", ["a"]))
    assert caught.value.code == "INVALID_ARG"
    with pytest.raises(GenerateError, match="no server is known"):
        asyncio.run(make_fleet().add_suffix_corpus("r", ["a"]))


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ("failed to connect to all addresses; last error: UNKNOWN: ipv4:10.1.2.3:8001: Connection refused", "failed to connect to all addresses"),
        ("errors resolving inner-7:8001: [field:hostname lookup error]", "the server's name has no address"),
        ("ipv6:%5B::1%5D:8001: recvmsg: Connection reset by peer", "the server: recvmsg: Connection reset by peer"),
    ],
)
def test_where_a_server_is_is_not_told(told: str, said: str) -> None:
    error = from_server(GenerateError(f"request 'r': {told}", "UNAVAILABLE"))
    assert (error.status_code, error.message) == (503, f"request 'r': {said}")


def test_beginnings_are_cut_into_pieces() -> None:
    text = "é" * 300
    assert cut({"text_input": "x" * 127}) == [] == cut({"input_ids": [1] * 31}) == cut({"messages": [{"role": "user", "content": "x"}]})
    assert len(cut({"text_input": text})) == 2 and cut({"text_input": text + "y"}) == cut({"text_input": text}) != cut({"text_input": "y" + text})
    assert cut({"input_ids": [1] * 64})[0] == cut({"input_ids": [1] * 32 + [2] * 32})[0]
    said = [{"role": "system", "content": "x" * 300}]
    assert cut({"messages": [*said, {"role": "user", "content": "y" * 200}]})[:2] == cut({"messages": said})
    tools = [{"type": "function", "function": {"name": "f"}}]
    offered, others = (cut({"messages": said, "tools": own}) for own in (tools, tools * 2))
    assert len(offered) == 3 and len(cut({"messages": [], "tools": tools})) == 1 and not {*offered} & {*others, *cut({"messages": said})}
    assert cut({"messages": [{"role": "user", "content": "x"}], "tools": tools}) == offered[:1], "other conversations with the same tools"
    called = [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": own * 200}}]} for own in "ab"]
    assert cut({"messages": called[:1]}) != cut({"messages": called[1:]})
    assert len(cut({"text_input": "x" * 10**6})) == len(cut({"input_ids": [1] * 10**5})) == 64


def test_the_longest_beginning_decides() -> None:
    known = Beginnings(max_known=4)
    known.note([b"a", b"b"], "s0")
    known.note([b"a"], "s1")
    assert known.find([b"a", b"b", b"c"], {"s0", "s1"}) == ["s0"] and known.find([b"a", b"c"], {"s0", "s1"}) == ["s1", "s0"]
    assert known.find([b"a", b"b"], {"s1"}) == ["s1"] and known.find([b"c"], {"s0", "s1"}) == [] == known.find([], {"s0"})
    known.forget("s0")
    assert known.find([b"a", b"b"], {"s0", "s1"}) == ["s1"]
    known.note([b"d", b"e", b"f", b"g"], "s2")
    assert known.find([b"a"], {"s1"}) == [], "what was used longest ago is forgotten"


def test_addresses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert split_addresses("a:1, 10.0.0.1:2,[::1]:3,grpcs://a:1") == ["a:1", "10.0.0.1:2", "[::1]:3", "grpcs://a:1"]
    for bad in ("a", "a:", ":1", "a:0", "a:70000", "http://a:1", "grpcs://a", "grpcs://a:1/x", "a:1,", "a:1,a:1", "a..b:1", f"{'a' * 64}:1"):
        with pytest.raises(ValueError):
            split_addresses(bad)
    assert main(["gateway", "--upstream", "a:1,b"]) == 2 and "--upstream a:1,b: 'b' is no HOST:PORT" in capsys.readouterr().err
    assert [is_fleet(a) for a in ("127.0.0.1:1", "[::1]:1", "localhost:1", "a:1,b:1", "servers:1")] == [False] * 3 + [True] * 2
    assert [is_fleet(a) for a in ("grpcs://127.0.0.1:1", "grpcs://localhost:1", "grpcs://servers:1")] == [False, False, True]

    def resolve(host: str, port: int, *_: object, **__: object) -> list:
        if host == "nobody":
            raise socket.gaierror("unknown")
        return [(socket.AF_INET, 0, 0, "", ("10.0.0.1", port)), (socket.AF_INET, 0, 0, "", ("10.0.0.2", port)),
                (socket.AF_INET6, 0, 0, "", ("fd00::1", port, 0, 0))]  # fmt: skip

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert asyncio.run(find_addresses("servers:8001")) == ["10.0.0.1:8001", "10.0.0.2:8001", "[fd00::1]:8001"]
    assert asyncio.run(find_addresses("grpcs://servers:1")) == ["grpcs://10.0.0.1:1", "grpcs://10.0.0.2:1", "grpcs://[fd00::1]:1"]
    assert asyncio.run(find_addresses("nobody:8001")) == [] and asyncio.run(find_addresses("10.0.0.9:1")) == ["10.0.0.9:1"]


def test_addresses_that_a_name_gets_and_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"servers:1": ["127.0.0.1:1", "127.0.0.1:2"]}

    async def find(address: str) -> list[str]:
        return names[address]

    async def follow() -> None:
        servers = Fleet(["servers:1"], "decode", Metrics())
        await servers.start()
        assert [m.url for m in servers.members] == ["127.0.0.1:1", "127.0.0.1:2"]
        names["servers:1"] = ["127.0.0.1:2", "127.0.0.1:3"]
        servers._members["127.0.0.1:1"].num_open = 1
        await servers._resolve()
        assert [m.url for m in servers.members] == ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"], "its requests go on"
        servers._members["127.0.0.1:1"].num_open = 0
        await servers._resolve()
        assert [m.url for m in servers.members] == ["127.0.0.1:2", "127.0.0.1:3"]
        await servers.close()

    monkeypatch.setattr(fleet, "find_addresses", find)
    asyncio.run(follow())


# -- three servers --------------------------------------------------------------------------------------------------------------


class Three:
    """Servers, and a gateway before them."""

    def __init__(self, servers: list[RunningServer], address: str, log: Path) -> None:
        self.servers, self.address, self._log = servers, address, log

    @property
    def num_left_out(self) -> int:
        """Times that the gateway left a server out."""
        return self._log.read_text().count("is left out")

    def is_up(self, server: RunningServer) -> bool:
        text = ask(self.address, "/metrics")[2].decode()
        found = re.search(rf'^foretoken_gateway_server_up{{server="{re.escape(server.grpc)}"}} (\S+)$', text, re.M)
        return found is not None and float(found[1]) == 1

    def undisturbed(self, look: Callable[[], bool]) -> bool:
        """What it finds while no server is left out, which one is that a busy machine lets stand still."""
        for _ in range(5):
            assert wait_until(lambda: all(map(self.is_up, self.servers)))
            num_left_out, found = self.num_left_out, look()
            if self.num_left_out == num_left_out:
                break
        return found

    def finished(self) -> list[float]:
        return [server.metric("foretoken_requests_finished_total") for server in self.servers]

    def share(self, prompts: list[str], among: slice = slice(None)) -> list[float]:
        """How many of these requests each server answered."""
        before = self.finished()[among]
        assert self.ask_all(prompts) == [200] * len(prompts)
        counts = lambda: [after - b for after, b in zip(self.finished()[among], before)]  # noqa: E731
        assert wait_until(lambda: sum(counts()) >= len(prompts)), counts()  # they come a little later, probes and requests of before among them
        return counts()

    def ask_all(self, prompts: list[str], **values: object) -> list[int]:
        """The statuses of as many requests at once."""

        def one(prompt: str) -> int:
            return ask(self.address, "/v1/completions", {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **values})[0]

        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(one, prompts))

    def hold_open(self, server: RunningServer, count: int = 1, max_tokens: int = 200) -> list[socket.socket]:
        """Streams that this server has begun to answer. What another one takes is closed at once: it would slow down those that are tried next."""
        alive = [own for own in self.servers if own.process.poll() is None]
        admitted = lambda: [own.metric("foretoken_prompt_tokens_total") for own in alive]  # noqa: E731
        mine: list[socket.socket] = []
        takers: list[RunningServer] = []
        for number in itertools.count():
            if len(takers) != 1:  # a server tells its counts late, those of requests that were asked again elsewhere among them
                for own in alive:
                    own.settle("foretoken_prompt_tokens")
            before = admitted()
            stream = send_request(self.address, {**LONG, "prompt": f"{number} = ", "stream": True, "max_tokens": max_tokens})
            data = b""
            while b"data: " not in data:
                data += (more := stream.recv(4096))
                assert more
            assert wait_until(lambda: admitted() != before, 30)  # noqa: B023
            takers = [own for own, tokens, known in zip(alive, admitted(), before) if tokens > known]
            if takers == [server]:
                mine.append(stream)
            else:
                stream.close()
            if len(mine) == count:
                break
        return mine


def read_rest(stream: socket.socket) -> bytes:
    with stream:
        return b"".join(iter(lambda: stream.recv(65536), b""))


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Three]:
    folder = tmp_path_factory.mktemp("three")
    with ExitStack() as stack, ThreadPoolExecutor(3) as pool:
        contexts = [serve(folder / str(i) / "log", *OPTIONS) for i in range(3)]
        servers = list(pool.map(lambda context: context.__enter__(), contexts))
        for context in contexts:
            stack.push(context.__exit__)
        address, _ = stack.enter_context(running_gateway(folder / "gateway", ",".join(s.grpc for s in servers)))
        found = Three(servers, address, folder / "gateway")
        assert wait_until(lambda: all(found.is_up(server) for server in servers), 30)
        yield found


def test_all_share_the_work(three: Three) -> None:
    assert three.undisturbed(lambda: min(three.share([f"x{i} = " for i in range(18)])) > 0)
    numbers = itertools.count()

    def goes_to_one() -> bool:
        before, head = three.finished(), f"{next(numbers)} {PROMPT * 8}"
        for i in range(6):
            assert three.ask_all([f"{head}{i}"]) == [200]
        most = lambda: max(after - b for after, b in zip(three.finished(), before))  # noqa: E731
        return wait_until(lambda: most() >= 6, 10)

    assert three.undisturbed(goes_to_one), "a beginning has its server"
    assert json.loads(ask(three.address, "/v1/models/foretoken")[2])["max_model_len"] == 2048
    assert json.loads(ask(three.address, "/tokenize", {"prompt": "x"})[2])["count"] > 0 and ask(three.address, "/health")[0] == 200


def test_one_that_is_held_is_left_out_and_comes_back(three: Three) -> None:
    held = three.servers[0]
    pid = held.engine_pid
    os.kill(pid, signal.SIGSTOP)
    try:
        assert three.ask_all([f"y{i} = " for i in range(9)]) == [200] * 9, "what went to it is asked again elsewhere"
        assert wait_until(lambda: not three.is_up(held))
        three.share([f"z{i} = " for i in range(4)], slice(1, 3))
    finally:
        os.kill(pid, signal.SIGCONT)
    assert wait_until(lambda: three.is_up(held), 30)
    assert held.engine_pid == pid, "it went on where it stood"
    held.settle("foretoken_prompt_tokens")  # it finds in its queue what was asked elsewhere meanwhile


def test_one_that_is_killed_ends_its_streams_alone(three: Three) -> None:
    killed, others = three.servers[2], three.servers[:2]
    kept = [stream for server in others for stream in three.hold_open(server, max_tokens=1900)]
    with killed.slowed():  # its stream's end is far when it has begun
        lost = three.hold_open(killed, max_tokens=1900)
        os.killpg(killed.process.pid, signal.SIGKILL)
    for stream in lost:
        raw = read_rest(stream)
        assert b'"code":"unavailable"' in raw and b"data: [DONE]" in raw
    assert three.ask_all([f"k{i} = " for i in range(9)]) == [200] * 9
    assert wait_until(lambda: not three.is_up(killed))
    for stream in kept:
        assert b'"finish_reason":"length"' in read_rest(stream)


def test_one_that_drains_answers_what_it_has(three: Three) -> None:
    draining = three.servers[0]
    (stream,) = three.hold_open(draining)
    draining.process.send_signal(signal.SIGTERM)
    assert wait_until(lambda: not three.is_up(draining))
    assert three.ask_all([f"d{i} = " for i in range(6)]) == [200] * 6
    assert b'"finish_reason":"length"' in read_rest(stream)


def test_when_none_is_left_it_is_said(three: Three) -> None:
    last: Callable[[], bool] = lambda: ask(three.address, "/health")[0] == 503  # noqa: E731
    for server in three.servers:
        if server.process.poll() is None:
            os.killpg(server.process.pid, signal.SIGKILL)
    assert wait_until(last, 30)
    status, _, body = ask(three.address, "/v1/completions", {"prompt": "x", "max_tokens": 1})
    assert (status, json.loads(body)["error"]["code"]) == (503, "unavailable"), body
