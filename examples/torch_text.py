"""Learns to write Python: a byte-level transformer on the text of Python's own standard library.

python examples/torch_text.py
bagua-run -np 2 python examples/torch_text.py
torchrun --nproc-per-node 2 examples/torch_text.py

Every rank draws the same global batch and takes its share, so the number of processes does not
change what is learned.
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
import time
from pathlib import Path

import torch
from progress import Progress
from torch import nn
from torch.nn import functional

import bagua_ext.torch as bagua

CONTEXT = 128
HEAD_WIDTH = 64
TEST_WINDOWS = 256


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8, help="windows a step, all ranks together")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rate", type=float, default=1e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the loss curve there")
    args = parser.parse_args()
    if args.batch < bagua.size():
        parser.error(f"--batch {args.batch} leaves some of {bagua.size()} ranks without work")
    if args.width % HEAD_WIDTH:
        parser.error(f"--width {args.width} is no multiple of {HEAD_WIDTH}")
    return args


def load_text() -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes to train on, then the last twentieth of every module to test with."""
    folder = Path(sysconfig.get_path("stdlib"))
    contents = [bytearray(path.read_bytes()) for path in sorted(folder.glob("*.py"))]
    files = [torch.frombuffer(content, dtype=torch.uint8) for content in contents if content]
    parts = [text.split([len(text) - len(text) // 20, len(text) // 20]) for text in files]
    return torch.cat([train for train, _ in parts]), torch.cat([test for _, test in parts])


class Block(nn.Module):
    """Causal self-attention, then two dense layers; each adds to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.attended = nn.Linear(width, width, bias=False)
        self.norm_dense = nn.LayerNorm(width)
        self.dense = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.queries_keys_values(self.norm_attention(x)).chunk(3, dim=-1)
        q, k, v = (p.view(batch, length, self.heads, -1).transpose(1, 2) for p in parts)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attended(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.dense(self.norm_dense(x))


class Writer(nn.Module):
    """Scores of each next byte, given the bytes before it."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.bytes_before = nn.Embedding(256, width)
        self.places = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, width // HEAD_WIDTH) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:  # what is added to the main path starts smaller
                adds = name.endswith(("attended.weight", "dense.2.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if adds else 0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        # Each place also gets the byte before it, so that pairs need not be learned by attention.
        before = functional.pad(self.bytes_before(text[:, :-1]), (0, 0, 1, 0))
        x = self.bytes(text) + before + self.places.weight[: text.shape[1]]
        return functional.linear(self.norm(self.blocks(x)), self.bytes.weight)


def windows(text: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and the bytes that follow them."""
    spans = text[starts.unsqueeze(1) + torch.arange(CONTEXT + 1)].long()
    return spans[:, :-1], spans[:, 1:]


def nats_per_byte(model: nn.Module, text: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    inputs, targets = windows(text, starts)
    return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def share(starts: torch.Tensor) -> tuple[torch.Tensor, float]:
    """This rank's windows, and the weight that makes the ranks' average the mean over all."""
    mine = starts[bagua.rank() :: bagua.size()]
    return mine, len(mine) * bagua.size() / len(starts)


def test_loss(model: nn.Module, text: torch.Tensor) -> float:
    """Nats per byte on windows spread evenly over ``text``; every rank judges its part."""
    mine, weight = share(torch.linspace(0, len(text) - CONTEXT - 1, TEST_WINDOWS).long())
    with torch.no_grad():
        losses = [nats_per_byte(model, text, part) * len(part) for part in mine.split(16)]
    return bagua.allreduce(sum(losses) / len(mine) * weight).item()


def main() -> None:
    bagua.init()
    args = parse_arguments()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // bagua.local_size()))
    torch.manual_seed(args.seed)
    train, test = load_text()

    model = Writer(args.width, args.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, betas=(0.9, 0.98))
    bagua.broadcast_parameters(model.state_dict(), root_rank=0)
    bagua.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = bagua.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=args.rate, total_steps=args.steps, pct_start=0.1, cycle_momentum=False
    )
    if bagua.rank() == 0:
        count = sum(parameter.numel() for parameter in model.parameters())
        print(f"{count / 1e6:.1f} M parameters, {len(train) / 1e6:.1f} MB of text", flush=True)

    progress = Progress(args.steps, enabled=bagua.rank() == 0)
    draw = torch.Generator().manual_seed(args.seed)
    curve = []
    start = time.perf_counter()
    for _ in range(args.steps):
        mine, weight = share(torch.randint(len(train) - CONTEXT, (args.batch,), generator=draw))
        optimizer.zero_grad()
        loss = nats_per_byte(model, train, mine) * weight
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        curve.append(loss.detach())
        progress.advance(f"loss {loss.item() / weight:.2f} nats per byte")
    seconds = time.perf_counter() - start
    progress.close()

    losses = bagua.allreduce(torch.stack(curve)).tolist()
    final = test_loss(model, test)
    if bagua.rank() == 0:
        if args.json:
            args.json.write_text(json.dumps({"loss": losses, "test_loss": final}) + "\n")
        rate = args.steps * args.batch / seconds
        print(f"{rate * CONTEXT:.0f} bytes/s in {seconds:.0f} s")
        print(f"test loss {final:.2f} nats per byte, {rate:.0f} samples/s")
    bagua.shutdown()


if __name__ == "__main__":
    main()
