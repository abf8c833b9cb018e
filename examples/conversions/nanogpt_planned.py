"""A small GPT trained as nanoGPT's train.py does it: settings at the top, one loop, accumulation, a cosine rate.

Run: torchrun --nproc-per-node 4 examples/conversions/nanogpt_planned.py [losses.json]
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autoddl

# evaluation and length
eval_interval, eval_iters, max_iters = 4, 2, 8
# data
gradient_accumulation_steps, batch_size, block_size = 2, 8, 32
# model
n_layer, n_head, n_embd, vocab_size = 2, 4, 64, 96
# optimizer
learning_rate, weight_decay, beta1, beta2, grad_clip = 3e-3, 1e-1, 0.9, 0.95, 1.0
warmup_iters, lr_decay_iters, min_lr = 2, 8, 3e-4
# system
device, cluster = "cpu", sys.argv[2] if len(sys.argv) > 2 else "examples/clusters/laptop.yaml"
output = sys.argv[1] if len(sys.argv) > 1 else ""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn, self.proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.up, self.down = nn.Linear(n_embd, 4 * n_embd), nn.Linear(4 * n_embd, n_embd)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (one.view(B, T, n_head, C // n_head).transpose(1, 2) for one in self.attn(self.ln_1(x)).split(C, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        return torch.add(x, self.down(F.gelu(self.up(self.ln_2(x)))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.h, self.ln_f = nn.ModuleList(Block() for _ in range(n_layer)), nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        nn.init.normal_(self.wte.weight, std=0.02)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, vocab_size), targets.view(-1))

    def configure_optimizers(self) -> torch.optim.AdamW:
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        vectors = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(beta1, beta2))


text = " ".join(str(number * number) for number in range(1000)).encode()
data = {"train": torch.tensor([byte % vocab_size for byte in text[:3000]]),
        "val": torch.tensor([byte % vocab_size for byte in text[3000:4000]])}


def get_batch(split: str) -> tuple[Tensor, Tensor]:
    ix = torch.randint(len(data[split]) - block_size, (batch_size,))
    x = torch.stack([data[split][i:i + block_size] for i in ix])
    y = torch.stack([data[split][i + 1:i + 1 + block_size] for i in ix])
    return x.to(device), y.to(device)


torch.manual_seed(1337)
model: Any = GPT()
parallel = autoddl.parallelize(model, autoddl.plan(model, cluster, get_batch("train")))
autoddl.planned_module(parallel)
torch.manual_seed(1)
optimizer = model.configure_optimizers()


@torch.no_grad()
def estimate_loss() -> dict[str, float]:
    out = {}
    model.eval()
    for split in ("train", "val"):
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            X, Y = get_batch(split)
            _, loss = model(X, Y)
            losses[k] = loss.item()
        out[split] = losses.mean().item()
    model.train()
    return out


def get_lr(it: int) -> float:
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


found = []
for iter_num in range(max_iters):
    for param_group in optimizer.param_groups:
        param_group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0:
        estimated = estimate_loss()
        found += list(estimated.values())
        print(f"step {iter_num}: train loss {estimated['train']:.4f}, val loss {estimated['val']:.4f}")
    for _ in range(gradient_accumulation_steps):
        X, Y = get_batch("train")
        _, loss = model(X, Y)
        loss = loss / gradient_accumulation_steps
        loss.backward()
    norm = parallel.clip_grad_norm_(grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    found += [loss.item() * gradient_accumulation_steps, norm.item()]
if output:
    Path(output).write_text(json.dumps(found))
