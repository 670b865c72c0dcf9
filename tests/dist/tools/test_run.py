"""``zero-compiler run`` of scripts that know nothing of zero, on two CPU ranks: they train sharded, or are refused."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from dist.library_runs import differences

from zero_compiler.errors import ConfigError, IntegrationError
from zero_compiler.tools.run import run

pytest.importorskip("accelerate", reason="needs the extra accelerate")
pytestmark = [pytest.mark.dist]

RANKS = ["--nproc-per-node", "2"]

ACCELERATE = """
import contextlib, json, sys, torch
with contextlib.suppress(ImportError):
    import transformers  # which looks for accelerate, and does not import it
from accelerate import Accelerator
acc = Accelerator(gradient_accumulation_steps=2)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 17), torch.nn.GELU(), torch.nn.Linear(17, 3))
opt = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
torch.manual_seed(1)
data = torch.utils.data.TensorDataset(torch.randn(32, 8), torch.randn(32, 3))
model, opt, batches = acc.prepare(model, opt, torch.utils.data.DataLoader(data, batch_size=4))
losses = []
for x, y in batches:
    with acc.accumulate(model):
        loss = (model(x) - y).square().mean()
        acc.backward(loss)
        opt.step()
        opt.zero_grad()
    losses.append(acc.reduce(loss.detach(), "mean").item())
if acc.is_main_process:
    json.dump(losses, open(sys.argv[1], "w"))
"""

TRAINER = """
import json, sys, torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=61, n_positions=16, n_embd=16, n_layer=1, n_head=2,
                                   resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
ids = torch.randint(0, 60, (32, 12), generator=torch.Generator().manual_seed(1))
rows = [{"input_ids": i, "labels": i} for i in ids]
args = TrainingArguments(sys.argv[1] + ".out", max_steps=3, per_device_train_batch_size=2, logging_steps=1,
                         report_to=[], disable_tqdm=True, save_strategy="no", adam_epsilon=1e-4, EXTRA)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
trainer = Trainer(model, args, train_dataset=rows, optimizers=(opt, None))
trainer.train()
trainer.save_model(sys.argv[1] + ".saved")
if args.process_index == 0:
    GPT2LMHeadModel.from_pretrained(sys.argv[1] + ".saved")
    json.dump([h["loss"] for h in trainer.state.log_history if "loss" in h], open(sys.argv[1], "w"))
"""

PRETRAINED = """
import json, pathlib, sys, torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
def kernel(line):
    said = pathlib.Path("/proc/self/status").read_text().split(line + ":")[1]
    return int(said.split()[0]) << 10
AutoModelForCausalLM.from_pretrained("saved")  # mapped; what is imported on the way is there
pathlib.Path("/proc/self/clear_refs").write_text("5")
own, most = kernel("RssAnon"), kernel("VmHWM")
model = AutoModelForCausalLM.from_pretrained("saved", dtype=torch.bfloat16)
own, most = kernel("RssAnon") - own, kernel("VmHWM") - most
whole = sum(p.nbytes for p in model.parameters())
ids = torch.randint(0, 60, (32, 12), generator=torch.Generator().manual_seed(1))
args = TrainingArguments(sys.argv[1] + ".out", max_steps=1, per_device_train_batch_size=2, report_to=[],
                         disable_tqdm=True, save_strategy="no", bf16=True, use_cpu=True)
Trainer(model, args, train_dataset=[{"input_ids": i, "labels": i} for i in ids]).train()
# In a file, as lines that several ranks print run into each other.
json.dump([own, most, whole, "zero-pretrained" in pathlib.Path("/proc/self/maps").read_text()],
          open(f"{sys.argv[1]}.{args.process_index}", "w"))
"""

DPO = """
import json, sys, torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer
words = ["<pad>", "<eos>", *(f"w{i}" for i in range(40))]
made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<pad>"))
made.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>")
def model(seed):
    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(vocab_size=48, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=1,
                                      eos_token_id=1, pad_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
rows = [{"prompt": f"w{i} w1", "chosen": f"w2 w{i}", "rejected": f"w{i + 1} w4"} for i in range(24)]
args = DPOConfig(sys.argv[1] + ".out", max_steps=3, per_device_train_batch_size=2, logging_steps=1, report_to=[],
                 disable_tqdm=True, save_strategy="no", adam_epsilon=1e-4, learning_rate=1e-3, bf16=False,
                 gradient_checkpointing=False, max_length=16, EXTRA)
trainer = DPOTrainer(model(0), model(1), args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
trainer.train()
if args.process_index == 0:
    json.dump([h["loss"] for h in trainer.state.log_history if "loss" in h], open(sys.argv[1], "w"))
"""

LIGHTNING = """
import json, sys, torch
import lightning.pytorch as pl
class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Sequential(torch.nn.Linear(8, 17), torch.nn.GELU(), torch.nn.Linear(17, 3))
        self.losses = []
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
                     enable_model_summary=False, EXTRA)
trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=4))
if trainer.global_rank == 0:
    json.dump(model.losses, open(sys.argv[1], "w"))
