"""Reinforcement learning on CPUs with spccl.sync: a trainer, and two policy workers that sample with its weights.

    python examples/rl/grpo.py --steps 20

As in GRPO (Shao et al. 2024), each prompt gets a group of answers, and an answer's advantage is its reward less the
group's mean, over the group's deviation. The reward is the share of tokens below a quarter of the vocabulary. The
trainer has float32 weights; bfloat16 travels. After each step every worker's weights are compared with the trainer's,
bit for bit. With transformers installed the model is a small Qwen3 with random weights, else a few layers of torch.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import spccl

VOCABULARY, LENGTH, PROMPTS, GROUP = 256, 12, 8, 8
WAIT_S = 120


class Small(torch.nn.Module):
    """Tokens [n, length] -> logits [n, length, VOCABULARY], of what stands before each place."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, width)
        self.layer = torch.nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.head = torch.nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight  # tied: travels once
        torch.nn.init.normal_(self.embed.weight, std=0.05)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=self.head.weight.dtype)
        return self.head(self.layer(self.embed(tokens), src_mask=mask, is_causal=True))


def make_model(kind: str, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    if kind == "torch":
        return Small()
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCABULARY, "tie_word_embeddings": True}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads))


def logits_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    out = model(tokens)
    return (out if isinstance(out, torch.Tensor) else out.logits).float()


def bits_of(model: torch.nn.Module) -> str:
    """A hash of all weights as bfloat16."""
    found = hashlib.sha256()
    for name, x in sorted(model.named_parameters()):
        found.update(name.encode())
        found.update(x.detach().to(torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes())
    return found.hexdigest()


@torch.no_grad()
def sample(model: torch.nn.Module, prompts: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """GROUP answers to each prompt: tokens [prompts * GROUP, 1 + LENGTH]."""
    tokens = prompts.repeat_interleave(GROUP).unsqueeze(1)
    for _ in range(LENGTH):
        chances = logits_of(model, tokens)[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=random)], dim=1)
    return tokens


def work(folder: str, kind: str, rank: int, tasks: Any, answers: Any) -> None:
    """A policy worker: takes a version's weights, and samples with them."""
    torch.set_num_threads(1)
    model = make_model(kind, seed=1000 + rank).to(torch.bfloat16)
    pull = spccl.sync.Subscriber(folder, model)
    random = torch.Generator().manual_seed(rank)
    while (task := tasks.get(timeout=WAIT_S)) is not None:
        version, prompts = task
        pull.stage(version, timeout_s=WAIT_S)
        start = time.perf_counter()  # a server stops serving here
        assert pull.commit() == version
        pause_ms = 1e3 * (time.perf_counter() - start)
        answers.put((rank, version, bits_of(model), pause_ms, sample(model, prompts, random).numpy()))


def learn(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, vocabulary: int = VOCABULARY
) -> float:
    """A step on answers [prompts * GROUP, 1 + LENGTH]. Returns their mean reward."""
    rewards = (tokens[:, 1:] < vocabulary // 4).float().mean(1)
    groups = rewards.view(-1, GROUP)
    advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()
    log_chances = logits_of(model, tokens[:, :-1]).log_softmax(-1)
    of_tokens = log_chances.gather(2, tokens[:, 1:].unsqueeze(2)).squeeze(2)
    loss = -(advantages.unsqueeze(1) * of_tokens).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(rewards.mean())


def train(folder: str, args: argparse.Namespace, queues: list[Any], answers: Any) -> None:
    torch.set_num_threads(1)
    model = make_model(args.model, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    random = torch.Generator().manual_seed(7)
    with spccl.sync.Publisher(folder, model, wire_dtype=torch.bfloat16) as push:
        for step in range(args.steps):
            version = push.publish()
            wanted = bits_of(model)
            for queue in queues:
                queue.put((version, torch.randint(VOCABULARY, (PROMPTS,), generator=random)))
            got = [answers.get(timeout=WAIT_S) for _ in queues]
            for rank, theirs, bits, _, _ in got:
                if (theirs, bits) != (version, wanted):
                    raise RuntimeError(f"worker {rank}: version {theirs} has other bits than the trainer's {version}")
            tokens = torch.cat([torch.from_numpy(tokens) for *_, tokens in sorted(got, key=lambda row: row[0])])
            reward = learn(model, optimizer, tokens)
            sent, pause_ms = push.stats(), max(pause for _, _, _, pause, _ in got)
            changed = sent["changed"] / sent["elements"]
            print(
                f"step {step}: reward {reward:.2f}, version {version}: {changed:.1%} changed, "
                f"delta {sent['delta_bytes']} bytes, anchor {sent['anchor_bytes']}; {len(got)} workers have its bits, "
                f"pause {pause_ms:.1f} ms",
                flush=True,
            )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    has_transformers = importlib.util.find_spec("transformers") is not None
    parser.add_argument(
        "--model", choices=("torch", "transformers"), default="transformers" if has_transformers else "torch"
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=3e-3, help="1e-6 is usual: then few weights change their bits")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", help="where the versions go; a new one, in place of a temporary one")
    args = parser.parse_args(argv)
    processes = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as made:
        folder = args.folder or str(Path(made, "run"))
        queues, answers = [processes.Queue() for _ in range(args.workers)], processes.Queue()
        workers = [
            processes.Process(target=work, args=(folder, args.model, rank, queue, answers), daemon=True)
            for rank, queue in enumerate(queues)
        ]
        for worker in workers:
            worker.start()
        try:
            train(folder, args, queues, answers)
            for queue in queues:
                queue.put(None)
            for worker in workers:
                worker.join(WAIT_S)
        finally:
            for worker in workers:
                worker.kill()
    return 0 if all(worker.exitcode == 0 for worker in workers) else 1


if __name__ == "__main__":
    sys.exit(main())
