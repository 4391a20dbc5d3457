"""Trains a multi-token-prediction drafter on a frozen target: `foretoken train-mtp --model DIR --data FILE ... --out DIR`.

The module is DeepSeek-V3's (2024, section 2.2): each layer pairs a token's embedding with the hidden state of the position before
it, projects the two to one, and runs one decoder layer; embedding and head are the target's. Layer 1 takes the target's hidden
state, layer k that of layer k - 1; past the last layer the last one is fed with its own output, which training unrolls
(as EAGLE-3's training-time test, Li et al. 2025) so that it learns to live with its own errors.

The loss is the divergence from the target's own distribution on real text, not from the text: what counts is to say what the
target will say.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import pickle
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from tqdm import tqdm

from backend.errors import ModelError
from backend.model_files import read_config
from training.llama import Llama, load_model
from training.optimizers import Muon, learning_rate

MATRICES = {
    "eh": "eh_proj", "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip
NORMS = {
    "enorm": "enorm", "hnorm": "hnorm", "input_norm": "input_layernorm", "post_norm": "post_attention_layernorm", "norm": "shared_head.norm",
}  # fmt: skip
STEP_DISCOUNT = 0.8
"""Weight of each further draft in the loss: it counts only when those before it were accepted."""


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

        Row s of step j scores what follows token s, given the target's states up to s - j.
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


SHARPEN = 0.3
"""Weight of the target's likeliest token beside its whole distribution: greedy answers are what most drafts are for."""


def read_file(file: Path, vocab_size: int) -> np.ndarray | list[str]:
    """A file's token ids, or its documents' texts. Raises ValueError for what is neither."""
    if file.suffix in (".xz", ".u16"):
        content = lzma.decompress(file.read_bytes()) if file.suffix == ".xz" else file.read_bytes()
        ids = np.frombuffer(content, dtype="<u2").astype(np.uint32)
        if len(ids) and ids.max() >= vocab_size:
            raise ValueError(f"it holds id {ids.max()}; the model's vocabulary has ids 0 to {vocab_size - 1}")
        return ids
    text = file.read_text("utf-8")
    if file.suffix != ".jsonl":
        return [text]
    texts = [json.loads(line)["text"] for line in text.split("\n") if line.strip()]
    if bad := [t for t in texts if not isinstance(t, str)]:
        raise ValueError(f'"text" must be a string, got {bad[0]!r:.80}')
    return texts


def read_ids(paths: Sequence[Path], directory: Path, option: str = "--data") -> np.ndarray:
    """Token ids of text files, folders of them (*.py, *.txt, *.md), *.jsonl (a "text" each line) and *.u16 or *.u16.xz ids, uint32.

    Every document opens with the end-of-text id. Raises ValueError naming the option and the file that cannot be used, and ModelError
    for the model's tokenizer.
    """
    from training.tokenizer import load_tokenizer

    try:
        tokenizer = load_tokenizer(directory)
    except Exception as error:  # the library has no kind of its own
        raise ModelError(f"{directory / 'tokenizer.json'} cannot be read: {error}") from None
    config = read_config(directory)
    end = config.get("eos_token_id")
    start = [] if end is None else [end if isinstance(end, int) else end[0]]
    parts: list[np.ndarray] = []
    files = [f for path in paths for f in (sorted(path.rglob("*")) if path.is_dir() else [path]) if f.is_file()]
    files = [f for f in files if f.suffix in (".py", ".txt", ".md", ".jsonl", ".u16", ".xz") or f in paths]
    for file in tqdm(files, desc="tokens", unit="file", disable=len(files) < 50):
        try:
            content = read_file(file, config["vocab_size"])
        except (OSError, lzma.LZMAError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{option} {file} cannot be used: {error!r:.200}") from None
        if isinstance(content, np.ndarray):
            parts.append(content)
        else:
            for encoding in tokenizer.encode_batch(content, add_special_tokens=False):
                parts.append(np.array([*start, *encoding.ids], dtype=np.uint32))
    if not parts:
        raise ValueError(f"{option} {', '.join(map(str, paths))}: no *.py, *.txt, *.md, *.jsonl or *.u16 there")
    return np.concatenate(parts)


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="the target: a Llama folder in Hugging Face layout")
    parser.add_argument("--data", type=Path, nargs="+", required=True, metavar="PATH", help="text files, folders of them, *.jsonl, *.u16")
    parser.add_argument("--heldout", type=Path, nargs="+", metavar="PATH", help="the same kinds of file, to measure acceptance on at the end")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the drafter and its checkpoints go")
    parser.add_argument("--layers", type=int, default=1, metavar="N", help="layers, one for each draft step (default 1)")
    parser.add_argument("--inner", type=int, metavar="N", help="width of the feed-forward part (default: the target's)")
    parser.add_argument("--unroll", type=int, default=3, metavar="N", help="draft steps to train for (default 3)")
    parser.add_argument("--steps", type=int, default=2000, metavar="N", help="optimizer steps (default 2000)")
    parser.add_argument("--batch-size", type=int, default=64, metavar="N", help="sequences a step (default 64)")
    parser.add_argument("--context", type=int, default=1024, metavar="N", help="tokens a sequence (default 1024)")
    parser.add_argument("--lr", type=float, default=4e-3, metavar="RATE", help="peak learning rate (default 4e-3)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint-every", type=int, default=500, metavar="N", help="steps between checkpoints (default 500)")
    parser.add_argument("--resume", action="store_true", help="go on from OUT's checkpoint; the other options must be those of that run")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def check(args: argparse.Namespace) -> None:
    """Raises ValueError naming the option, the value and the limit."""
    ranges = {"layers": (1, 8), "unroll": (1, 8), "steps": (1, 10**7), "batch_size": (1, 4096), "context": (16, 10**6)}
    ranges |= {"inner": (1, 10**6), "checkpoint_every": (1, 10**7), "seed": (0, 2**63 - 1)}
    for key, (low, high) in ranges.items():
        value = getattr(args, key)
        if value is not None and not low <= value <= high:
            raise ValueError(f"--{key.replace('_', '-')} must be from {low} to {high}, got {value}")
    if args.unroll < args.layers:
        raise ValueError(f"--unroll must be at least --layers ({args.layers}), got {args.unroll}: a layer that takes no step learns nothing")
    if not 0 < args.lr < 1:
        raise ValueError(f"--lr must be between 0 and 1, got {args.lr}")
    try:
        torch.empty(0, device=args.device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"--device {args.device} cannot be used: {str(error).splitlines()[0]:.200}") from None