"""

FABRIC = """
import json, sys, torch
from lightning.fabric import Fabric
fabric = Fabric(EXTRA)
fabric.launch()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 17), torch.nn.GELU(), torch.nn.Linear(17, 3))
opt = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
model, opt = fabric.setup(model, opt)
torch.manual_seed(1)
data = torch.utils.data.TensorDataset(torch.randn(32, 8), torch.randn(32, 3))
losses = []
for x, y in fabric.setup_dataloaders(torch.utils.data.DataLoader(data, batch_size=4)):
    loss = (model(x) - y).square().mean()
    fabric.backward(loss)
    opt.step()
    opt.zero_grad()
    losses.append(loss.item())
if fabric.global_rank == 0:
    json.dump(losses, open(sys.argv[1], "w"))
"""

# The packages that Lightning is also published as, under --stage 2 --compute aten. Its last line contradicts that.
NAMES = (
    LIGHTNING.replace("lightning.pytorch", "pytorch_lightning").replace("EXTRA", "strategy='zero'")
    + """
import lightning_fabric
def said(config):
    print("said", config.stage, config.compute, config.bucket_bytes, config.offload_params, flush=True)
said(trainer.strategy.config)
for strategy in ("ddp", type(trainer.strategy)(bucket_bytes=100)):
    said(pl.Trainer(logger=False, enable_checkpointing=False, strategy=strategy).strategy.config)
said(lightning_fabric.Fabric(strategy="zero_stage_2").strategy.config)
pl.Trainer(logger=False, enable_checkpointing=False, strategy="zero_stage_3_offload")
"""
)

PLAIN = """
import torch
model = torch.nn.Linear(4, 4)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2, 4)).sum().backward()
opt.step()
print("trained unsharded")
"""


def start(
    command: list[str], script: str, folder: Path, extra: str = "", **variables: str
) -> tuple[int, str, list[float]]:
    """Exit status, what was said, and the losses that the script wrote."""
    path, out = folder / "script.py", folder / "losses.json"
    path.write_text(script.replace("EXTRA", extra))
    out.unlink(missing_ok=True)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "FSDP_"))}
    done = subprocess.run(
        [sys.executable, "-m", *command, str(path), str(out)],
        env=env | {"OMP_NUM_THREADS": "1"} | variables,
        capture_output=True,
        text=True,
        timeout=280,
        cwd=folder,
    )
    return done.returncode, done.stdout + done.stderr, json.loads(out.read_text()) if out.exists() else []


ZERO = ["zero_compiler", "run", *RANKS, "--stage", "3", "--compute", "aten"]
TORCHRUN = ["torch.distributed.run", *RANKS]
# A plain script that leaves its process group may abort where Python ends: threads of gloo are running still.
LEAVES_GROUP = """
import torch.distributed
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""


LIGHTNING_PLAIN = "accelerator='cpu', strategy='ddp', devices=2"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "script", "who", "extra", "plain_extra"),
    [
        pytest.param("accelerate", ACCELERATE, "Accelerator", "", "", id="accelerate"),
        pytest.param("transformers", TRAINER, "Trainer", "", "use_cpu=True", id="trainer"),
        pytest.param("trl", DPO, "DPOTrainer", "", "use_cpu=True", id="dpo", marks=pytest.mark.thorough),
        pytest.param("lightning", LIGHTNING, "Trainer", "strategy='ddp'", LIGHTNING_PLAIN, id="lightning"),
        pytest.param(
            "lightning", FABRIC, "Fabric", "", LIGHTNING_PLAIN, id="fabric", marks=pytest.mark.thorough
        ),
    ],
)
def test_an_unmodified_script_trains_sharded(library, script, who, extra, plain_extra, tmp_path):
    if (
        importlib.util.find_spec(library) is None
    ):  # not imported: Lightning replaces torch.compile in its process
        pytest.skip(f"needs the extra {library}")
    status, said, losses = start(ZERO, script, tmp_path, extra)
    assert status == 0, said
    assert said.count(f"{who}: zero stage 3 over 2 ranks") == 1, said
    status, said, plain = start(
        TORCHRUN, script + LEAVES_GROUP, tmp_path, plain_extra, ACCELERATE_USE_CPU="true"
    )
    assert status == 0, said
    assert plain
    assert not differences(who, losses, plain, 2e-5)


