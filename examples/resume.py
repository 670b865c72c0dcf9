"""Training that goes on where it was when a rank is killed: with the losses that it would have had, bit for bit.

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/resume.py --folder run

When a rank ends with an error, or is killed, torchrun starts all ranks anew, and they load the newest whole checkpoint
of the folder (`checkpoints.py`): weights, states of the optimizer, of the learning-rate schedule and of random
generators, and the place in the data. So does the same command once more, also with another number of ranks and with
states on another tier: the samples then come in the same order, and sums of floating point in another.
"""

from __future__ import annotations

import argparse
import itertools
import os
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoints import Checkpoints
from gpt import GPT, GPTConfig
from text import Text, standard_library
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.data import DataLoader, Dataset, Sampler

import zero_compiler as zero

CONTEXT = 32


class Windows(Dataset[torch.Tensor]):
    """Pieces of a text, one behind the other, each with the byte that follows it."""

    def __init__(self, text: Text) -> None:
        self._data = text.data

    def __len__(self) -> int:
        return (len(self._data) - 1) // CONTEXT

    def __getitem__(self, i: int) -> torch.Tensor:
        return self._data[i * CONTEXT : (i + 1) * CONTEXT + 1].long()


class GlobalBatches(Sampler[list[int]]):
    """A rank's part of each batch, without end: in another order every epoch, the same for any number of ranks.

    Its place is ``taken``, which the training loop counts: workers of a DataLoader draw batches ahead of it.
    """

    def __init__(self, samples: int, batch: int, seed: int, rank: int, world: int) -> None:
        if batch % world:
            raise SystemExit(f"--batch {batch} is not a multiple of {world} ranks, which share it")
        self._samples, self._batch, self._seed = samples, batch, seed
        self._rank, self._world = rank, world
        self.taken = 0

    def __iter__(self) -> Iterator[list[int]]:
        per_epoch = self._samples // self._batch
        epochs, first = divmod(self.taken, per_epoch)
        for epoch in itertools.count(epochs):
            shuffling = torch.Generator().manual_seed(self._seed + epoch)
            batches = torch.randperm(self._samples, generator=shuffling).split(self._batch)[:per_epoch]
            for batch in batches[first:]:
                yield batch[self._rank :: self._world].tolist()
            first = 0


class Training:
    """All that a checkpoint holds, as `torch.distributed.checkpoint` asks for it (its protocol `Stateful`)."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: torch.optim.lr_scheduler.LRScheduler,
        batches: GlobalBatches,
        seed: int,
    ) -> None:
        self.model, self.optimizer, self.schedule = model, optimizer, schedule
        self.batches, self._seed = batches, seed

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        schedule = self.schedule.state_dict()
        random_states = pickle.dumps(gathered((random.getstate(), torch.get_rng_state())))
        place = {"taken": self.batches.taken}
        return {
            "model": model,
            "optimizer": optimizer,
            "schedule": schedule,
            "random": random_states,
            "data": place,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.schedule.load_state_dict(state["schedule"])
        self.batches.taken = state["data"]["taken"]
        states = pickle.loads(state["random"])
        if len(states) == world_size():
            random.setstate(states[rank()][0])
            torch.set_rng_state(states[rank()][1])
        else:  # each rank had its own: with another number of them there are new ones
            seed_all(self._seed + self.batches.taken * world_size() + rank())


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def gathered(value: Any) -> list[Any]:
    """What every rank has given."""
    values = [value] * world_size()
    if dist.is_initialized():
        dist.all_gather_object(values, value)
    return values


def seed_all(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="for the checkpoints of this run")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16, help="samples a step, which the ranks share")
    parser.add_argument("--save-every", type=int, default=20, help="steps")
    parser.add_argument("--keep", type=int, default=2, help="checkpoints")
    parser.add_argument("--beside", action="store_true", help="go on while a checkpoint is written")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--compute", choices=("inductor", "aten"), default="inductor")
    parser.add_argument("--offload-params", choices=("none", "nvme"), default="none")
    parser.add_argument("--offload-optimizer", choices=("none", "nvme"), default="none")
    parser.add_argument("--nvme-dir", help="for what is offloaded")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if "RANK" in os.environ:
        # torchrun keeps its store for all attempts, and addresses of ranks that are gone stand in it: each attempt has
        # keys of its own.
        store, *place = next(dist.rendezvous("env://"))
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        own = dist.PrefixStore(f"attempt-{attempt}", store)
        dist.init_process_group("gloo", store=own, rank=place[0], world_size=place[1])

    seed_all(args.seed)
    model = GPT(GPTConfig(layers=args.layers, width=64, heads=2, context=CONTEXT))
    model.token = nn.Sequential(model.token, nn.Dropout(args.dropout))
    tiers = {"offload_params": args.offload_params, "offload_optimizer": args.offload_optimizer}
    zero.shard(model, stage=3, device="cpu", nvme_dir=args.nvme_dir, **tiers)
    compiled = torch.compile(model, backend="zero", options={"compute": args.compute})
    optimizer = zero.optimizer(torch.optim.AdamW, model, lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    windows = Windows(standard_library()[0])
    batches = GlobalBatches(len(windows), args.batch, args.seed, rank(), world_size())
    seed_all(args.seed + rank())  # each rank drops other values

    training = Training(model, optimizer, schedule, batches, args.seed)
    checkpoints = Checkpoints(args.folder, args.keep)
    if (step := checkpoints.load({"training": training})) is not None and rank() == 0:
        print(f"goes on from the checkpoint of step {step}", flush=True)
    # A generator of its own: from the default one a DataLoader takes a number whenever it is iterated.
    loader = DataLoader(windows, batch_sampler=batches, generator=torch.Generator())
    for rows in itertools.islice(loader, args.steps - batches.taken):
        loss = compiled(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        batches.taken += 1
        mean = sum(gathered(loss.item())) / world_size()
        if rank() == 0:
            print(f"step {batches.taken:>4}  loss {mean!r}  norm {norm.item():.3f}", flush=True)
        if batches.taken % args.save_every == 0 or batches.taken == args.steps:
            checkpoints.save(batches.taken, {"training": training}, beside=args.beside)
    checkpoints.wait()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
