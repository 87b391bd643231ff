"""GPT-2 folders between transformers and attn: the same greedy ids and text, and what attn writes opens in Python.

Usage: gpt2_test.py attn_generate convert_weights
"""

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch

try:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, logging
except ImportError as error:
    print(f"skipped: {error} (cmake/bootstrap.sh --python installs it)")
    sys.exit(77)

GENERATE, CONVERT = sys.argv[1:3]
SIZES = dict(vocab_size=320, n_positions=32, n_embd=24, n_layer=3, n_head=4, bos_token_id=None, eos_token_id=None)


def random_model(**config):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**{**SIZES, **config})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_scale = ".ln_" in name and name.endswith("weight")
            parameter.copy_(0.3 * torch.randn(parameter.shape) + float(is_scale))
    return model


def greedy(model, ids, count):
    ids = torch.tensor([ids])
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count,
                             pad_token_id=0)
    return out[0, ids.shape[1]:].tolist()


def attn(folder, *arguments):
    command = [GENERATE, "--model", str(folder), "--temperature", "0", "--json", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


class GPT2Folders(unittest.TestCase):
    def setUp(self):
        self.temporary = tempfile.TemporaryDirectory()
        self.addCleanup(self.temporary.cleanup)
        self.folder = Path(self.temporary.name) / "model"

    def assert_same(self, model, folder=None):
        prompt = [5, 17, 300, 2, 64]
        mine = attn(folder or self.folder, "--ids", ",".join(map(str, prompt)), "--max-new-tokens", "20")
        self.assertEqual(mine["ids"], greedy(model, prompt, 20))

    def test_variants_generate_the_same_ids(self):
        for name, config in dict(plain={}, untied=dict(tie_word_embeddings=False), inner=dict(n_inner=48),
                                 relu=dict(activation_function="relu"), gelu=dict(activation_function="gelu"),
                                 eps=dict(layer_norm_epsilon=1e-2)).items():
            with self.subTest(name):
                model = random_model(**config)
                folder = self.folder / name
                model.save_pretrained(folder)
                self.assert_same(model, folder)

    def test_sharded(self):
        model = random_model()
        model.save_pretrained(self.folder, max_shard_size="20KB")
        self.assertTrue((self.folder / "model.safetensors.index.json").exists())
        self.assert_same(model)

    def test_pytorch_model_bin_and_no_prefix(self):
        model = random_model()
        model.save_pretrained(self.folder)
        (self.folder / "model.safetensors").unlink()
        state = model.state_dict()
        torch.save(state, self.folder / "pytorch_model.bin")
        self.assert_same(model)
        bare = {key.removeprefix("transformer."): value for key, value in state.items() if key != "lm_head.weight"}
        torch.save(bare, self.folder / "pytorch_model.bin")
        self.assert_same(model)

    def test_bfloat16_file(self):
        model = random_model().to(torch.bfloat16)
        model.save_pretrained(self.folder)
        self.assert_same(model.float())

    def test_text_is_the_same(self):
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(vocab_size=SIZES["vocab_size"], show_progress=False,
                                      initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
        tokenizer.train_from_iterator([Path(__file__).read_text()], trainer)
        model = random_model()
        model.save_pretrained(self.folder)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(self.folder)
        prompt = "def test: déjà"
        ids = tokenizer.encode(prompt).ids
        mine = attn(self.folder, "--prompt", prompt, "--max-new-tokens", "15")
        self.assertEqual(mine["prompt_ids"], ids)
        expected = greedy(model, ids, 15)
        self.assertEqual(mine["ids"], expected)
        plain = subprocess.run([GENERATE, "--model", str(self.folder), "--temperature", "0", "--prompt", prompt,
                                "--max-new-tokens", "15"], capture_output=True, timeout=100)
        self.assertEqual(plain.stdout.decode(errors="replace"), tokenizer.decode(expected) + "\n")

    def test_what_attn_writes_opens_in_transformers(self):
        for tied in (True, False):
            with self.subTest(tied=tied):
                model = random_model(tie_word_embeddings=tied, n_inner=48, activation_function="relu")
                model.save_pretrained(self.folder)
                written = self.folder / f"again_{tied}"
                subprocess.run([CONVERT, "--gpt2", str(self.folder), str(written)], check=True, timeout=100)
                again = GPT2LMHeadModel.from_pretrained(written).eval()
                expected = model.state_dict()
                self.assertEqual(again.state_dict().keys(), expected.keys())
                for key, value in again.state_dict().items():
                    self.assertTrue(torch.equal(value, expected[key]), key)
                loaded = GPT2LMHeadModel(again.config)
                loaded.load_state_dict(again.state_dict(), strict=True)
                ids = torch.arange(10).unsqueeze(0)
                self.assertTrue(torch.equal(again(ids).logits, model(ids).logits))
                self.assertEqual(again.config.activation_function, "relu")


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    unittest.main(argv=sys.argv[:1])
