"""What a drafter loses that may draft a text's frequent tokens alone (`draft_token_map`), by how many they are: tokens a step and speed.

    python -m benchmarks.draft_tokens --sizes 2048 1024 512 256        # the bundled model and its drafter, tokens by the code of Python's library
    python -m benchmarks.draft_tokens --model DIR --speculative '{"method": "medusa", "model": "HEADS"}' --device cuda --data TEXTS --sizes 32768

All servers take turns at the same prompts, so that what else the machine does falls on all of them alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sysconfig
import tempfile
from pathlib import Path

import numpy as np
import torch

from backend import LLM
from backend.config import BUNDLED_MODEL
from backend.model_checks import check_model
from benchmarks.models import model_folder
from benchmarks.trees import Server, add_arguments, take_turns
from training.data import Reader, choose_draft_ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=model_folder, default=BUNDLED_MODEL, help="a folder; default: the bundled model")
    parser.add_argument("--speculative", type=json.loads, default={"method": "mtp", "num_speculative_tokens": 3}, metavar="JSON", help="the drafter")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2048, 1024, 512, 256], help="tokens that may be drafted")
    parser.add_argument("--data", type=Path, nargs="+", help="texts whose tokens are counted; default: the modules of Python's library")
    add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    spec = check_model(args.model)
    documents = Reader(args.model).read(args.data or sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")), "--data")
    base = {**args.speculative, "adaptive": False}
    servers, shares = [Server("none", {"method": "none"}), Server("all", base)], {"none": "", "all": "100%"}
    with tempfile.TemporaryDirectory() as folder:
        for size in args.sizes:
            chosen, path = choose_draft_ids(documents, spec.vocab_size, size, spec.eos_token_ids), Path(folder) / f"{size}.json"
            path.write_text(json.dumps(chosen.tolist()))
            servers.append(Server(str(size), {**base, "draft_token_map": str(path)}))
            found = sum(int(np.isin(ids, chosen).sum()) for ids in documents)
            shares[str(size)] = f"{found / sum(map(len, documents)):.1%}"
        for server in servers:
            options = {"device": args.device, "enable_prefix_caching": False, "kv_cache_memory": "256MiB", "max_batch_size": args.batch}
            server.llm = LLM(str(args.model), speculative_config=server.speculative, **options)
    take_turns(servers, args)
    plain, whole = servers[:2]
    print(f"of {spec.vocab_size} tokens\n| may be drafted | of the texts | tokens a step | x plain | x all | the same tokens |")
    print("|---|---|---|---|---|---|", flush=True)
    for server in servers:
        of_plain, of_whole = (statistics.median(a / b for a, b in zip(other.seconds, server.seconds)) for other in (plain, whole))
        is_same = "yes" if server.tokens == plain.tokens else "no"
        print(f"| {server.name} | {shares[server.name]} | {server.emitted / server.steps:.2f} | {of_plain:.2f} | {of_whole:.2f} | {is_same} |")


if __name__ == "__main__":
    main()
