"""What loading a model on CPU takes of the host's memory, beside what stays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.families import Case, make_model

SIZES = {"hidden_size": 512, "num_hidden_layers": 6, "head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1024}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
MIXTURE = Case("qwen3_moe", config=SIZES | EXPERTS)
NUM_WEIGHTS = 2 * 1024 * 512 + 6 * (3 * 8 * 512 * 512 + 3 * 512 * 512)
"""About, of which all but embedding and head may be rounded."""
CODE = """
import sys, threading, time
from pathlib import Path
import torch
from backend.models import decoder, load_model
from backend.parallel.ranks import Ranks
from backend.quantization_config import QuantizationConfig

def held():
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")) / 1024

def watch():
    global peak
    while not is_done:
        peak = max(peak, held())
        time.sleep(0.001)

torch.set_num_threads(1)
before = peak = held()
is_done, watcher = False, threading.Thread(target=watch)
watcher.start()
scheme = sys.argv[2] or None
rounding = QuantizationConfig(dense_quant_type=scheme, moe_quant_type=scheme)
model = load_model(sys.argv[1], torch.float32, torch.device("cpu"), Ranks(), quantization=rounding)
is_done = True
watcher.join()
assert ".safetensors" not in Path("/proc/self/maps").read_text(), "a file is still mapped"
print(peak - before)
"""


@pytest.fixture(scope="module", params=[True, False], ids=["each expert", "fused experts"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(MIXTURE, folder).save_pretrained(folder, save_original_format=request.param)
    return folder


@pytest.mark.parametrize(("scheme", "size"), [("", 4), ("wint8", 1)])
def test_the_peak_is_near_the_weights(folder: Path, scheme: str, size: float) -> None:
    """Above it there is room for a layer's temporaries, and for libraries; pages of the mapped file, which the system takes back, apart."""
    result = subprocess.run([sys.executable, "-c", CODE, str(folder), scheme], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    plain = 2 * 1024 * 512
    weights = ((NUM_WEIGHTS - plain) * size + plain * 4) / 2**20
    assert float(result.stdout) <= 1.3 * weights + 16, f"{weights:.0f} MiB of weights"
