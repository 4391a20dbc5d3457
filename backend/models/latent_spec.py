"""What config.json says of multi-head latent attention. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from backend.models.rope_spec import RopeSpec
from backend.models.spec import Projection, WeightList
from backend.models.values import Values


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention (DeepSeek-V2, 2024, section 2.1): keys and values of all heads come from one latent a token, beside a
    key that turns, which all heads share. Latent and key are what is kept."""

    num_planes: ClassVar[int] = 1

    num_heads: int
    rank: int
    """Of the latent."""
    still_dim: int
    """Numbers of a query's head that do not turn; `rope.dim` follow that do."""
    value_dim: int
    query_down: Projection | None
    """To a latent of the queries, which is normalised; None: queries come from the hidden states."""
    query_norm: str | None
    query: Projection
    down: Projection
    """[rank + rope.dim, hidden]: latent and key."""
    latent_norm: str
    up: Projection
    """[heads (still_dim + value_dim), rank]: of each head keys and values."""
    o: Projection
    rope: RopeSpec
    scale: float
    """What scores are multiplied with."""
    norm_eps: float = 1e-6
    """Of the latents' norms, whatever rms_norm_eps is."""

    @property
    def heads(self) -> tuple[int, int, int]:
        """Of queries, of keys and values when they are made, and their size."""
        return self.num_heads, self.num_heads, self.still_dim + self.rope.dim

    @property
    def latent(self) -> tuple[int, int]:
        """Numbers of a latent and of the key beside it."""
        return self.rank, self.rope.dim

    @property
    def turning(self) -> tuple[RopeSpec, int, float | None]:
        """Rotary embedding, numbers that lie beside what turns, factor of scores within the tables."""
        return self.rope, self.rope.dim, None

    def token_shape(self, num_kv: int) -> tuple[int, ...]:
        """Of what is kept of a token in a plane: every rank keeps all of it."""
        return 1, self.rank + self.rope.dim

    def list_weights(self, weights: WeightList) -> None:
        if self.query_down is not None:
            weights.add(self.query_down, self.down)
        else:
            weights.add(self.down)
        weights.add_plain(self.query, "dense")
        weights.add_plain(self.up)
        weights.add(self.o)
        weights.add_norm(self.query_norm, self.query.in_features)
        weights.add_norm(self.latent_norm, self.rank)


def read_latent(values: Values, prefix: str, hidden: int, rope: RopeSpec, scale: float) -> LatentSpec:
    """Under DeepSeek's names; rope: of qk_rope_head_dim numbers. scale: of scores, beside the heads' size ** -0.5."""
    heads, has_bias = values.integer("num_attention_heads", 1024), values.flag("attention_bias")
    rank, still, value = (values.integer(key, 2**16) for key in ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim"))
    query_down, query_norm, source, name = None, None, hidden, "q_proj"
    if values.has("q_lora_rank"):
        source, name = values.integer("q_lora_rank", 2**16), "q_b_proj"
        query_down, query_norm = Projection(f"{prefix}.q_a_proj", source, hidden, has_bias), f"{prefix}.q_a_layernorm.weight"
    return LatentSpec(
        heads,
        rank,
        still,
        value,
        query_down=query_down,
        query_norm=query_norm,
        query=Projection(f"{prefix}.{name}", heads * (still + rope.dim), source),
        down=Projection(f"{prefix}.kv_a_proj_with_mqa", rank + rope.dim, hidden, has_bias),
        latent_norm=f"{prefix}.kv_a_layernorm.weight",
        up=Projection(f"{prefix}.kv_b_proj", heads * (still + value), rank),
        o=Projection(f"{prefix}.o_proj", hidden, heads * value, has_bias),
        rope=rope,
        scale=scale * (still + rope.dim) ** -0.5,
    )