@pytest.mark.slow
def test_a_model_of_another_dtype_than_its_files_is_read_by_one_rank(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs the extra transformers")
    config = transformers.LlamaConfig(
        vocab_size=4096, hidden_size=768, intermediate_size=3072, num_hidden_layers=2, num_attention_heads=4
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "saved")
    status, said, _ = start(ZERO, PRETRAINED, tmp_path)
    assert status == 0, said
    assert "Trainer: zero stage 3 over 2 ranks" in said
    ranks = [json.loads((tmp_path / f"losses.json.{rank}").read_text()) for rank in range(2)]
    own, most, whole, mapped = zip(*ranks, strict=True)
    assert max(own) < whole[0] // 4, ranks
    assert min(most) < whole[0] // 2, ranks
    assert mapped == (False, False)


@pytest.mark.slow
def test_flags_and_a_strategy_of_the_script_are_laid_together(tmp_path):
    if importlib.util.find_spec("pytorch_lightning") is None:
        pytest.skip("needs pytorch_lightning, which comes with the extra lightning")
    command = ["zero_compiler", "run", "--nproc-per-node", "1", "--stage", "2", "--compute", "aten"]
    status, said, losses = start(command, NAMES, tmp_path)
    assert status == 2, said
    assert losses
    assert "Trainer: zero stage 2 over 1 rank\n" in said
    lines = [line for line in said.splitlines() if line.startswith("said ")]
    assert lines == [f"said 2 aten {bucket} None" for bucket in (None, None, 100, None)], said
    assert (
        "zero-compiler run: stage was given twice: zero-compiler run says 2, and ZeroStrategy in the script says 3"
        in said
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "script", "extra", "sentence"),
    [
        ("accelerate", PLAIN, "", "before its first step of an optimizer it used none of"),
        ("accelerate", "import torch", "", "was sharded: it trained by none of"),
        (
            "transformers",
            TRAINER,
            "deepspeed={'zero_optimization': {'stage': 2}}",  # DeepSpeed need not be installed
            "TrainingArguments(deepspeed=...) and zero shard the same model: leave out deepspeed",
        ),
        ("lightning", LIGHTNING, "strategy='deepspeed'", "the script asks for strategy='deepspeed'"),
        ("lightning", FABRIC, "strategy='fsdp'", "the script asks for strategy='fsdp'"),
        (
            "accelerate",
            "from accelerate import Accelerator, FullyShardedDataParallelPlugin as P\nAccelerator(fsdp_plugin=P())",
            "",
            "the script gives it a fsdp_plugin",
        ),
    ],
    ids=["plain", "nothing", "trainer-deepspeed", "lightning-deepspeed", "fabric-fsdp", "accelerate-fsdp"],
)
def test_what_would_train_unsharded_is_refused(library, script, extra, sentence, tmp_path):
    if (
        importlib.util.find_spec(library) is None
    ):  # not imported: Lightning replaces torch.compile in its process
        pytest.skip(f"needs the extra {library}")
    one = ["zero_compiler", "run", "--nproc-per-node", "1", "--compute", "aten"]
    status, said, losses = start(one, script, tmp_path, extra)
    assert status == 2, said
    assert "zero-compiler run: " in said
    assert sentence in said
    assert "trained unsharded" not in said
    assert not losses


STOPPED = """
import os, pathlib, signal, sys, time
pathlib.Path(sys.argv[1] + os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(250)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status", "sentence"),
    [
        (signal.SIGINT, 130, "zero-compiler run: stopped by SIGINT, and so were the ranks"),
        (signal.SIGKILL, 1, "zero-compiler run: rank 1 was ended by SIGKILL, and the others were stopped"),
    ],
    ids=["ctrl-c", "killed-rank"],
)
def test_signals_end_all_of_it_in_a_sentence(number, status, sentence, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(STOPPED)
    command = [sys.executable, "-m", *ZERO, str(script), str(tmp_path / "rank")]
    run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    marks = [tmp_path / f"rank{i}" for i in range(2)]
    try:
        end = time.monotonic() + 200
        while not all(m.exists() and m.read_text() for m in marks) and time.monotonic() < end:
            time.sleep(0.1)
        ranks = [int(m.read_text()) for m in marks]
        if number == signal.SIGINT:
            os.killpg(run.pid, number)
        else:
            os.kill(ranks[1], number)
        said = run.communicate(timeout=60)[1]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
    assert run.returncode == status, said
    assert sentence in said
    assert "torch/distributed/launcher" not in said, said


def test_other_ways_of_training_in_the_environment_are_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(
        IntegrationError, match="ACCELERATE_USE_DEEPSPEED=true asks accelerate for another way"
    ):
        run(["script.py"])


def test_a_script_that_is_not_there_is_said_before_ranks_start():
    with pytest.raises(
        IntegrationError, match="there is no file 'nowhere.py', which stands where the script is"
    ):
        run(["--stage", "3", "nowhere.py", "--its", "flags"])


def test_fields_are_checked_before_ranks_start(tmp_path):
    with pytest.raises(ConfigError, match="stage must be 0, 1, 2 or 3, not 4"):
        run(["--stage", "4", "script.py"])
    (tmp_path / "zero.json").write_text('{"stage": 2}')
    with pytest.raises(ConfigError, match="stage was given twice"):
        run(["--config", str(tmp_path / "zero.json"), "--stage", "3", "script.py"])
    (tmp_path / "zero.json").write_text("[")
    with pytest.raises(ConfigError, match="is no JSON file of fields"):
        run(["--config", str(tmp_path / "zero.json"), "script.py"])
