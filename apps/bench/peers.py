#!/usr/bin/env python3
"""attn beside Python: the seeds' modules, eager and compiled, and torch.nn.MultiheadAttention.

  peers.py --bench build/release/bin/attn_bench
  peers.py --bench build/release/bin/attn_bench --generate   # GPT-2 124M beside transformers, some minutes

Runs `attn_bench serve` as a child process and takes alternating turns with it: one process works, the other
waits. Prints peer time / our time, median and least of the rounds. Needs PyTorch; torch.compile needs a C++
compiler.
"""

import argparse
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

SHAPES = [(1, 4, 8, 2), (2, 5, 16, 4), (4, 16, 32, 4), (16, 12, 32, 4), (8, 64, 128, 8)]  # B, T, C, H
INPUTS = 8  # taken in turn
VOCAB, WIDTH, HEADS, TOKENS, BATCH = 64, 32, 4, 12, 16  # the second seed's demo
RATE, SEED, BATCHES, CHECKED_STEPS = 5e-3, 42, 32, 20
PAUSE = 0.010  # seconds before a turn: OpenMP's threads spin for up to so long after the other side's last work


# --- the seeds' modules ----------------------------------------------------------------------------------


class SelfAttention(nn.Module):
    """The first seed, word for word."""

    def __init__(self, n_embd, n_head):
        super().__init__()
        assert n_embd % n_head == 0
        self.n_head, self.head_dim = n_head, n_embd // n_head
        self.qkv = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.proj = nn.Linear(n_embd, n_embd, bias=False)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(x).split(C, dim=2)
        q, k, v = (t.view(B, T, self.n_head, self.head_dim).transpose(1, 2) for t in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * self.head_dim**-0.5
        mask = torch.tril(torch.ones(T, T, dtype=torch.bool))
        att = F.softmax(att.masked_fill(~mask, float("-inf")), dim=-1)
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.proj(y)


class MultiHeadSelfAttention(nn.Module):
    """The second seed's, without dropout."""

    def __init__(self, d_model, n_heads, max_context_length):
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        self.qkv_proj = nn.Linear(d_model, 3 * d_model, bias=True)
        self.out_proj = nn.Linear(d_model, d_model, bias=True)
        mask = torch.tril(torch.ones(max_context_length, max_context_length))
        self.register_buffer("causal_mask", mask, persistent=False)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv_proj(x).chunk(3, dim=-1)
        q, k, v = (y.view(b, t, self.n_heads, self.d_head).transpose(1, 2) for y in (q, k, v))
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.d_head)
        scores = scores.masked_fill(self.causal_mask[:t, :t] == 0, float("-inf"))
        out = torch.matmul(torch.softmax(scores, dim=-1), v)
        return self.out_proj(out.transpose(1, 2).contiguous().view(b, t, d))


class TinyAttentionLM(nn.Module):
    """The second seed's model: embeddings, one attention, a linear head."""

    def __init__(self, vocab_size, d_model, n_heads, max_context_length):
        super().__init__()
        self.token_emb = nn.Embedding(vocab_size, d_model)
        nn.init.normal_(self.token_emb.weight, mean=0.0, std=0.02)
        position = torch.arange(max_context_length, dtype=torch.float32).unsqueeze(1)
        angle = position / 10000.0 ** (torch.arange(0, d_model, 2, dtype=torch.float32) / d_model)
        pe = torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)
        self.register_buffer("pe", pe, persistent=False)
        self.attn = MultiHeadSelfAttention(d_model, n_heads, max_context_length)
        self.lm_head = nn.Linear(d_model, vocab_size)

    def forward(self, ids):
        return self.lm_head(self.attn(self.token_emb(ids) + self.pe[: ids.size(1)]))


# --- the contest -----------------------------------------------------------------------------------------


class Local:
    """A contender in this process: `step` is called without arguments."""

    def __init__(self, name, step, prepare=None):
        self.name, self.step, self.prepare = name, step, prepare

    def turn(self, iterations):
        if self.prepare:
            self.prepare()
        step = self.step
        begin = time.perf_counter()
        for _ in range(iterations):
            step()
        return (time.perf_counter() - begin) / iterations

    def fill(self, seconds):
        iterations = 1
        while (taken := self.turn(iterations) * iterations) < seconds:
            iterations = math.ceil(iterations * min(100.0, max(1.1, 1.1 * seconds / taken)))
        return iterations


