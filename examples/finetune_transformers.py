"""Fine-tunes a `transformers` model with its own loss, its own code and a plain loop; then saves and loads it.

    python examples/finetune_transformers.py
    torchrun --standalone --nproc-per-node 2 examples/finetune_transformers.py

The model has a small random configuration, so that nothing is downloaded; a pretrained one
(`AutoModelForCausalLM.from_pretrained(...)`) takes its place in one line.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from text import standard_library
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

import zero_compiler as zero

CONTEXT, BATCH = 64, 8


def make_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--compute", choices=("inductor", "aten"), default="inductor")
    parser.add_argument("--checkpoint", type=Path, help="folder to save to; default: one that is thrown away")
    args = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if ranks > 1 else 0

    torch.manual_seed(0)
    model = zero.shard(make_model(), stage=3, device="cpu")
    compiled = torch.compile(model, backend="zero", options={"compute": args.compute})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=args.steps + 1)
    training, _ = standard_library()
    draws = torch.Generator().manual_seed(rank)

    model.train()
    for step in range(1, args.steps + 1):
        tokens, _ = training.windows(training.random_starts(BATCH, CONTEXT, draws), CONTEXT)
        loss = compiled(input_ids=tokens, labels=tokens).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if rank == 0 and (step % 10 == 0 or step in (1, args.steps)):
            print(f"step {step:>3}  loss {loss.item():.3f}  norm {norm.item():.2f}", flush=True)

    # Every rank writes and reads its own rows; any number of ranks can read what these wrote.
    with tempfile.TemporaryDirectory() as scratch:
        where = [str(args.checkpoint or scratch)]
        if ranks > 1:
            dist.broadcast_object_list(where)
        saved, states = get_state_dict(model, optimizer)
        dcp.save({"model": saved, "optimizer": states}, checkpoint_id=where[0], no_dist=ranks == 1)

        other = zero.shard(make_model(), stage=3, device="cpu")
        resumed = torch.optim.AdamW(other.parameters(), lr=3e-3, weight_decay=0.01)
        blank, blank_states = get_state_dict(other, resumed)
        state = {"model": blank, "optimizer": blank_states}
        dcp.load(state, checkpoint_id=where[0], no_dist=ranks == 1)
        set_state_dict(other, resumed, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        if ranks > 1:
            dist.barrier()

    tokens, _ = training.windows(training.even_starts(BATCH, CONTEXT), CONTEXT)
    model.eval()
    other.eval()
    with torch.no_grad():
        # The loaded model runs without compile here: right, only slower.
        ours, theirs = model(tokens, labels=tokens).loss.item(), other(tokens, labels=tokens).loss.item()
    if rank == 0:
        print(f"loss after save and load: {theirs:.6f} (before: {ours:.6f})", flush=True)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
