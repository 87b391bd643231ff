"""Weights from Python to C++ and back, bit for bit.

Usage: weights_test.py convert_weights
"""

import collections
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import torch
from safetensors.torch import load_file, load_model, save_file
from torch import nn

PROGRAM = None


def all_kinds():
    torch.manual_seed(0)
    state = collections.OrderedDict()
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.int16,
                  torch.int8, torch.uint8, torch.bool):
        state[str(dtype)] = (torch.randn(2, 3) * 3).to(dtype)
    state["empty"] = torch.empty(0, 4)
    state["scalar"] = torch.tensor(2.5)
    state["Größe 注意"] = torch.ones(1)
    state["n" * 3000] = torch.ones(1)
    return state


class WeightsTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def convert(self, source, target):
        done = subprocess.run([PROGRAM, self.folder / source, self.folder / target], capture_output=True, text=True)
        return done.stderr if done.returncode else None

    def expect_equal(self, actual, expected):
        self.assertEqual(set(actual), set(expected))
        for name, tensor in expected.items():
            self.assertEqual(actual[name].dtype, tensor.dtype, name)
            self.assertTrue(torch.equal(actual[name], tensor), name)

    def test_pt_both_ways(self):
        state = all_kinds()
        state["transposed"] = torch.randn(3, 4).t()
        state["all"] = torch.arange(10.0)
        state["part"] = state["all"][2::2]
        torch.save(state, self.folder / "a.pt")
        self.assertIsNone(self.convert("a.pt", "b.pt"))
        again = torch.load(self.folder / "b.pt", weights_only=True)
        self.assertEqual(list(again), list(state))
        self.expect_equal(again, state)
        self.assertEqual(again["transposed"].stride(), state["transposed"].stride())
        self.assertEqual(again["part"].untyped_storage().data_ptr(), again["all"].untyped_storage().data_ptr())
        self.expect_equal(torch.load(self.folder / "b.pt", weights_only=True, mmap=True), state)

    def test_safetensors_both_ways(self):
        state = all_kinds()
        save_file(state, self.folder / "a.safetensors")
        self.assertIsNone(self.convert("a.safetensors", "b.safetensors"))
        self.expect_equal(load_file(self.folder / "b.safetensors"), state)
        self.assertIsNone(self.convert("b.safetensors", "c.pt"))
        self.expect_equal(torch.load(self.folder / "c.pt", weights_only=True), state)

    def test_checkpoints_parameters_and_optimisers(self):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
        checkpoint = dict(model=model.state_dict(), optimizer=optimizer.state_dict(), epoch=3, lr=1e-3, name="run",
                          history=[1.0, 2.0], dtype=torch.float32, device=torch.device("cpu"), shape=torch.Size([1]))
        torch.save(checkpoint, self.folder / "a.pt")
        self.assertIsNone(self.convert("a.pt", "b.safetensors"))
        self.expect_equal(load_file(self.folder / "b.safetensors"), model.state_dict())
        torch.save(dict(model.named_parameters()), self.folder / "c.pt")
        self.assertIsNone(self.convert("c.pt", "d.pt"))
        self.expect_equal(torch.load(self.folder / "d.pt", weights_only=True), dict(model.named_parameters()))

    def test_tied_models_load_strictly(self):
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.embed = nn.Embedding(5, 3)
                self.head = nn.Linear(3, 5, bias=False)
                self.head.weight = self.embed.weight

        model, fresh = Tied(), Tied()
        torch.save(model.state_dict(), self.folder / "a.pt")
        self.assertIsNone(self.convert("a.pt", "b.pt"))
        fresh.load_state_dict(torch.load(self.folder / "b.pt", weights_only=True), strict=True)
        self.assertTrue(torch.equal(fresh.embed.weight, model.embed.weight))
        self.assertIsNone(self.convert("a.pt", "b.safetensors"))
        fresh = Tied()
        load_model(fresh, self.folder / "b.safetensors", strict=True)
        self.assertTrue(torch.equal(fresh.embed.weight, model.embed.weight))

    def test_what_is_no_state_dict_is_refused_by_name(self):
        torch.save(nn.Linear(2, 2), self.folder / "module.pt")
        self.assertIn("torch.nn.modules.linear.Linear", self.convert("module.pt", "x.pt"))
        torch.save(dict(w=torch.ones(1)), self.folder / "old.pt", _use_new_zipfile_serialization=False)
        self.assertIn("1.6", self.convert("old.pt", "x.pt"))
        torch.jit.save(torch.jit.script(nn.Linear(2, 2)), self.folder / "script.pt")
        self.assertIn("TorchScript", self.convert("script.pt", "x.pt"))


if __name__ == "__main__":
    PROGRAM = sys.argv.pop(1)
    unittest.main()
