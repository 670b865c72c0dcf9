"""Lightning's Trainer and Fabric with ``strategy="zero"`` on two CPU ranks, beside its own DDP with the same script."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dist.cases import Cases, refused
from dist.library_runs import (
    as_rank,
    differences,
    one_rank_alone,
    reduced_seldom,
    shared_folder,
    weights,
)
from dist.loops import counters
from torch import nn

from zero_compiler.errors import ConfigError, IntegrationError
from zero_compiler.optim.optimizer import StreamedOptimizer
from zero_compiler.params.modules import is_root, sharded_models_of

# Not imported here: it puts another function in place of torch.compile, for every test of the process.
missing = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="needs the extra lightning"
)
pytestmark = [pytest.mark.dist, pytest.mark.slow, missing]

cases = Cases(__name__, spawns=2)
CLOSE = 1e-6
CLOSE_BF16 = 3e-2


def as_elastic() -> None:
    as_rank()
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "none",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }


def rows() -> Any:
    generator = torch.Generator().manual_seed(1)
    return torch.utils.data.TensorDataset(
        torch.randn(48, 8, generator=generator), torch.randn(48, 3, generator=generator)
    )


def module(pl: Any, kind: str = "parts", lr: float = 1e-2) -> Any:
    """A LightningModule whose step calls parts of it ("parts"), itself ("whole"), or computes by itself ("bare"), which
    a validation of it does not."""

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Linear(8, 17), nn.GELU())
            self.heads = nn.ModuleList([nn.Linear(17, 3)])
            self.scale = nn.Parameter(torch.ones(3))
            self.losses: list[float] = []
            self.validated: list[float] = []
            self.reduced: list[int] = []  # bytes so far, after each micro-batch

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.heads[0](self.body(x)) * self.scale

        def computed(self, x: torch.Tensor) -> torch.Tensor:
            if kind == "whole":
                return self(x)
            if kind == "parts":
                return self.heads[0](self.body(x)) * self.scale
            hidden = F.gelu(F.linear(x, self.body[0].weight, self.body[0].bias))
            return F.linear(hidden, self.heads[0].weight, self.heads[0].bias) * self.scale

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = F.mse_loss(self.computed(batch[0]).float(), batch[1])
            self.log("loss", loss)
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            computed = self(batch[0]) if kind == "bare" else self.computed(batch[0])
            loss = F.mse_loss(computed.float(), batch[1])
            self.log("val", loss, sync_dist=True)
            self.validated.append(loss.item())

        def on_train_batch_end(self, *_: Any) -> None:
            if is_root(self):
                self.reduced.append(counters(self)["bytes_reduced"])

        def test_step(self, batch: Any, index: int) -> None:
            self.validation_step(batch, index)

        def predict_step(self, batch: Any, index: int) -> torch.Tensor:
            return self(batch[0])

        def configure_optimizers(self) -> Any:
            opt = torch.optim.AdamW(self.parameters(), lr=lr, eps=1e-4)
            return [opt], [{"scheduler": torch.optim.lr_scheduler.StepLR(opt, 2, 0.5), "interval": "step"}]

    return Model()


def trainer(pl: Any, strategy: Any, folder: Path, **kwargs: Any) -> Any:
    as_elastic()
    return pl.Trainer(
        **{
            "strategy": strategy,
            "accelerator": "cpu",
            "devices": 2,
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": str(folder),
            **kwargs,
        }
    )


def loader(batch: int = 4) -> Any:
    return torch.utils.data.DataLoader(rows(), batch_size=batch)


def fitted(
    strategy: Any, kind: str = "parts", pl: Any = None, **kwargs: Any
) -> tuple[Any, Any, dict[str, Any]]:
    if pl is None:
        import lightning.pytorch as pl
    with shared_folder() as folder:
        model = module(pl, kind)
        t = trainer(pl, strategy, folder, **kwargs)
        t.fit(model, loader(), loader())
        said = {"losses": model.losses, "validated": model.validated, "weights": weights(model)}
        return t, model, said


def zero_strategy(**fields: Any) -> Any:
    from zero_compiler.integrations.lightning import ZeroStrategy

    return ZeroStrategy(**{"compute": "aten", **fields})


@cases.add
def fit_has_the_numbers_of_ddp(rank: int) -> list[str]:
    errors = []
    for kind in ("parts", "whole"):
        _, _, plain = fitted("ddp", kind)
        for stage in (1, 3):
            _, model, ours = fitted(zero_strategy(stage=stage), kind)
            errors += differences(f"{kind} stage {stage}", ours, plain, CLOSE)
            if not is_root(model) or not sharded_models_of(model)[0].frames:
                errors.append(f"{kind} stage {stage}: not sharded, or not compiled")
    return errors


@cases.add
def a_step_without_modules_is_eager_and_says_so(rank: int) -> list[str]:
    """Also where a validation before it was compiled."""
    import logging

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zero_compiler").addHandler(handler)
    _, _, plain = fitted("ddp", "bare")
    _, _, ours = fitted(zero_strategy(), "bare")
    logging.getLogger("zero_compiler").removeHandler(handler)
    errors = differences("bare", ours, plain, CLOSE)
    return errors + ([] if sum("trains sharded but eagerly" in s for s in said) == 1 else [f"said: {said}"])


@cases.add
def accumulation_and_clipping(rank: int) -> list[str]:
    errors = []
    for kwargs in (
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3},
        {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
    ):
        _, _, plain = fitted("ddp", **kwargs)
        _, model, ours = fitted(zero_strategy(), **kwargs)
        errors += differences(str(kwargs), ours, plain, CLOSE)
        every = kwargs.get("accumulate_grad_batches", 1)
        errors += reduced_seldom("Trainer", model.reduced, range(every - 1, 6, every))
    return errors


@cases.add
def bf16_mixed(rank: int) -> list[str]:
    _, _, plain = fitted("ddp", precision="bf16-mixed")
    _, model, ours = fitted(zero_strategy(), precision="bf16-mixed")
    dtype = sharded_models_of(model)[0].config.param_dtype
    return differences("bf16", ours, plain, CLOSE_BF16) + ([] if dtype == torch.bfloat16 else [f"{dtype}"])


@cases.add
def other_precisions(rank: int) -> list[str]:
    """Of weights, and on the CPU Lightning makes "16-mixed" "bf16-mixed"."""
    errors = []
    for precision, dtype, close in (
        ("64-true", torch.float64, CLOSE),
        ("bf16-true", torch.bfloat16, CLOSE_BF16),
        ("16-mixed", torch.float32, CLOSE_BF16),
    ):
        _, _, plain = fitted("ddp", precision=precision)
        _, model, ours = fitted(zero_strategy(), precision=precision)
        errors += differences(precision, ours, plain, close)
        found = {p.dtype for p in model.parameters()}
        errors += [] if found == {dtype} else [f"{precision}: weights of {found}"]
    for strategy in ("zero", zero_strategy()):
        asked = refused(
            lambda s=strategy: fitted(s, precision="transformer-engine"),
            ConfigError,
            "zero trains with precision",
        )
        errors += asked
    return errors


def gan(pl: Any) -> Any:
    """Two optimizers that the step itself calls, one part of the model at a time, as Lightning documents it."""

    class Gan(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.automatic_optimization = False
            self.generator = nn.Sequential(nn.Linear(8, 17), nn.GELU(), nn.Linear(17, 3))
            self.discriminator = nn.Sequential(nn.Linear(3, 13), nn.LeakyReLU(0.2), nn.Linear(13, 1))
            self.scale = nn.Parameter(torch.ones(3))
            self.losses: list[float] = []

        def forward(self, z: torch.Tensor) -> torch.Tensor:
            return self.generator(z) * self.scale

        def says(self, x: torch.Tensor, wanted: float) -> torch.Tensor:
            said = self.discriminator(x)
            return F.binary_cross_entropy_with_logits(said, torch.full_like(said, wanted))

        def updated(self, opt: Any, loss: torch.Tensor) -> None:
            self.manual_backward(loss)
            self.clip_gradients(opt, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            opt.step()
            opt.zero_grad()
            self.untoggle_optimizer(opt)
            self.losses.append(loss.item())

        def training_step(self, batch: Any, index: int) -> None:
            of_generator, of_discriminator = self.optimizers()
            self.toggle_optimizer(of_generator)
            self.updated(of_generator, self.says(self(batch[0]), 1.0))
            self.toggle_optimizer(of_discriminator)
            made = self(batch[0]).detach()
            self.updated(of_discriminator, (self.says(batch[1], 1.0) + self.says(made, 0.0)) / 2)

        def configure_optimizers(self) -> Any:
            parts = [*self.generator.parameters(), self.scale], list(self.discriminator.parameters())
            return [torch.optim.Adam(part, lr=1e-2, eps=1e-4) for part in parts], []

    return Gan()


@cases.add
def manual_optimization_with_two_optimizers(rank: int) -> list[str]:
    import lightning.pytorch as pl

    def run(strategy: Any, epochs: int = 1, go_on: Any = None, save: Any = None) -> dict[str, Any]:
        with shared_folder() as folder:
            model, t = gan(pl), trainer(pl, strategy, folder, max_epochs=epochs)
            t.fit(model, loader(), ckpt_path=go_on)
            if save is not None:
                t.save_checkpoint(save)
            return {"losses": model.losses[-12:], "weights": weights(model)}

    with shared_folder() as folder:
        file = str(folder / "last.ckpt")
        plain = run("ddp_find_unused_parameters_true")
        errors = differences("two optimizers", run(zero_strategy(), save=file), plain, CLOSE)
        dist.barrier()
        whole = run(zero_strategy(), 2)
        return errors + differences("resumed", run(zero_strategy(), 2, go_on=file), whole, 0.0)


@cases.add
def callbacks_that_copy_the_model_are_refused(rank: int) -> list[str]:
    from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging

    errors = []
    for callback in (StochasticWeightAveraging(swa_lrs=1e-2), WeightAveraging()):
        errors += refused(
            lambda c=callback: fitted(zero_strategy(), callbacks=[c]),
            IntegrationError,
            f"{type(callback).__name__} copies the whole model before zero shards it",
        )
    return errors


@cases.add
def checkpoints_go_on_and_load_plainly(rank: int) -> list[str]:
    return [e for sharded in (False, True) for e in resumed(save_distributed_checkpoint=sharded)]


@cases.add_thorough
def checkpoints_of_what_lies_in_files_go_on(rank: int) -> list[str]:
    """With clipping, and as ``zero_stage_3_nvme``."""
    away = dict.fromkeys(("offload_params", "offload_grads", "offload_optimizer"), "nvme")
    with shared_folder() as folder:
        return resumed(**away, nvme_dir=str(folder))


def resumed(**fields: Any) -> list[str]:
    """What is wrong with a second epoch that goes on from a checkpoint."""
    import lightning.pytorch as pl

    def run(folder: Path, epochs: int, go_on: str | None = None) -> tuple[Any, Any]:
        model = module(pl)
        t = trainer(pl, zero_strategy(**fields), folder, max_epochs=epochs, gradient_clip_val=0.3)
        t.fit(model, loader(), ckpt_path=go_on)
        return t, model

    with shared_folder() as folder:
        file = folder / "last.ckpt"
        t, model = run(folder, 1)
        t.save_checkpoint(file)
        held = weights(model)
        dist.barrier()
        (_, again), (_, whole) = run(folder, 2, str(file)), run(folder, 2)
        errors = differences(f"{fields}", weights(again), weights(whole), 0.0)
        if file.is_file():
            found = torch.load(file, weights_only=False)["state_dict"]
            errors += differences("plain file", dict(found), held, 0.0)
        elif not fields.get("save_distributed_checkpoint"):
            errors.append(f"{fields}: no plain file")
    return errors


@cases.add_thorough
def the_best_checkpoint_and_early_stopping(rank: int) -> list[str]:
    """After a validation that comes before training."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

    def run(strategy: Any) -> dict[str, Any]:
        with shared_folder() as folder:
            model = module(pl)
            kept = ModelCheckpoint(dirpath=folder, monitor="val", mode="max")
            callbacks = [kept, EarlyStopping("val", mode="max", patience=1)]
            t = trainer(pl, strategy, folder, max_epochs=6, enable_checkpointing=True, callbacks=callbacks)
            before = t.validate(model, loader(), verbose=False)[0]
            t.fit(model, loader(), loader())
            epochs, losses = t.current_epoch, list(model.losses)
            tested = t.test(model, loader(), ckpt_path="best", verbose=False)[0]
            return {
                "before": before, "epochs": epochs, "losses": losses, "best": kept.best_model_score,
                "tested": tested, "weights": weights(model),
            }  # fmt: skip

    plain = run("ddp")
    errors = [] if plain["epochs"] < 6 else ["training did not end early"]
    for sharded in (False, True):
        ours = run(zero_strategy(save_distributed_checkpoint=sharded))
        errors += differences(f"sharded={sharded}", ours, plain, CLOSE)
    return errors


