"""A multi-token-prediction drafter as it is trained on a frozen target; `train_mtp` is the command.

The module is DeepSeek-V3's (2024, section 2.2): each layer pairs a token's embedding with the hidden state of the position before
it, projects the two to one, and runs one decoder layer; embedding and head are the target's. Layer 1 takes the target's hidden
state, layer k that of layer k - 1; past the last layer the last one is fed with its own output, which training unrolls
(as EAGLE-3's training-time test, Li et al. 2025) so that it learns to live with its own errors.

The loss is the divergence from the target's own distribution on real text, not from the text: what counts is to say what the
target will say.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from training.llama import Llama

MATRICES = {
    "eh": "eh_proj", "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip
NORMS = {
    "enorm": "enorm", "hnorm": "hnorm", "input_norm": "input_layernorm", "post_norm": "post_attention_layernorm", "norm": "shared_head.norm",
}  # fmt: skip
STEP_DISCOUNT = 0.8
"""Weight of each further draft in the loss: it counts only when those before it were accepted."""
SHARPEN = 0.3
"""Weight of the target's likeliest token beside its whole distribution: greedy answers are what most drafts are for."""


class Mtp(nn.Module):
    """The drafter's layers, stacked as in `training.llama.Llama`."""

    def __init__(self, target: Llama, num_layers: int, inner: int) -> None:
        super().__init__()
        config = target.config
        hidden = config["hidden_size"]
        self.head_dim, self.eps, self.num_layers, self.inner = target.head_dim, config["rms_norm_eps"], num_layers, inner
        self.q_size, self.kv_size = target.q_size, target.kv_size

        def matrix(out_features: int, in_features: int, scale: float = 1.0) -> nn.Parameter:
            return nn.Parameter(torch.randn(num_layers, out_features, in_features) * scale * in_features**-0.5)

        self.eh = matrix(hidden, 2 * hidden)
        self.q, self.k, self.v = matrix(self.q_size, hidden), matrix(self.kv_size, hidden), matrix(self.kv_size, hidden)
        self.o = matrix(hidden, self.q_size, 0.5)
        self.gate, self.up, self.down = matrix(inner, hidden), matrix(inner, hidden), matrix(hidden, inner, 0.5)
        for name in NORMS:
            setattr(self, name, nn.Parameter(torch.ones(num_layers, hidden)))
        with torch.no_grad():
            self.norm.copy_(target.norm.expand(num_layers, -1))

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.eps)

    def forward(self, target: Llama, embedded: torch.Tensor, hidden: torch.Tensor, num_steps: int) -> list[torch.Tensor]:
        """Embeddings of tokens [B, T, hidden] and the target's hidden states of the same positions -> normed states of each draft step.

        Row s of step j scores what follows token s, given the target's states up to s - j - 1 (the first step is 0).
        """
        outputs: list[torch.Tensor] = []
        previous, keys, values = hidden, [], []
        for step in range(num_steps):
            layer = min(step, self.num_layers - 1)
            if layer == step:
                keys, values = [], []  # a layer's first pass: its keys are those of known tokens
            shifted = F.pad(previous, (0, 0, 1, 0))[:, :-1]  # nothing comes before the first token
            x = torch.cat([self._norm(embedded, self.enorm[layer]), self._norm(shifted, self.hnorm[layer])], dim=-1)
            x = F.linear(x, self.eh[layer])
            y = self._norm(x, self.input_norm[layer])
            q, k, v = (F.linear(y, w[layer]).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.q, self.k, self.v))
            q, k = target.rotate(q), target.rotate(k)
            keys.append(k)
            values.append(v)
            y = attend_unrolled(q, keys, values)
            x = x + F.linear(y.transpose(1, 2).flatten(2), self.o[layer])
            y = self._norm(x, self.post_norm[layer])
            x = x + F.linear(F.silu(F.linear(y, self.gate[layer])) * F.linear(y, self.up[layer]), self.down[layer])
            outputs.append(self._norm(x, self.norm[layer]))
            previous = x
        return outputs

    def named(self) -> dict[str, torch.Tensor]:
        """Weights under the names of the saved file."""
        table = {}
        for attribute, name in (MATRICES | NORMS).items():
            for i, weight in enumerate(getattr(self, attribute)):
                table[f"model.layers.{i}.{name}.weight"] = weight
        return table


