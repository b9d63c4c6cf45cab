"""Train a small transformer to predict the next byte of Python's own standard library.

    sky-monarch up task_templates/quickstart.yaml      four replica groups, any of which may die and return
    python -m sky_monarch.training.recipes.byte_lm     the same program, alone

At the end it compares itself, on files that it has not seen, with two tables of counts: the unigram (how
common is each byte) and the bigram (how common is each byte after each other byte).
"""

# ruff: noqa: N803, N806, T201  # suffixes of tensors name their shapes; a recipe prints
from __future__ import annotations

import argparse
import math
import sysconfig
import time
import zlib
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from sky_monarch.training import Sampler, Session, seed_everything

BYTES = 256
CONTEXT = 64
WIDTH = 64
LAYERS = 2
HEADS = 4
HELD_OUT_ONE_IN = 10
# Folders of the standard library that are not written by hand, or not always installed.
SKIPPED = {
    "site-packages",
    "test",
    "idlelib",
    "lib2to3",
    "ensurepip",
    "encodings",
    "pydoc_data",
    "turtledemo",
}


# The data: source files, split into training and held-out *files*, the same way on every machine.


def read_corpus() -> tuple[torch.Tensor, torch.Tensor]:
    """Training and held-out text, each one uint8 tensor of shape ``(num_bytes,)``."""
    root = Path(sysconfig.get_path("stdlib"))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for path in sorted([*root.glob("*.py"), *root.glob("*/*.py")]):
        name = path.relative_to(root).as_posix()
        if name.split("/")[0] not in SKIPPED:
            held_out = zlib.crc32(name.encode()) % HELD_OUT_ONE_IN == 0
            parts[held_out].append(path.read_bytes())
    train, held_out = (torch.frombuffer(bytearray(b"\n".join(part)), dtype=torch.uint8) for part in parts)
    return train, held_out


def windows_of(text_B: torch.Tensor) -> torch.Tensor:
    """The text cut into the samples of an epoch: ``(num_windows, CONTEXT + 1)`` bytes."""
    return text_B[: len(text_B) - len(text_B) % (CONTEXT + 1)].view(-1, CONTEXT + 1)


# The model: a plain pre-norm transformer. Suffixes name shapes: samples S, batch N, time T, width D, heads H.


class Block(nn.Module):  # type: ignore[misc]  # torch is not type-checked
    """Attention, then a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x_NTD: torch.Tensor) -> torch.Tensor:
        """Shape in, shape out: ``(batch, time, width)``."""
        batch, time_, _ = x_NTD.shape
        qkv = self.qkv(self.norm1(x_NTD)).view(batch, time_, 3, HEADS, WIDTH // HEADS)
        q_NHTD, k_NHTD, v_NHTD = qkv.permute(2, 0, 3, 1, 4)
        mixed_NHTD = F.scaled_dot_product_attention(q_NHTD, k_NHTD, v_NHTD, is_causal=True)
        x_NTD = x_NTD + self.out(mixed_NHTD.transpose(1, 2).reshape(x_NTD.shape))
        return x_NTD + self.mlp(self.norm2(x_NTD))


class ByteTransformer(nn.Module):  # type: ignore[misc]
    """Bytes in, logits of the next byte out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, BYTES, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.7 / math.sqrt(module.in_features))

    def forward(self, bytes_NT: torch.Tensor) -> torch.Tensor:
        """``(batch, time)`` bytes to ``(batch, time, 256)`` logits."""
        x_NTD = self.embed(bytes_NT) + self.position.weight[: bytes_NT.shape[1]]
        return self.head(self.norm(self.blocks(x_NTD)))


