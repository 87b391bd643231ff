#!/usr/bin/env python3
"""A small byte-level BPE tokenizer and what it makes of difficult texts, by the package `tokenizers`.

  generate_bpe.py --out DIR   writes bpe/tokenizer.json, bpe/vocab.json, bpe/merges.txt and bpe_cases.json into DIR
  generate_bpe.py --check     computes the ids again and compares with the files beside this script
"""

import argparse
import json
import sys
from pathlib import Path

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind: it's asleep.",
    "In the beginning was the word; in the end there were tokens. We've seen them, they'll see us, I'd say.",
    "Attention is all you need, said the paper, and the model attended to the attention of the others.",
    "def forward(self, x):\n    return self.proj(self.attend(self.qkv(x)))  # [B, T, C]\n",
    "for (int i = 0; i < 10; ++i) { total += weights[i] * values[i]; }\n",
    "Die Größe der Straße: 12,5 Meter. Où est le café? El niño comió piñas mañana. Příliš žluťoučký kůň.",
    "注意力是你所需要的一切。 深い学習のモデル。 주의가 필요합니다.",
    "3.14159 26535 89793 2026-12-06 10:15:30 1000000 0x7fff",
    "😀 😃 👩‍💻 🇩🇪 ❤️ 🏳️‍🌈",
]
CASES = SENTENCES + [
    "", " ", "  ", "   a", "a   ", "a\n\n b", "\t\ttabs\tand\r\nlines\n", "\u00a0no-break\u2003em\u3000wide\u2028line",
    "\u180emongolian\u200bzero", "it's IT'S they'Re we'lls 'tis", "<|endoftext|>", "a<|endoftext|>b <|endoftext|><|endoftext|>",
    "<|endoftext", "x" * 300, " " * 50 + "end", "ab" * 100, "ﬁ ǅ Ⅷ ½ ² ٣ ४", "e\u0301 \u0065\u0301 ñ n\u0303", "\x00\x01\x7f",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 😀😀😀", "snake_case camelCase SCREAMING-KEBAB", "a.b,c;d:e!f?g", "١٢٣ 123abc456", "…—“quoted”",
]


def train():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<|endoftext|>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(SENTENCES * 3, trainer)
    return tokenizer


def cases(tokenizer):
    return [dict(text=text, ids=tokenizer.encode(text).ids) for text in CASES]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--out", type=Path, metavar="DIR")
    action.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    try:
        from tokenizers import Tokenizer
    except ImportError:
        print("skipped: the package tokenizers can't be imported")
        return 77
    if arguments.check:
        here = Path(__file__).parent
        tokenizer = Tokenizer.from_file(str(here / "bpe" / "tokenizer.json"))
        same = cases(tokenizer) == json.loads((here / "bpe_cases.json").read_text("utf-8"))
        print("bpe_cases:", "ok" if same else "DIFFERS")
        return 0 if same else 1
    tokenizer = train()
    folder = arguments.out / "bpe"
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.model.save(str(folder))
    (arguments.out / "bpe_cases.json").write_text(json.dumps(cases(tokenizer), indent=1), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