@cases.add
def what_one_rank_saves_alone_is_refused(rank: int) -> list[str]:
    """Instead of waiting for the timeout of the process group."""
    t, model, _ = fitted(zero_strategy())
    return one_rank_alone(
        "Trainer.save_checkpoint()", lambda: t.save_checkpoint("nowhere"), lambda: model(torch.zeros(2, 8))
    )


@cases.add
def names_and_their_placement(rank: int) -> list[str]:
    import zero_compiler.integrations.lightning  # noqa: F401

    errors = []
    _, _, plain = fitted("ddp")
    os.environ.pop("ZERO_NVME_DIR", None)
    try:
        fitted("zero_stage_3_nvme")
        errors.append("zero_stage_3_nvme without a directory: nothing was raised")
    except ConfigError as error:
        errors += [] if "ZERO_NVME_DIR" in str(error) else [str(error)]
    with shared_folder() as folder:
        os.environ["ZERO_NVME_DIR"] = str(folder)
        for name in ("zero", "zero_stage_1", "zero_stage_2", "zero_stage_3_offload", "zero_stage_3_nvme"):
            t, model, ours = fitted(name)
            errors += differences(name, ours, plain, CLOSE)
            config = sharded_models_of(model)[0].config
            stage = int(name[11]) if "stage" in name else 3
            tier = "nvme" if "nvme" in name else "host" if "offload" in name else None
            if config.stage != stage or config.offload_optimizer != tier:
                errors.append(f"{name}: {config}")
            if (tier is not None) != isinstance(t.optimizers[0], StreamedOptimizer):
                errors.append(f"{name}: {t.optimizers[0]}")
    return errors