def loss_of(model: nn.Module, inputs_NT: torch.Tensor, targets_NT: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats a byte."""
    return F.cross_entropy(model(inputs_NT).flatten(0, 1), targets_NT.flatten())


# The yardsticks: what counting alone achieves on the held-out files.


def unigram_loss(train_B: torch.Tensor, held_out_B: torch.Tensor) -> float:
    """Nats a byte of a model that knows how common each byte is."""
    counts = torch.bincount(train_B, minlength=BYTES).double() + 1
    seen = torch.bincount(held_out_B, minlength=BYTES).double()
    return float(-(seen * (counts / counts.sum()).log()).sum() / seen.sum())


def bigram_loss(train_B: torch.Tensor, held_out_B: torch.Tensor) -> float:
    """Nats a byte of a model that knows how common each byte is after each other byte."""

    def pairs(text_B: torch.Tensor) -> torch.Tensor:
        codes = text_B[:-1].int() * BYTES + text_B[1:].int()
        return torch.bincount(codes, minlength=BYTES * BYTES).view(BYTES, BYTES).double()

    counts, seen = pairs(train_B) + 0.01, pairs(held_out_B)
    return float(-(seen * (counts / counts.sum(1, keepdim=True)).log()).sum() / seen.sum())


@torch.no_grad()  # type: ignore[untyped-decorator]
def held_out_loss(model: nn.Module, held_out_B: torch.Tensor, windows: int = 1024) -> float:
    """Nats a byte on ``windows`` evenly spaced windows of the held-out files."""
    starts = torch.linspace(0, len(held_out_B) - CONTEXT - 2, windows).long().unsqueeze(1)
    text_NT = held_out_B[starts + torch.arange(CONTEXT + 1)].long()
    losses = [loss_of(model, part[:, :-1], part[:, 1:]) for part in text_NT.split(64)]
    return float(torch.stack(losses).mean())


# The training.


def main() -> None:
    """Train, and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400, help="steps to commit (default: %(default)s)")
    parser.add_argument(
        "--batch", type=int, default=16, help="windows per replica and step (default: %(default)s)"
    )
    parser.add_argument("--lr", type=float, default=5e-3, help="highest learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of everything (default: %(default)s)")
    parser.add_argument(
        "--report-every", type=int, default=25, help="steps between two lines (default: %(default)s)"
    )
    args = parser.parse_args()

    torch.set_num_threads(1)  # the replicas of the quickstart share one machine
    train_B, held_out_B = read_corpus()
    windows_ST = windows_of(train_B)
    sampler = Sampler(len(windows_ST), args.batch)

    seed_everything(args.seed)  # every replica builds the same model
    model = ByteTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)

    def learning_rate(step: int) -> float:
        warmup = min(1.0, (step + 1) / 20)
        cosine = 0.5 * (1 + math.cos(math.pi * step / args.steps))
        return float(args.lr * warmup * (0.1 + 0.9 * cosine))

    def before_update(step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    started = stepped = time.monotonic()
    with Session(
        model,
        optimizer,
        target_step=args.steps,
        sampler=sampler,
        seed=args.seed,
        before_update=before_update,
    ) as session:
        while session.running:
            text_NT = windows_ST[sampler.indices()].long()
            loss = loss_of(model, text_NT[:, :-1], text_NT[:, 1:])
            loss.backward()
            before, stepped = stepped, time.monotonic()
            committed = session.step_optimizer(
                metrics={
                    "loss": loss.detach(),
                    "lr": learning_rate(session.step),
                    "tokens_per_s": args.batch * CONTEXT / (stepped - before),
                }
            )
            if committed and session.is_leader and session.step % args.report_every == 0:
                print(
                    f"step {session.step:4d}  loss {loss.item():.3f}  {time.monotonic() - started:5.1f} s",
                    flush=True,
                )

        print(
            f"replica {session.replica}: step {session.step} parameters {session.digest()[:16]}", flush=True
        )
        if session.is_leader:
            with session.pause("held-out evaluation", limit_s=120):
                loss_held_out = held_out_loss(model, held_out_B)
                unigram, bigram = unigram_loss(train_B, held_out_B), bigram_loss(train_B, held_out_B)
            print(
                f"held-out loss {loss_held_out:.3f} nats a byte "
                f"(unigram {unigram:.3f}, bigram {bigram:.3f}), "
                f"parameters {session.digest()[:16]}",
                flush=True,
            )


if __name__ == "__main__":
    main()
