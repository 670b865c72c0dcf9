"""What can be set: where everything rests, how ranks share it, and how many rows they are given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ..fitting_plan import Asked, Change

KEPT, REMADE = "kept", "remade"  # activations; else the tier where they wait
_PLACED = ("offload_params", "offload_grads", "offload_optimizer")
DIRECTORY = "DIR"  # for the user to name
_MOST_BATCH = 1 << 12


@dataclass(frozen=True)
class Setting:
    """One way to train a model.

    Args:
        tiers: by kind ("params", "grads", "optimizer"), where it rests if not on the device.
        activations: "kept" on the device, "remade" in backward, or the tier where they wait.
        batch: rows of a call on a rank; None: the model comes with its inputs.
    """

    world: int
    stage: int
    replicas: int = 1
    tiers: Mapping[str, str] = field(default_factory=dict)
    activations: str = KEPT
    batch: int | None = None
    micro_batches: int = 1
    activation_budget_bytes: int | None = None
    memory_budget_bytes: int | None = (
        None  # the compiler decides, within these, what to tile, keep and make again
    )

    @property
    def ranks(self) -> int:
        """Over which one replica is sharded."""
        return self.world // self.replicas

    def tier(self, kind: str) -> str:
        return self.tiers.get(kind, "none")

    @property
    def away(self) -> bool:
        """Whether anything is on another tier."""
        return bool(self.tiers) or self.activations not in (KEPT, REMADE)

    def fields(self) -> dict[str, object]:
        """Those of Config that say so."""
        out: dict[str, object] = {"stage": self.stage}
        out |= {f"offload_{kind}": tier for kind, tier in self.tiers.items()}
        if self.activations not in (KEPT, REMADE):
            out["offload_activations"] = self.activations
        if self.activation_budget_bytes is not None:
            out["activation_budget_bytes"] = self.activation_budget_bytes
        if self.memory_budget_bytes is not None:
            out["memory_budget_bytes"] = self.memory_budget_bytes
        if "nvme" in out.values():
            out["nvme_dir"] = DIRECTORY
        return out

    def change(self, given: Mapping[str, object]) -> Change:
        """The same as a change of what is asked; what was ``given`` stays."""
        fields = {name: value for name, value in self.fields().items() if name not in given}
        return Change(
            fields,
            world=self.world,
            batch=self.batch,
            replicas=self.replicas if self.replicas > 1 else None,
            micro_batches=self.micro_batches if self.micro_batches > 1 else None,
        )


def settings(asked: Asked, world: int, global_batch: int | None, any_batch: bool) -> Iterator[Setting]:
    """Everything that can be set on ``world`` ranks, where nothing of it was asked for.

    Args:
        global_batch: rows of a step on all ranks, in as many micro-batches as that takes; None: one.
        any_batch: the rows of a rank may be chosen.
    """
    for stage, replicas in _meshes(asked, world):
        for tiers in _placements(asked, stage):
            for activations in _activations(asked):
                for batch in _batches(asked.batch, any_batch):
                    micro_batches = asked.micro_batches
                    if global_batch is not None:
                        rows = world * (batch or 1)
                        if global_batch % rows:
                            continue
                        micro_batches = global_batch // rows
                    yield Setting(world, stage, replicas, tiers, activations, batch, micro_batches)


def _meshes(asked: Asked, world: int) -> Iterator[tuple[int, int]]:
    """Stages and numbers of replicas."""
    if "stage" in asked.fields:
        stages: tuple[int, ...] = (asked.stage,)
    else:
        stages = (3, 2, 0) if world > 1 else (3,)
    for stage in stages:
        if stage == 0 or asked.replicas > 1:
            yield stage, asked.replicas
            continue
        replicas = 1
        while replicas < world and world % replicas == 0:
            yield stage, replicas
            replicas *= 2
        if world == 1:
            yield stage, 1


def _placements(asked: Asked, stage: int) -> Iterator[Mapping[str, str]]:
    """Where parameters, gradients and states rest."""
    given = asked.fields
    told = {
        name.removeprefix("offload_"): str(given[name])
        for name in _PLACED
        if given.get(name) not in (None, "none")
    }
    if any(name in given for name in _PLACED) or "device_rest_bytes" in given:
        yield told
        return
    yield {}
    for tier in tiers_of(asked):
        yield {"optimizer": tier}
        if stage == 3:
            yield {"optimizer": tier, "params": tier, "grads": tier}


def tiers_of(asked: Asked) -> tuple[str, ...]:
    """Tiers beside the device that this machine has."""
    spec = asked.machine
    host = asked.device != "cpu" and spec.host_memory_bytes is not None
    files = spec.nvme_bytes is not None or asked.fields.get("nvme_dir") is not None
    return (*(("host",) if host else ()), *(("nvme",) if files else ()))


def _activations(asked: Asked) -> tuple[str, ...]:
    told = asked.fields.get("offload_activations")
    if told is not None:
        return (KEPT if told == "none" else str(told),)
    if asked.fields.get("activation_budget_bytes") is not None:
        return (REMADE,)
    return (KEPT, REMADE, *tiers_of(asked))


def _batches(batch: int | None, any_batch: bool) -> Iterator[int | None]:
    if not any_batch:
        yield batch
        return
    rows = 1
    while rows <= _MOST_BATCH:
        yield rows
        rows *= 2