def batches(ids: torch.Tensor, args: argparse.Namespace, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Random windows [batch, context], without end."""
    window = torch.arange(args.context, device=ids.device)
    while True:
        starts = torch.randint(len(ids) - args.context, (args.batch_size, 1), device=ids.device, generator=generator)
        yield ids[starts + window].long()


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Trains, writes the drafter, `log.jsonl` and `result.json`; returns the result. Raises ValueError and ModelError for bad input."""
    check(args)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device(args.device)
    target = load_model(args.model).to(device).requires_grad_(False)
    limit = target.config["max_position_embeddings"]
    if args.context > limit:
        raise ValueError(f"--context {args.context} is beyond the model's own limit {limit}")
    ids = torch.from_numpy(read_ids(args.data, args.model).astype(np.int32)).to(device)
    if len(ids) <= args.context:
        raise ValueError(f"--data holds {len(ids)} tokens; one sequence takes {args.context} (--context)")
    held = torch.from_numpy(read_ids(args.heldout, args.model, "--heldout").astype(np.int64)) if args.heldout else None
    if held is not None and len(held) < args.context:
        raise ValueError(f"--heldout holds {len(held)} tokens; one sequence takes {args.context} (--context)")
    mtp = Mtp(target, args.layers, args.inner or target.config["intermediate_size"]).to(device)
    objective = Objective(target, mtp, args.unroll)
    others = [p for p in mtp.parameters() if p.dim() == 2]
    optimizers: list[torch.optim.Optimizer] = [
        Muon([p for p in mtp.parameters() if p.dim() == 3], lr=args.lr),
        torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    generator = torch.Generator(device=device).manual_seed(args.seed)
    first, checkpoint, args.out = 0, args.out / "checkpoint.pt", args.out
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {args.out}: {error.strerror}") from None
    if args.resume:
        if not checkpoint.is_file():
            raise ValueError(f"--resume: {checkpoint} does not exist")
        try:
            state = torch.load(checkpoint, map_location=device, weights_only=True)
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
            raise ValueError(f"--resume: {checkpoint} cannot be read: {error!r:.200}") from None
        try:
            mtp.load_state_dict(state["mtp"])
        except RuntimeError as error:
            raise ValueError(f"--resume: {checkpoint} is of another drafter: {error}") from None
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        generator.set_state(state["generator"].cpu())
        first = state["step"]
    compiled = torch.compile(objective) if device.type == "cuda" else objective
    started, row = time.time(), {}
    source = batches(ids, args, generator)
    bar = tqdm(range(first, args.steps), initial=first, total=args.steps, desc="train-mtp", unit="step", mininterval=2.0)
    with (args.out / "log.jsonl").open("a" if args.resume else "w") as log:
        for step in bar:
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss, agree = compiled(next(source))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(others, 1.0)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = args.lr * learning_rate(step, args.steps)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            done = step + 1
            if done % 50 == 0 or done == args.steps:
                row = {"step": done, "loss": round(loss.item(), 4), "agreement": [round(a, 4) for a in agree.tolist()]}
                log.write(json.dumps(row | {"seconds": round(time.time() - started, 1)}) + "\n")
                log.flush()
                bar.set_postfix_str(f"loss {row['loss']}, agreement {row['agreement']}")
            if done % args.checkpoint_every == 0 or done == args.steps:
                state = {
                    "mtp": mtp.state_dict(),
                    "optimizers": [o.state_dict() for o in optimizers],
                    "generator": generator.get_state(),
                    "step": done,
                }
                torch.save(state, checkpoint.with_suffix(".tmp"))
                checkpoint.with_suffix(".tmp").replace(checkpoint)
    save(mtp, target, args.out, args.unroll)
    result = {"steps": args.steps, "seconds": round(time.time() - started, 1), "torch": torch.__version__, "last": row}
    if held is not None:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            result["heldout"] = evaluate(objective, held.to(device), args.batch_size, args.context)
    (args.out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    return result


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="foretoken train-mtp", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    args = parser.parse_args(argv)
    try:
        print(json.dumps(train(args)))
    except KeyboardInterrupt:
        print("foretoken train-mtp: stopped; --resume goes on from the last checkpoint", file=sys.stderr)
        return 130
    except (ValueError, ModelError) as error:
        print(f"foretoken train-mtp: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