@cases.add
def prediction_without_training(rank: int) -> list[str]:
    import lightning.pytorch as pl

    made = []
    for strategy in ("ddp", zero_strategy()):
        with shared_folder() as folder:
            t = trainer(pl, strategy, folder)
            made.append(torch.cat(t.predict(module(pl), loader())))
    return differences("predicted", made[1], made[0], CLOSE)


@cases.add
def the_finder_of_a_learning_rate(rank: int) -> list[str]:
    """It trains, and leaves the model as it was; training begins with the rate that it found."""
    import lightning.pytorch as pl
    from lightning.pytorch.tuner import Tuner

    def run(strategy: Any) -> dict[str, Any]:
        with shared_folder() as folder:
            model = module(pl)
            model.lr = 1e-3
            model.configure_optimizers = lambda: torch.optim.AdamW(model.parameters(), lr=model.lr, eps=1e-4)
            t = trainer(pl, strategy, folder)
            found = Tuner(t).lr_find(model, loader(), num_training=12, early_stop_threshold=None)
            tried = list(found.results["loss"])
            model.losses.clear()
            t.fit(model, loader())
            return {"tried": tried, "found": model.lr, "losses": model.losses, "weights": weights(model)}

    return differences("lr_find", run(zero_strategy()), run("ddp"), CLOSE)


