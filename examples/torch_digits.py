"""Learns scikit-learn's handwritten digits, on one process or on several.

python examples/torch_digits.py
bagua-run -np 2 python examples/torch_digits.py
torchrun --nproc-per-node 2 examples/torch_digits.py

Each global batch is cut by rank, so N processes together see exactly the batches that one process
sees, and the loss curve is the same.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from progress import Progress
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import bagua_ext.torch as bagua


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch", type=int, default=64, help="samples a step, all ranks together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the loss curve there")
    return parser.parse_args()


def load(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images and labels to train on (80 %), then those to test with."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16 - 0.5
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    train, test = order.split([len(order) * 4 // 5, len(order) - len(order) * 4 // 5])
    return images[train], labels[train], images[test], labels[test]


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 2 * 2, 10),
    )


def test_accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Share of right answers; every rank judges its part."""
    mine = slice(bagua.rank(), None, bagua.size())
    with torch.no_grad():
        right = (model(images[mine]).argmax(1) == labels[mine]).sum()
    return bagua.allreduce(right, op=bagua.Sum).item() / len(labels)


def main() -> None:
    args = parse_arguments()
    bagua.init()
    torch.set_num_threads(1)  # the net is too small to share out
    torch.manual_seed(args.seed)
    images, labels, test_images, test_labels = load(args.seed)

    model = make_model()
    steps = -(-len(labels) // args.batch) * args.epochs
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    bagua.broadcast_parameters(model.state_dict(), root_rank=0)
    bagua.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = bagua.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)

    progress = Progress(steps, enabled=bagua.rank() == 0)
    shuffle = torch.Generator().manual_seed(args.seed)
    curve: list[float] = []
    start = time.perf_counter()
    for epoch in range(args.epochs):
        losses = []
        for batch in torch.randperm(len(labels), generator=shuffle).split(args.batch):
            mine = batch[bagua.rank() :: bagua.size()]
            optimizer.zero_grad()
            # The average over ranks of (sum of my losses * ranks / batch) is the batch's mean loss,
            # also when the ranks' parts are not equally long.
            total = functional.cross_entropy(model(images[mine]), labels[mine], reduction="sum")
            loss = total * bagua.size() / len(batch)
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
            progress.advance(f"epoch {epoch + 1}/{args.epochs}  loss {loss.item():.4f}")
        curve += bagua.allreduce(torch.stack(losses)).tolist()
    seconds = time.perf_counter() - start
    progress.close()

    accuracy = test_accuracy(model, test_images, test_labels)
    if bagua.rank() == 0:
        if args.json:
            args.json.write_text(json.dumps({"loss": curve, "accuracy": accuracy}) + "\n")
        rate = len(labels) * args.epochs / seconds
        print(f"test accuracy {100 * accuracy:.1f} %, {rate:.0f} samples/s")
    bagua.shutdown()


if __name__ == "__main__":
    main()