class Child:
    """`attn_bench serve`, see serve.h."""

    def __init__(self, program, threads):
        self.process = subprocess.Popen(
            [program, "serve", "--threads", str(threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.machine = json.loads(self.process.stdout.readline())

    def ask(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline().strip()
        if not answer or answer.startswith("error"):
            raise RuntimeError(f"attn_bench serve: {line!r}: {answer or 'it ended'}")
        return answer

    def close(self):
        self.process.stdin.close()
        self.process.wait()


class Remote:
    """A contender in the child process."""

    def __init__(self, child, name, what):
        self.child, self.name, self.what = child, name, what

    def turn(self, iterations):
        return float(self.child.ask(f"time {self.what} {iterations}"))

    def fill(self, seconds):
        return int(self.child.ask(f"fill {self.what} {seconds}"))

    def fingerprint(self):
        return [float(word) for word in self.child.ask(f"check {self.what}").split()]


def hold_contest(contenders, rounds, turn_seconds):
    """Seconds for one iteration: a list over rounds for each contender. The order is reversed each round."""
    iterations = [contender.fill(turn_seconds) for contender in contenders]
    seconds = [[] for _ in contenders]
    gc.collect()
    gc.disable()
    for r in range(rounds):
        order = range(len(contenders))
        for i in order if r % 2 == 0 else reversed(order):
            time.sleep(PAUSE)
            seconds[i].append(contenders[i].turn(iterations[i]))
    gc.enable()
    return seconds


def check(what, ours, theirs, tolerance):
    """To a share of the greatest number: others may be near 0."""
    greatest = max(abs(b) for b in theirs)
    for a, b in zip(ours, theirs, strict=True):
        if not abs(a - b) <= tolerance * greatest:
            raise RuntimeError(f"{what}: both sides must compute the same, got {ours} and {theirs}")


# --- rows ------------------------------------------------------------------------------------------------


def in_turn(function, inputs):
    """A step that gives `function` the next input each time."""
    state = [0]

    def step():
        state[0] = (state[0] + 1) % len(inputs)
        function(inputs[state[0]])

    return step


def inferring(step):
    """The step under inference_mode, which is entered each time, as a caller's function does."""

    def run():
        with torch.inference_mode():
            step()

    return run


def module_contenders(make, shape, with_compile):
    B, T, C, H = shape
    module = make(C, H, T).eval()
    inputs = [torch.randn(B, T, C) for _ in range(INPUTS)]
    expected = module(inputs[0])
    bias = getattr(module, "qkv_proj", None) is not None
    peer = nn.MultiheadAttention(C, H, bias=bias, batch_first=True).eval()
    with torch.no_grad():
        source = module.state_dict()
        peer.in_proj_weight.copy_(source["qkv_proj.weight" if bias else "qkv.weight"])
        peer.out_proj.weight.copy_(source["out_proj.weight" if bias else "proj.weight"])
        if bias:
            peer.in_proj_bias.copy_(source["qkv_proj.bias"])
            peer.out_proj.bias.copy_(source["out_proj.bias"])
    mask = nn.Transformer.generate_square_subsequent_mask(T)

    def multihead(x):
        return peer(x, x, x, attn_mask=mask, need_weights=False, is_causal=True)[0]

    torch.testing.assert_close(multihead(inputs[0]), expected, rtol=1e-4, atol=1e-5)
    contenders = [
        Local("eager", in_turn(module, inputs)),
        Local("inference", inferring(in_turn(module, inputs))),
        Local("nn.Multihead", inferring(in_turn(multihead, inputs))),
    ]
    if with_compile:
        torch._dynamo.reset()
        compiled = torch.compile(module, dynamic=False)
        with torch.inference_mode():
            torch.testing.assert_close(compiled(inputs[0]), expected, rtol=1e-4, atol=1e-5)
        contenders.append(Local("compiled", inferring(in_turn(compiled, inputs))))
    return contenders


def module_fingerprint(make, shape):
    B, T, C, H = shape
    torch.manual_seed(0)
    module = make(C, H, T)
    with torch.inference_mode():
        y = module(torch.randn(B, T, C)).double().flatten()
        ramp = torch.linspace(-1, 1, y.numel(), dtype=torch.float64)
        return [y.abs().sum().item(), (y * ramp).sum().item()]


def draw_batches():
    generator = torch.Generator().manual_seed(SEED)
    batches = []
    for _ in range(BATCHES):
        tokens = torch.randint(0, VOCAB, (BATCH, 1), generator=generator).repeat(1, TOKENS + 1)
        batches.append((tokens[:, :TOKENS], tokens[:, 1:]))
    return batches


class Training:
    """The seed's training of the repeat task."""

    def __init__(self, fused=False, compiled=False):
        torch.manual_seed(SEED)
        self.model = TinyAttentionLM(VOCAB, WIDTH, HEADS, TOKENS)
        self.forward = torch.compile(self.model, dynamic=False) if compiled else self.model
        self.initial = [p.detach().clone() for p in self.model.parameters()]
        self.fused = fused
        self.batches = draw_batches()
        self.restart()

    def restart(self):
        with torch.no_grad():
            for p, initial in zip(self.model.parameters(), self.initial, strict=True):
                p.copy_(initial)
        self.optimiser = torch.optim.Adam(self.model.parameters(), lr=RATE, fused=self.fused)
        self.next = 0

    def step(self):
        ids, targets = self.batches[self.next]
        self.next = (self.next + 1) % BATCHES
        loss = F.cross_entropy(self.forward(ids).reshape(-1, VOCAB), targets.reshape(-1))
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()
        return loss.item()

    def prepare(self):
        self.restart()
        self.step()

    def loss_after(self, steps):
        self.restart()
        return [self.step() for _ in range(steps + 1)][-1]

    def contender(self, name):
        return Local(name, self.step, self.prepare)


def lm_contenders(with_compile):
    trainings = {"eager": Training(), "fused Adam": Training(fused=True)}
    if with_compile:
        torch._dynamo.reset()
        trainings["compiled+fused"] = Training(fused=True, compiled=True)
    expected = trainings["eager"].loss_after(CHECKED_STEPS)
    for name, training in trainings.items():
        check(f"lm training, {name}", [training.loss_after(CHECKED_STEPS)], [expected], 1e-3)
    return [training.contender(name) for name, training in trainings.items()], expected


def prompt_ids(length):
    """As the other process makes them."""
    return ((torch.arange(length) * 7919 + 11) % 50257).unsqueeze(0)


class HuggingFace:
    """GPT-2 124M of transformers with random weights."""

    def __init__(self, folder):
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(bos_token_id=None, eos_token_id=None)).eval()
        with torch.no_grad():  # wide enough that the likeliest token is clear
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.mul_(5)
        model.save_pretrained(folder)
        self.models = {"float32": model, "bfloat16": GPT2LMHeadModel.from_pretrained(folder, dtype=torch.bfloat16)}

    def generate(self, dtype, prompt, count):
        ids = prompt_ids(prompt)
        mask = torch.ones_like(ids)
        with torch.inference_mode():
            return self.models[dtype].generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=count, pad_token_id=0
            )

    def step(self, dtype, length):
        """A call that computes one token behind `length` in the cache."""
        model, token = self.models[dtype].eval(), torch.ones(1, 1, dtype=torch.int64)
        with torch.inference_mode():
            cache = model(prompt_ids(length), use_cache=True).past_key_values

        def run():
            with torch.inference_mode():
                model(token, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache.crop(-1)  # what this call added

        return run


def bench_generate(tables, child):
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        peer = HuggingFace(folder)
        for dtype in ("float32", "bfloat16"):
            tables.begin(f"GPT-2 124M, {dtype}, beside transformers")
            for part, prompt, count, name in (("decode", 16, 64, "16 + 64 tokens"), ("prefill", 512, 1, "prompt of 512")):
                if not tables.wants(name):
                    continue
                what = f"generate {dtype},{part},{count if part == 'decode' else prompt},{folder}"
                if dtype == "float32":  # bfloat16's roundings differ, and a token on
                    ids = peer.generate(dtype, prompt, count).double().flatten().tolist()
                    check(what, Remote(child, "ours", what).fingerprint(), ids, 0)
                tables.add(name, what, [Local("transformers", lambda p=prompt, n=count: peer.generate(dtype, p, n))])
            for length in (16, 1000):
                name = f"step at {length}"
                if tables.wants(name):
                    what = f"generate {dtype},step,{length},{folder}"
                    tables.add(name, what, [Local("transformers", peer.step(dtype, length))])
            tables.end()


# --- tables ----------------------------------------------------------------------------------------------


def number(value):
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


class Tables:
    def __init__(self, child, rounds, turn_seconds, pattern):
        self.child, self.rounds, self.turn_seconds, self.filter = child, rounds, turn_seconds, pattern
        self.tables = []

    def begin(self, title):
        self.tables.append({"title": title, "rows": []})

    def wants(self, name):
        return self.filter in name

    def add(self, name, what, peers):
        ours = Remote(self.child, "ours", what)
        seconds = hold_contest([ours, *peers, ours], self.rounds, self.turn_seconds)
        mine = [(a + b) / 2 for a, b in zip(seconds[0], seconds[-1], strict=True)]
        noise = statistics.median(abs(a / b - 1) for a, b in zip(seconds[0], seconds[-1], strict=True))
        row = {"name": name, "our_seconds": statistics.median(mine), "noise": noise, "peers": {}}
        for peer, theirs in zip(peers, seconds[1:-1], strict=True):
            ratios = [t / m for t, m in zip(theirs, mine, strict=True)]
            row["peers"][peer.name] = {"median": statistics.median(ratios), "least": min(ratios)}
        row["rounds"] = {c.name: s for c, s in zip([ours, *peers], seconds, strict=False)}
        table = self.tables[-1]
        if not table["rows"]:
            print(f"\n{table['title']}: peer time / our time, median (least of the rounds)\n")
            print(f"{'':<18}{'ours, us':>11}" + "".join(f"{p.name:>16}" for p in peers) + f"{'A/A':>8}")
        cells = [f"{number(r['median'])} ({number(r['least'])})" for r in row["peers"].values()]
        print(
            f"{name:<18}{number(row['our_seconds'] * 1e6):>11}"
            + "".join(f"{c:>16}" for c in cells)
            + f"{noise * 100:>6.1f} %",
            flush=True,
        )
        table["rows"].append(row)

    def end(self):
        rows = self.tables[-1]["rows"]
        if not rows:
            self.tables.pop()
            return
        medians = [[row["peers"][peer]["median"] for row in rows] for peer in rows[0]["peers"]]
        for title, of in (("geometric mean", statistics.geometric_mean), ("least", min)):
            print(f"{title:<29}" + "".join(f"{number(of(m)):>16}" for m in medians))


def bench_modules(tables, child, kind, title, make, with_compile):
    tables.begin(title)
    for shape in SHAPES:
        name = ",".join(map(str, shape))
        if not tables.wants(name):
            continue
        what = f"{kind} {name}"
        check(what, Remote(child, "ours", what).fingerprint(), module_fingerprint(make, shape), 1e-4)
        tables.add(name, what, module_contenders(make, shape, with_compile))
    tables.end()


def bench_lm(tables, child, with_compile):
    tables.begin("TinyAttentionLM, one training step")
    if tables.wants("training step"):
        peers, loss = lm_contenders(with_compile)
        check("lm training", Remote(child, "ours", "lm training").fingerprint(), [loss], 1e-3)
        tables.add("training step", "lm training", peers)
    tables.end()


def write_json(path, document):
    """Written beside, then renamed: a reader sees the old file or the whole new one."""
    beside = Path(f"{path}.{os.getpid()}.tmp")
    beside.write_text(json.dumps(document, indent=2) + "\n")
    beside.replace(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", required=True, metavar="FILE", help="the program attn_bench")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of each process")
    parser.add_argument("--filter", default="", metavar="TEXT", help="only rows whose name holds this")
    parser.add_argument("--generate", action="store_true", help="GPT-2 beside transformers, instead of the modules")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--quick", action="store_true", help="fewer rounds of shorter turns")
    parser.add_argument("--json", metavar="FILE", help="write everything measured")
    options = parser.parse_args()

    load = os.getloadavg()[0]
    torch.set_num_threads(options.threads)
    child = Child(options.bench, options.threads)
    machine = child.machine
    rounds, turn_seconds = (3, 0.002) if options.quick else (9, 0.010)
    print(
        f"attn {machine['attn']}, LibTorch {machine['libtorch']} ({machine['instruction_set']}), "
        f"Python's torch {torch.__version__} ({torch.backends.cpu.get_cpu_capability()}); "
        f"{machine['cpu']}, {options.threads} threads each on {machine['cores']} cores"
    )
    print(f"{rounds} rounds, turns of {turn_seconds * 1e3:g} ms, load average {load:.2f}")
    if load > 0.5:
        print("warning: the machine is busy; figures may be off")
    if torch.__version__.split("+")[0] != machine["libtorch"]:
        print("warning: the two sides have different versions of LibTorch")

    tables = Tables(child, rounds, turn_seconds, options.filter)
    with_compile = not options.no_compile
    if options.generate:
        bench_generate(tables, child)
    else:
        bench_modules(
            tables, child, "module", "SelfAttention, inference", lambda C, H, T: SelfAttention(C, H), with_compile
        )
        bench_modules(
            tables, child, "multi_head", "MultiHeadSelfAttention, inference", MultiHeadSelfAttention, with_compile
        )
        bench_lm(tables, child, with_compile)
    child.close()
    if not tables.tables:
        parser.error(f"--filter must be a part of a row's name, got {options.filter}")
    if options.json:
        settings = {"rounds": rounds, "turn_seconds": turn_seconds, "load": load, "torch": torch.__version__}
        write_json(options.json, {"machine": machine, **settings, "tables": tables.tables})


if __name__ == "__main__":
    try:
        main()
    except (RuntimeError, OSError, AssertionError) as error:
        sys.exit(f"peers.py: {error}")
