#!/usr/bin/env python3
"""A tiny GPT-2 as the package `transformers` writes it, and what that package computes with it.

  generate_gpt2.py --out DIR   writes gpt2/, gpt2_bin/, expected_gpt2.safetensors and gpt2_greedy.json into DIR
  generate_gpt2.py --check     computes them again and compares with those beside this script

Nothing is downloaded: the weights are drawn here, large and without any symmetry, biases and LayerNorms too, so that a
matrix the wrong way round or another GELU moves the logits far beyond rounding.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, logging

CONFIG = dict(vocab_size=31, n_positions=16, n_embd=12, n_layer=2, n_head=3, bos_token_id=None, eos_token_id=None)


def draw_weights(model, seed):
    """Every parameter anew: matrices N(0, 0.5), biases N(0, 0.3), LayerNorms around 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 2:
                parameter.copy_(0.5 * noise)
            else:
                is_scale = ".ln_" in name and name.endswith("weight")
                parameter.copy_(0.3 * noise + float(is_scale))


def tiny_model():
    model = GPT2LMHeadModel(GPT2Config(**CONFIG))
    draw_weights(model, seed=0)
    return model.eval()


def old_checkpoint(model):
    """The same weights as the first GPT-2 files hold them: no `transformer.`, no head, the masks as buffers."""
    weights = {}
    for name, tensor in model.transformer.state_dict().items():
        weights[name] = tensor
        if name.endswith("ln_1.bias"):
            attention = name.removesuffix("ln_1.bias") + "attn."
            weights[attention + "bias"] = torch.ones(16, 16, dtype=torch.uint8).tril().view(1, 1, 16, 16)
            weights[attention + "masked_bias"] = torch.tensor(-1e4)
    return weights


def expected(model):
    """Logits in float64 of the float32 weights, and greedy ids; a near-tie among them would be no test."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 31, (2, 16), generator=generator)
    prompt = ids[:, :5].clone()
    model = model.double()
    with torch.no_grad():
        logits = model(ids).logits
        greedy = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=11,
                                pad_token_id=0)
        best = model(greedy).logits[:, 4:-1].topk(2).values
    assert (best[..., 0] - best[..., 1]).min() > 1e-2, "two ids are nearly as likely: draw other weights"
    return dict(ids=ids, logits=logits, prompt=prompt, greedy=greedy)


def write(directory):
    model = tiny_model()
    model.save_pretrained(directory / "gpt2")
    (directory / "gpt2" / "generation_config.json").unlink(missing_ok=True)
    old = directory / "gpt2_bin"
    old.mkdir(parents=True, exist_ok=True)
    config = dict(CONFIG, model_type="gpt2", architectures=["GPT2LMHeadModel"], n_ctx=16, activation_function="gelu_new",
                  layer_norm_epsilon=1e-5)
    (old / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    torch.save(old_checkpoint(model), old / "pytorch_model.bin")
    computed = expected(model)
    save_file(computed, directory / "expected_gpt2.safetensors")
    rows = [dict(prompt=row[:5], added=row[5:]) for row in computed["greedy"].tolist()]
    (directory / "gpt2_greedy.json").write_text(json.dumps(rows, indent=1) + "\n")


def tensors_of(directory):
    yield "gpt2", load_file(directory / "gpt2" / "model.safetensors")
    yield "gpt2_bin", torch.load(directory / "gpt2_bin" / "pytorch_model.bin", weights_only=True)
    yield "expected_gpt2", load_file(directory / "expected_gpt2.safetensors")


def config_of(directory, folder):
    """What the configuration says, apart from who wrote it and what newer versions add."""
    config = json.loads((directory / folder / "config.json").read_text())
    return {key: value for key, value in config.items() if key in CONFIG or key in ("model_type", "activation_function")}


def check(directory):
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        print("skipped: without AVX2, randn draws other numbers than those in the files")
        return 77
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        computed = Path(temporary)
        write(computed)
        for folder in ("gpt2", "gpt2_bin"):
            if config_of(computed, folder) != config_of(directory, folder):
                print(f"{folder}/config.json: DIFFERS")
                failed = True
        if (computed / "gpt2_greedy.json").read_text() != (directory / "gpt2_greedy.json").read_text():
            print("gpt2_greedy.json: DIFFERS")
            failed = True
        for (name, actual), (_, wanted) in zip(tensors_of(computed), tensors_of(directory)):
            found = [f"{key}: only on one side" for key in actual.keys() ^ wanted.keys()]
            for key in actual.keys() & wanted.keys():
                drawn = key != "logits"
                try:
                    torch.testing.assert_close(actual[key], wanted[key], rtol=0, atol=0 if drawn else 1e-9)
                except AssertionError as error:
                    found.append(f"{key}: {' '.join(str(error).split())}")
            print(f"{name}: {'DIFFERS' if found else 'ok'}", *found, sep="\n  ")
            failed |= bool(found)
    return 1 if failed else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--out", type=Path, metavar="DIR", help="write the files there")
    action.add_argument("--check", action="store_true", help="compare with the files beside this script")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # everything is tiny: threads would only wait for one another
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if arguments.check:
        return check(Path(__file__).parent)
    write(arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