@cases.add
def pytorch_lightning_has_the_names_too(rank: int) -> list[str]:
    import pytorch_lightning as pl

    import zero_compiler.integrations.lightning  # noqa: F401

    _, _, plain = fitted("ddp", pl=pl)
    _, model, ours = fitted("zero", pl=pl)
    return differences("pytorch_lightning", ours, plain, CLOSE) + ([] if is_root(model) else ["not sharded"])


@cases.add
def fabric_loops(rank: int) -> list[str]:
    from lightning.fabric import Fabric

    import zero_compiler.integrations.lightning  # noqa: F401
    from zero_compiler.integrations.lightning import ZeroFabricStrategy

    errors: list[str] = []

    def run(strategy: Any, apart: bool, **kwargs: Any) -> dict[str, Any]:
        as_elastic()
        fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, **kwargs)
        fabric.launch()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 17), nn.GELU(), nn.Linear(17, 3))
        opt = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
        if apart:
            model = fabric.setup_module(model)
            opt = fabric.setup_optimizers(opt)
        else:
            model, opt = fabric.setup(model, opt)
        losses, counts = [], []
        for step, (x, y) in enumerate(fabric.setup_dataloaders(loader())):
            waits = step % 2 == 0
            with fabric.no_backward_sync(model, enabled=waits):
                loss = F.mse_loss(model(x).float(), y)
                fabric.backward(loss)
            losses.append(loss.item())
            if is_root(model.module):
                counts.append(counters(model.module)["bytes_reduced"])
            if not waits:
                fabric.clip_gradients(model, opt, max_norm=0.5)
                opt.step()
                opt.zero_grad()
        if apart:
            errors.extend(reduced_seldom("fabric", counts, (1, 3, 5)))
            errors.extend(
                one_rank_alone(
                    "Fabric.save()",
                    lambda: fabric.save("nowhere", {"model": model}),
                    lambda: model(torch.zeros(2, 8)),
                )
            )
        with shared_folder() as folder:
            held = weights(model.module)
            fabric.save(folder / "state", {"model": model, "opt": opt, "step": 3})
            for p in model.parameters():
                p.detach().mul_(0)
            fabric.load(folder / "state", {"model": model, "opt": opt, "step": 0})
        return {"losses": losses, "weights": held, "loaded": weights(model.module)}

    plain = run("ddp", False)
    errors += differences("fabric", run("zero", False), plain, CLOSE)
    in_float64 = run("ddp", False, precision="64-true")
    errors += differences("64-true", run("zero", False, precision="64-true"), in_float64, CLOSE)
    errors += differences("fabric apart", run(ZeroFabricStrategy(compute="aten"), True), plain, CLOSE)
    return errors