def attend_unrolled(q: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Attention of the last of r + 1 passes of one layer: q [B, H, T, D]; keys and values of each pass [B, Hkv, T, D].

    A row sees the first pass's keys up to r positions back, and of pass m the one r - m back: what the cache holds when the last
    r tokens are drafts.
    """
    passes = len(keys) - 1
    if passes == 0:
        return F.scaled_dot_product_attention(q, keys[0], values[0], is_causal=True, enable_gqa=True)
    groups = q.shape[1] // keys[0].shape[1]
    keys = [k.repeat_interleave(groups, dim=1) for k in keys]
    values = [v.repeat_interleave(groups, dim=1) for v in values]
    length = q.shape[-2]
    place = torch.arange(length, device=q.device)
    scores = (q @ keys[0].mT).masked_fill(place[None, :] > place[:, None] - passes, float("-inf"))
    own = []
    for m in range(1, passes + 1):
        back = passes - m
        moved = F.pad(keys[m], (0, 0, back, 0))[:, :, :length]
        own.append((q * moved).sum(-1, keepdim=True).masked_fill((place < back)[:, None], float("-inf")))
    weights = (torch.cat([scores, *own], dim=-1) * q.shape[-1] ** -0.5).softmax(dim=-1, dtype=torch.float32).to(q.dtype)
    y = weights[..., :length] @ values[0]
    for m in range(1, passes + 1):
        back = passes - m
        y = y + weights[..., length + m - 1, None] * F.pad(values[m], (0, 0, back, 0))[:, :, :length]
    return y


class Objective(nn.Module):
    """Token ids [B, T] -> the loss, and per step the share of rows where drafter and target agree on the likeliest token."""

    def __init__(self, target: Llama, mtp: Mtp, num_steps: int) -> None:
        super().__init__()
        self.target, self.mtp, self.num_steps = target, mtp, num_steps

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            hidden = self.target.hidden_states(ids)
            wanted = F.linear(hidden, self.target.head).float().log_softmax(dim=-1)
            probs, best = wanted.exp(), wanted.argmax(dim=-1)
            entropy = (probs * wanted).sum(dim=-1)
        outputs = self.mtp(self.target, F.embedding(ids, self.target.embed), hidden, self.num_steps)
        loss, agree = torch.zeros((), device=ids.device), []
        for step, output in enumerate(outputs):
            logits = F.linear(output, self.target.head).float()
            divergence = entropy - (probs * logits).sum(dim=-1) + logits.logsumexp(dim=-1)
            sharp = F.cross_entropy(logits.flatten(0, 1), best.flatten())
            loss = loss + STEP_DISCOUNT**step * (divergence.mean() + SHARPEN * sharp)
            agree.append((logits.argmax(dim=-1) == best).float().mean())
        return loss, torch.stack(agree)


def save(mtp: Mtp, target: Llama, out: Path, num_steps: int) -> None:
    """Writes config.json and model.safetensors (bfloat16): what the `mtp_drafter` model loads."""
    keys = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "hidden_act")
    config = {"architectures": ["LlamaMTP"], "num_nextn_predict_layers": mtp.num_layers, "intermediate_size": mtp.inner}
    config |= {key: target.config[key] for key in (*keys, "rope_theta", "rope_scaling", "rope_parameters") if key in target.config}
    config |= {"head_dim": mtp.head_dim, "num_model_steps_trained": num_steps, "torch_dtype": "bfloat16"}
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {name: weight.detach().to("cpu", torch.bfloat16).contiguous() for name, weight in mtp.named().items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def measure_drafts(objective: Objective, batch: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [B, T] -> per step the drafts that were right and the drafts that count [num_steps], from position `first` on.

    A draft of step j counts where the drafts before it were right and the text has them, as it does when the target writes it.
    """
    target, steps = objective.target, objective.num_steps
    hidden = target.hidden_states(batch)
    best = F.linear(hidden, target.head).argmax(dim=-1)
    alive = torch.ones_like(best, dtype=torch.bool)
    alive[:, :first] = False
    hits, tries = torch.zeros(steps), torch.zeros(steps)
    for step, output in enumerate(objective.mtp(target, F.embedding(batch, target.embed), hidden, steps)):
        if step:
            alive = F.pad(alive & (best == F.pad(batch[:, 1:], (0, 1), value=-1)), (1, 0))[:, :-1]
        agree = F.linear(output, target.head).argmax(dim=-1) == best
        alive_and_right = alive & agree
        hits[step], tries[step] = alive_and_right.sum().item(), alive.sum().item()
        alive = alive_and_right
    return hits, tries


@torch.no_grad()
def evaluate(objective: Objective, ids: torch.Tensor, batch_size: int, context: int) -> dict[str, Any]:
    """Acceptance of each step and the accepted length, on held-out text and on what the target writes after pieces of it (greedy)."""
    windows = ids[: len(ids) // context * context].view(-1, context)
    results = {}
    for name, first in (("text", 0), ("greedy", context // 4)):
        hits, tries = torch.zeros(objective.num_steps), torch.zeros(objective.num_steps)
        for batch in windows.split(batch_size):
            if name == "greedy":
                batch = objective.target.generate(batch[:, :first], context // 4, torch.zeros(len(batch), device=batch.device))
            counts = measure_drafts(objective, batch, first)
            hits, tries = hits + counts[0], tries + counts[1]
        rates = (hits / tries.clamp(min=1)).tolist()
        length = 1 + sum(math.prod(rates[: i + 1]) for i in range(len(rates)))
        results[name] = {"acceptance": [round(r, 4) for r in rates], "accepted_length": round(length, 3)}
    return results
