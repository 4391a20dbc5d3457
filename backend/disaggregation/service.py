"""A node's part in prefill and decode apart, put together around its engine."""

from __future__ import annotations

from backend.disaggregation.fetch import PageFetcher
from backend.disaggregation.node import Node, RedisState
from backend.disaggregation.node_info import NodeInfo
from backend.disaggregation.node_transfer import NodeTransfer
from backend.disaggregation.prefill import PrefillService
from backend.disaggregation.records import VERSION, Message
from backend.disaggregation.transfers import Transport
from backend.engine import Engine

FLOAT_BYTES = 4


class Disaggregation:
    """Of an engine whose configuration has a scheduler. `start` once the engine's loop is about to run, `stop` before it is shut down."""

    def __init__(self, engine: Engine) -> None:
        """Raises ConfigError."""
        config = engine.config.disaggregation
        self._engine, self._config = engine, config
        self.node = Node(config, self._describe, self._on_message, self._on_lost, self._on_heartbeat)
        speculative, is_decode = engine.config.speculative_config, config.role == "decode"
        # What drafts were drawn from, of one request at a time.
        num_drafts = (speculative.num_model_steps or 1) if engine.worker.drafter is not None and is_decode else 0
        self.transfer = NodeTransfer(
            self.node.node_id, engine, Transport.choose(config, engine.worker.store.device), num_drafts * engine.worker.model.vocab_size * FLOAT_BYTES
        )
        self.fetcher = PageFetcher(engine, self.node, self.transfer) if is_decode else None
        self.prefill = PrefillService(engine, self.node, self.transfer) if not is_decode else None
        self._address = [own.as_dict() for own in self.transfer.address]

    def _describe(self, node_id: str) -> NodeInfo:
        engine = self._engine
        return NodeInfo(
            node_id=node_id,
            role=self._config.role,
            version=VERSION,
            fingerprint=engine.worker.store.fingerprint,
            layout=engine.worker.store.layout,
            methods=list(engine.config.speculative_config.loaded_methods),
            max_model_len=engine.worker.max_model_len,
            address=self._address,
            load=self.prefill.held.num_tokens if self.prefill is not None else 0,
            time=self.node.server_time(),
            is_leaving=self.node.is_leaving,
        )

    def _on_message(self, message: Message) -> None:
        if message.kind == "stop":
            if self.prefill is not None:
                self.prefill.on_message(message)
        elif self.fetcher is not None:
            self.fetcher.on_message(message)

    def _on_lost(self) -> None:
        if self.fetcher is not None:
            self.fetcher.on_lost()

    def _on_heartbeat(self, state: RedisState) -> None:
        if self.prefill is not None:
            self.prefill.on_heartbeat()
        if self.fetcher is not None:
            self.fetcher.on_heartbeat(state)

    def start(self) -> None:
        self.node.start()
        for part in (self.fetcher, self.prefill):
            if part is not None:
                part.start()

    def leave(self) -> None:
        """Others give it no more jobs once they know. Those that came before are done: nobody else would take them until this node is gone."""
        self.node.is_leaving = True

    @property
    def num_jobs(self) -> int:
        """Prompts of others whose pages are held here."""
        return self.prefill.num_open if self.prefill is not None else 0

    def stop(self) -> None:
        """Leaves at once; open requests go on. Jobs that are being computed are other nodes' to take over."""
        self.node.stop()
        if self.prefill is not None:
            self.prefill.stop()

    def close(self) -> None:
        """After the engine was shut down."""
        if self.fetcher is not None:
            self.fetcher.close()
        self.transfer.close()
