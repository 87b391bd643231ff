"""attn's operators from Python: torch.ops.load_library, gradients, autocast, torch.compile, opcheck.

Usage: operators_test.py libattn.so
"""

import sys
import unittest

import torch
import torch.nn.functional as F


def reference(q, k, v, causal=True, key_padding_mask=None):
    """Attention step by step, causal aligned at the last token: [B, H, T, D]."""
    T, S = q.shape[2], k.shape[2]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-2, -1) * q.shape[3] ** -0.5
    blocked = torch.zeros(1, 1, T, S, dtype=torch.bool)
    if causal:
        blocked = blocked | torch.ones(T, S, dtype=torch.bool).triu(S - T + 1)
    if key_padding_mask is not None:
        blocked = blocked | key_padding_mask[:, None, None, :]
    return F.softmax(scores.masked_fill(blocked, float("-inf")), dim=-1) @ v


def heads(qkv, n_head):
    """[B, T, 3C] -> three of [B, H, T, D]."""
    B, T, C3 = qkv.shape
    return qkv.view(B, T, 3, n_head, C3 // 3 // n_head).permute(2, 0, 3, 1, 4)


def packed_reference(qkv, n_head, **options):
    q, k, v = heads(qkv, n_head)
    return reference(q, k, v, **options).transpose(1, 2).flatten(2)


class OperatorsTest(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(0)
        self.qkv = torch.randn(2, 7, 3 * 12, requires_grad=True)
        self.q = torch.randn(2, 4, 5, 8, requires_grad=True)
        self.k = torch.randn(2, 2, 9, 8, requires_grad=True)
        self.v = torch.randn(2, 2, 9, 8, requires_grad=True)
        self.mask = torch.zeros(2, 7, dtype=torch.bool)
        self.mask[1, 5:] = True

    def test_values_and_gradients_equal_the_formula(self):
        for options in ({}, {"causal": False}, {"causal": False, "key_padding_mask": self.mask}):
            ours = torch.ops.attn.packed_self_attention(self.qkv, 3, **options)
            theirs = packed_reference(self.qkv, 3, **options)
            grad = torch.randn_like(ours)
            torch.testing.assert_close(ours, theirs)
            torch.testing.assert_close(
                torch.autograd.grad(ours, self.qkv, grad), torch.autograd.grad(theirs, self.qkv, grad))
        inputs = (self.q, self.k, self.v)
        ours, theirs = torch.ops.attn.attention(*inputs), reference(*inputs)
        grad = torch.randn_like(ours)
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(torch.autograd.grad(ours, inputs, grad), torch.autograd.grad(theirs, inputs, grad))

    def test_second_derivatives(self):
        def penalty(attention, x):
            (g,) = torch.autograd.grad(attention(x, 3).square().sum(), x, create_graph=True)
            return torch.autograd.grad(g.square().sum(), x)[0]

        ours = penalty(torch.ops.attn.packed_self_attention, self.qkv)
        torch.testing.assert_close(ours, penalty(packed_reference, self.qkv), rtol=1e-4, atol=1e-4)
        x = torch.randn(1, 3, 6, dtype=torch.float64, requires_grad=True)
        torch.autograd.gradgradcheck(lambda x: torch.ops.attn.packed_self_attention(x, 1), (x,))

    def test_compiles_whole_static_and_dynamic(self):
        def loss(qkv):
            return torch.ops.attn.packed_self_attention(qkv, 3).square().sum()

        for dynamic in (False, True):
            torch._dynamo.reset()
            compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic, backend="aot_eager")
            for T in (7, 9):
                qkv = torch.randn(2, T, 36, requires_grad=True)
                torch.testing.assert_close(
                    torch.autograd.grad(compiled(qkv), qkv), torch.autograd.grad(loss(qkv), qkv))

    def test_opcheck(self):
        torch.library.opcheck(torch.ops.attn._packed_forward.default, (self.qkv.detach(), 3, True, 0.0, 0.5, None, None))
        torch.library.opcheck(
            torch.ops.attn._forward.default,
            (self.q.detach(), self.k.detach(), self.v.detach(), True, 0.0, 0.5, None, None))
        q, k, v = (x.detach() for x in (self.q, self.k, self.v))
        out, logsumexp, seed = torch.ops.attn._forward(q, k, v, True, 0.0, 0.5, None, None)
        for wanted in ([True, True, True], [True, False, False], [False, True, True]):
            torch.library.opcheck(
                torch.ops.attn._backward.default,
                (torch.ones_like(out), q, k, v, out, logsumexp, seed, True, 0.0, 0.5, None, wanted))
        torch.library.opcheck(torch.ops.attn.packed_self_attention.default, (self.qkv, 3))
        torch.library.opcheck(torch.ops.attn.attention.default, (self.q, self.k, self.v))

    def test_frozen_inputs_get_no_gradient(self):
        for frozen in range(3):
            inputs = [x.detach().clone().requires_grad_(i != frozen) for i, x in enumerate((self.q, self.k, self.v))]
            torch.ops.attn.attention(*inputs).sum().backward()
            whole = [x.detach().clone().requires_grad_() for x in inputs]
            torch.ops.attn.attention(*whole).sum().backward()
            for i in range(3):
                if i == frozen:
                    self.assertIsNone(inputs[i].grad)
                else:
                    self.assertTrue(torch.equal(inputs[i].grad, whole[i].grad))

    def test_autocast_computes_in_bfloat16(self):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            self.assertEqual(torch.ops.attn.packed_self_attention(self.qkv, 3).dtype, torch.bfloat16)
            self.assertEqual(torch.ops.attn.attention(self.q, self.k, self.v).dtype, torch.bfloat16)
        self.assertEqual(torch.ops.attn.packed_self_attention(self.qkv, 3).dtype, torch.float32)

    def test_meta_tensors_give_shapes(self):
        out = torch.ops.attn.packed_self_attention(torch.empty(2, 7, 36, device="meta"), 3)
        self.assertEqual((out.shape, out.device.type), ((2, 7, 12), "meta"))

    def test_dropout_follows_the_seed(self):
        def run(seed):
            torch.manual_seed(seed)
            return torch.ops.attn.packed_self_attention(self.qkv, 3, dropout_p=0.5)

        torch.testing.assert_close(run(1), run(1), rtol=0, atol=0)
        self.assertFalse(torch.equal(run(1), run(2)))
        generator = torch.Generator().manual_seed(1)
        before = torch.get_rng_state()
        own = torch.ops.attn.packed_self_attention(self.qkv, 3, dropout_p=0.5, generator=generator)
        torch.testing.assert_close(own, run(1), rtol=0, atol=0)
        torch.set_rng_state(before)

    def test_errors_name_requirement_and_value(self):
        with self.assertRaisesRegex(ValueError, r"multiple of 3 \* n_head \(15\), got 36"):
            torch.ops.attn.packed_self_attention(self.qkv, 5)
        with self.assertRaisesRegex(ValueError, r"dropout_p must be in \[0, 1\], got 2"):
            torch.ops.attn.packed_self_attention(self.qkv, 3, dropout_p=2.0)


if __name__ == "__main__":
    torch.ops.load_library(sys.argv.pop(1))
    unittest.main(verbosity=1)
