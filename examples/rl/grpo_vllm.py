"""The loop of grpo.py with a vLLM server in place of the policy workers.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --dtype bfloat16 --weight-transfer-config '{"backend": "spccl"}'
    python examples/rl/grpo_vllm.py --url http://localhost:8000 --folder /shared/run1

The server samples, this process trains. Before each step the server takes what the step before changed, from the
folder, which both see. Needs vLLM 0.29 or later with spccl installed beside it, and transformers here.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request
from typing import Any

import torch
from grpo import GROUP, LENGTH, PROMPTS, learn

import spccl

WAIT_S = 120


def ask(url: str, route: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/{route}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        return json.load(answer)


def sample(url: str, name: str, prompts: torch.Tensor) -> torch.Tensor:
    """GROUP answers of the server to each prompt of one token: tokens [prompts * GROUP, 1 + LENGTH]."""
    options = {"n": GROUP, "max_tokens": LENGTH, "temperature": 1.0, "ignore_eos": True, "return_token_ids": True}
    rows = []
    for prompt in prompts.tolist():
        answer = ask(url, "v1/completions", {"model": name, "prompt": [prompt], **options})
        rows += [[prompt, *choice["token_ids"]] for choice in answer["choices"]]
    return torch.tensor(rows)


def main(argv: list[str] | None = None) -> int:
    from transformers import AutoModelForCausalLM

    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--folder", required=True, help="where the versions go; the server sees it by the same path")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-6)
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    served = ask(args.url, "v1/models")["data"][0]  # root: the checkpoint that it was started with
    model = AutoModelForCausalLM.from_pretrained(served["root"], dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    vocabulary = model.config.vocab_size
    client = spccl.sync.VllmClient(args.url, args.folder)
    with spccl.sync.Publisher(args.folder, model, wire_dtype=torch.bfloat16) as push:
        for step in range(args.steps):
            version = client.update(push.publish())
            tokens = sample(args.url, served["id"], torch.randint(vocabulary, (PROMPTS,)))
            reward = learn(model, optimizer, tokens, vocabulary)
            sent = push.stats()
            print(
                f"step {step}: reward {reward:.2f}, version {version}: {sent['changed'] / sent['elements']:.1%} "
                f"changed, delta {sent['delta_bytes']} bytes, pause {1e3 * client.pause_s:.0f} ms",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