def distilled(strategy: str, folder: Path, resume: bool = False, **kwargs: Any) -> dict[str, Any]:
    """A loop of Fabric with a frozen model beside the one that is trained, clipped by value, with a scheduler that
    Fabric does not know. It is saved in the middle, or goes on from there."""
    from lightning.fabric import Fabric

    as_elastic()
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, **kwargs)
    fabric.launch()
    torch.manual_seed(0)
    student, teacher = (nn.Sequential(nn.Linear(8, 17), nn.GELU(), nn.Linear(17, 3)) for _ in range(2))
    opt = torch.optim.AdamW(student.parameters(), lr=1e-2, eps=1e-4)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step))
    student, opt = fabric.setup(student, opt)
    teacher = teacher.requires_grad_(False)
    if strategy != "ddp":
        teacher = fabric.setup_module(teacher)
    state = {"student": student, "opt": opt}
    if resume:
        sched.load_state_dict(fabric.load(folder / "state", state)["sched"])
    losses = []
    for step, (x, _) in enumerate(fabric.setup_dataloaders(loader())):
        if step < 3 and resume:
            continue
        if step == 3 and not resume and strategy != "ddp":
            fabric.save(folder / "state", {**state, "sched": sched.state_dict()})
        with torch.no_grad():
            wanted = teacher(x)
        loss = F.mse_loss(student(x).float(), wanted.float())
        fabric.backward(loss)
        fabric.clip_gradients(student, opt, clip_val=0.05)
        opt.step()
        sched.step()
        opt.zero_grad()
        losses.append(loss.item())
    return {
        "losses": losses[-3:],
        "rate": opt.param_groups[0]["lr"],
        "weights": weights(student.module),
    }


