"""How the bundled model was made: corpus, tokenizer, training loop and card."""

from pathlib import Path

MODEL_DIR = Path(__file__).parent.parent / "model_repository" / "standalone" / "decode" / "1"
