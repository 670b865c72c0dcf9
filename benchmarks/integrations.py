"""Training by other libraries: sharded by zero beside the library's own data-parallel training of the same model.

    python benchmarks/integrations.py --json out.json

A GPT-2 of transformers (float32, AdamW of torch) is trained on two ranks, by DDP and by zero at stage 3 with
`compute="aten"`. "of losses": their largest difference from DDP's, over all steps and ranks. "reduced": bytes of
gradients that a rank gives to reductions in a step, as zero's engine counts them; of DDP all of them. "memory": what a
rank's resident memory (VmHWM) grows while the model is made and trained, the largest of the ranks; a small one was
trained before, for the imports.
"""

import tempfile
from functools import partial
from typing import Any

import common
import torch
from accelerate import Accelerator
from export import resident, restart_peak
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import zero_compiler as zero
from zero_compiler.integrations.accelerate import ZeroPlugin
from zero_compiler.integrations.transformers import ZeroMixin
from zero_compiler.params.modules import sharded_models_of

RANKS, BATCH, TOKENS = 2, 2, 32
HEAD = ("library", "way", "last loss", "of losses", "reduced, MiB", "memory, MiB")
FIELDS: dict[str, Any] = {"stage": 3, "compute": "aten"}
Rows = list[dict[str, Any]]
loader = partial(torch.utils.data.DataLoader, batch_size=BATCH)


def main() -> None:
    call = common.called()
    if call is not None:
        measure(call)
    parser = common.parser(__doc__)
    for name, value in {"width": 1024, "layers": 1, "steps": 10}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json")
    args = parser.parse_args()
    m, rows, found = common.machine(), [], {}
    # As torchrun tells them; by the first Lightning knows that ranks are started.
    env = {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": str(RANKS)}
    for tool in TOOLS:
        for way in ("ddp", "zero"):
            asked = {"tool": tool, "way": way, **vars(args)}
            found[f"{tool} {way}"] = ranks = common.run_ranks(__file__, asked, RANKS, env=env)
            pairs = zip(found[f"{tool} ddp"], ranks, strict=True)
            off = max(abs(a - b) for d, z in pairs for a, b in zip(d["losses"], z["losses"], strict=True))
            mib = f"{ranks[0]['reduced'] / 2**20:.1f}", f"{max(r['memory'] for r in ranks) / 2**20:.0f}"
            rows.append((tool, way, f"{ranks[0]['losses'][-1]:.4f}", f"{off:.1e}", *mib))
    title = f"GPT-2 of {args.layers} layers of {args.width}, {RANKS} ranks, {args.steps} steps"
    common.print_table(title, HEAD, rows)
    if args.json:
        text = common.heading("Training by other libraries", m) + common.table(title, HEAD, rows)
        common.save(args.json, {"machine": m, "ranks": found}, text)


def measure(call: dict[str, Any]) -> None:
    common.init_group()
    run, ours = TOOLS[call["tool"]], call["way"] == "zero"
    run(ours, *made(32, call["layers"], 2))
    restart_peak()
    before = resident("VmRSS")
    losses, model = run(ours, *made(call["width"], call["layers"], call["steps"]))
    memory, reduced = resident("VmHWM") - before, sum(p.nbytes for p in model.parameters())
    if ours:
        counters = dict(sharded_models_of(model)[0].runtime.engine.counters())
        reduced = counters["bytes_reduced"] // call["steps"]
    common.answer(call, {"losses": losses, "memory": memory, "reduced": reduced})


def made(width: int, layers: int, steps: int) -> tuple[Any, Rows]:
    """The model, and rows for so many steps of all ranks."""
    torch.manual_seed(0)
    size = {"n_embd": width, "n_layer": layers, "n_head": 4, "vocab_size": 512, "n_positions": TOKENS}
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "bos_token_id", "eos_token_id"), 0)
    ids = torch.randint(0, 512, (steps * BATCH * RANKS, TOKENS))
    return GPT2LMHeadModel(GPT2Config(**size, **none)), [{"input_ids": row, "labels": row} for row in ids]


def adamw(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-4)


def loop(model: Any, optimizer: Any, batches: Any, backward: Any) -> tuple[list[float], Any]:
    losses = []
    for batch in batches:
        loss = model(**batch).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def by_accelerate(ours: bool, model: Any, rows: Rows) -> tuple[list[float], Any]:
    accelerator = Accelerator(cpu=True, fsdp_plugin=ZeroPlugin(**FIELDS) if ours else None)
    return loop(*accelerator.prepare(model, adamw(model), loader(rows)), accelerator.backward)


def by_trainer(ours: bool, model: Any, rows: Rows) -> tuple[list[float], Any]:
    fields = {
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
    }
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(folder, per_device_train_batch_size=BATCH, num_train_epochs=1, **fields)
        kind: Any = Trainer
        if ours:
            kind = partial(type("Sharded", (ZeroMixin, Trainer), {}), zero=zero.Config(**FIELDS))
        trainer = kind(model, args, train_dataset=rows, optimizers=(adamw(model), None))
        trainer.train()
    return [float(h["loss"]) for h in trainer.state.log_history if "loss" in h], trainer.model


def by_fabric(ours: bool, model: Any, rows: Rows) -> tuple[list[float], Any]:
    from lightning.fabric import Fabric

    from zero_compiler.integrations.lightning import ZeroFabricStrategy

    strategy = ZeroFabricStrategy(**FIELDS) if ours else "ddp"
    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy=strategy)
    fabric.launch()
    model, optimizer = fabric.setup(model, adamw(model))
    return loop(model, optimizer, fabric.setup_dataloaders(loader(rows)), fabric.backward)


def by_lightning(ours: bool, net: Any, rows: Rows) -> tuple[list[float], Any]:
    import lightning.pytorch as pl

    from zero_compiler.integrations.lightning import ZeroStrategy

    losses: list[float] = []

    class Model(pl.LightningModule):
        configure_optimizers = adamw

        def training_step(self, batch: Any, index: int) -> Any:
            loss = self.net(**batch).loss
            losses.append(loss.item())
            return loss

    model = Model()
    model.net = net
    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet, strategy = dict.fromkeys(names, False), ZeroStrategy(**FIELDS) if ours else "ddp"
    pl.Trainer(strategy=strategy, accelerator="cpu", devices=RANKS, max_epochs=1, **quiet).fit(
        model, loader(rows)
    )
    return losses, model


TOOLS = {"accelerate": by_accelerate, "Trainer": by_trainer, "Lightning": by_lightning, "Fabric": by_fabric}

if __name__ == "__main__":
    main()