def fabric_goes_on(name: str, close: float = CLOSE, **kwargs: Any) -> list[str]:
    import zero_compiler.integrations.lightning  # noqa: F401

    with shared_folder() as folder:
        os.environ["ZERO_NVME_DIR"] = str(folder)
        plain = distilled("ddp", folder, **kwargs)
        ours = distilled(name, folder, **kwargs)
        again = distilled(name, folder, True, **kwargs)
        errors = differences(name, ours, plain, close)
        return errors + differences(f"{name} resumed", again, ours, 0.0)


@cases.add
def fabric_goes_on_in_files(rank: int) -> list[str]:
    return fabric_goes_on("zero_stage_3_nvme")


@cases.add_thorough
def fabric_goes_on_by_other_names(rank: int) -> list[str]:
    names = ("zero_stage_1", "zero_stage_2", "zero_stage_3_offload")
    errors = [e for name in names for e in fabric_goes_on(name)]
    return errors + fabric_goes_on("zero", CLOSE_BF16, precision="bf16-mixed")


@cases.add
def a_checkpoint_of_fabric_holds_one_model(rank: int) -> list[str]:
    from lightning.fabric import Fabric

    import zero_compiler.integrations.lightning  # noqa: F401

    as_elastic()
    fabric = Fabric(accelerator="cpu", devices=2, strategy="zero")
    fabric.launch()
    state = {name: fabric.setup_module(nn.Linear(8, 3)) for name in ("one", "two")}
    errors = []
    for verb, call in (("save", fabric.save), ("load", fabric.load)):
        said = f"Fabric.{verb}() has 2 models that zero shards (Linear, Linear)"
        errors += refused(
            lambda c=call: c("nowhere", state), IntegrationError, said, f"{verb} each model alone"
        )
    return errors


ALONE = """
import sys
sys.modules["lightning"] = sys.modules["pytorch_lightning"] = None  # as where they are not installed
import torch
from lightning_fabric import Fabric
import zero_compiler.integrations.lightning
fabric = Fabric(accelerator="cpu", devices=2, strategy="zero")
fabric.launch()
model = torch.nn.Linear(4, 4)
model, opt = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
fabric.backward(model(torch.ones(2, 4)).sum())
opt.step()
print(f"rank {fabric.global_rank} of {fabric.world_size} {type(model.weight).__name__}\\n", end="", flush=True)
"""

LAUNCHES = """
import json, sys, torch
import lightning.pytorch as pl
if sys.argv[2] == "zero":
    import zero_compiler.integrations.lightning
class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.losses = torch.nn.Linear(8, 3), []
    def training_step(self, batch, index):
        loss = (self.body(batch[0]) - batch[1]).square().mean()
        self.losses.append(loss.item())
        return loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)
torch.manual_seed(1)
data = torch.utils.data.TensorDataset(torch.randn(32, 8), torch.randn(32, 3))
model = Model()
trainer = pl.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                     enable_model_summary=False, accelerator="cpu", devices=2, strategy=sys.argv[2])
trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=4))
if trainer.global_rank == 0:
    json.dump(model.losses, open(sys.argv[1], "w"))
"""


def python(script: str, folder: Path, *args: str) -> str:
    """What a script says that plain ``python`` starts, without a launcher."""
    path = folder / "script.py"
    path.write_text(script)
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        [sys.executable, str(path), *args],
        env=env | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_lightnings_own_launcher(tmp_path):
    losses = []
    for strategy in ("zero", "ddp"):
        python(LAUNCHES, tmp_path, str(tmp_path / strategy), strategy)
        losses.append(json.loads((tmp_path / strategy).read_text()))
    assert losses[0]
    assert not differences("launched", losses[0], losses[1], CLOSE)


def test_lightning_fabric_without_the_rest(tmp_path):
    said = python(ALONE, tmp_path)
    for rank in range(2):
        assert f"rank {rank} of 2 DTensor" in said, said


@pytest.mark.parametrize("name", cases.names)
def test_lightning(name):
    cases.check(name)
