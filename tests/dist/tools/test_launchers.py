"""Ways of starting ranks beside torchrun on one host: two hosts, Slurm, Ray Train, and a notebook's one process."""

from __future__ import annotations

import importlib.util
import json
import socket
import sys
import textwrap

import nbclient
import nbformat
import pytest
from dist.library_runs import differences
from dist.two_hosts import can_have_hosts, ended, started, torchrun, two_hosts

pytestmark = [pytest.mark.dist, pytest.mark.slow]

# What each rank does, once there is a process group.
TRAINING = """
import json, torch
import torch.distributed as dist
import torch.nn.functional as F
import zero_compiler as zero
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 18), torch.nn.GELU(), torch.nn.Linear(18, 3))
model = torch.compile(zero.shard(model, stage=3), backend="zero", options={"compute": "aten"})
opt = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
losses = []
for step in range(4):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
    loss = F.mse_loss(model(x), x[:, :3])
    loss.backward()
    opt.step()
    opt.zero_grad()
    dist.all_reduce(loss := loss.detach())
    losses.append(loss.item())
if dist.get_rank() == 0:
    said = next(line for line in str(zero.inspect(model)).splitlines() if line.startswith("transport"))
    json.dump({"losses": losses, "said": said, "world": dist.get_world_size()}, open(out, "w"))
"""
SCRIPT = (
    """
import os, sys
import torch.distributed as dist
%s
dist.init_process_group("gloo")
out = sys.argv[1]
"""
    + TRAINING
    + "dist.destroy_process_group()\n"
)
# The same training, by a script that knows nothing of zero.
FABRIC = """
import json, sys, torch
import torch.nn.functional as F
from lightning.fabric import Fabric
fabric = Fabric()
fabric.launch()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 18), torch.nn.GELU(), torch.nn.Linear(18, 3))
model, opt = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4))
losses = []
for step in range(4):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + fabric.global_rank))
    loss = F.mse_loss(model(x), x[:, :3])
    fabric.backward(loss)
    opt.step()
    opt.zero_grad()
    losses.append(fabric.all_reduce(loss.detach(), reduce_op="sum").item())
if fabric.global_rank == 0:
    import zero_compiler as zero  # to see what was made of it
    said = next(line for line in str(zero.inspect(model.module)).splitlines() if line.startswith("transport"))
    found = {"losses": losses, "said": said, "world": fabric.world_size, "hosts": fabric.strategy.num_nodes}
    json.dump(found, open(sys.argv[1], "w"))
"""
FROM_SLURM = """
os.environ |= {"RANK": os.environ["SLURM_PROCID"], "WORLD_SIZE": os.environ["SLURM_NTASKS"],
               "LOCAL_RANK": os.environ["SLURM_LOCALID"], "MASTER_ADDR": os.environ["SLURM_LAUNCH_NODE_IPADDR"]}
"""


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def test_two_hosts_with_the_flags_of_torchrun(tmp_path):
    """Two ranks on each of two hosts, where ``zero-compiler run`` starts a script that it shards, with the losses of four
    ranks on one that torchrun starts."""
    if not can_have_hosts():
        pytest.skip("needs root, ip and unshare: network namespaces")
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("needs the extra lightning")
    script, fabric = tmp_path / "script.py", tmp_path / "fabric.py"
    script.write_text(SCRIPT % "")
    fabric.write_text(FABRIC)
    flags = ["--stage", "3", "--compute", "aten"]
    alone = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--standalone"]
    with two_hosts() as hosts:
        ended(
            [
                started(
                    [
                        *host,
                        *torchrun(i, 2, ["zero_compiler", "run"]),
                        *flags,
                        str(fabric),
                        str(tmp_path / "two"),
                    ],
                    GLOO_SOCKET_IFNAME="eth0",
                )
                for i, host in enumerate(hosts)
            ]
        )
    ended([started([*alone, str(script), str(tmp_path / "one")])])
    two, one = (json.loads((tmp_path / name).read_text()) for name in ("two", "one"))
    assert two["world"] == one["world"] == 4
    assert two["hosts"] == 2
    assert "2 hosts" in two["said"], two["said"]
    assert not differences("two hosts", two["losses"], one["losses"], 1e-5)


def test_tasks_of_slurm(tmp_path):
    """What ``srun --ntasks 2 python script.py`` starts: a process a task, which learns of its rank from Slurm."""
    script, port = tmp_path / "script.py", free_port()
    script.write_text(SCRIPT % FROM_SLURM)
    ended(
        [
            started(
                [sys.executable, str(script), str(tmp_path / "out")],
                SLURM_PROCID=str(i), SLURM_LOCALID=str(i), SLURM_NTASKS="2", SLURM_NNODES="1", SLURM_JOB_ID="7",
                SLURM_LAUNCH_NODE_IPADDR="127.0.0.1", MASTER_PORT=port,
            )
            for i in range(2)
        ]
    )  # fmt: skip
    found = json.loads((tmp_path / "out").read_text())
    assert found["world"] == 2
    assert found["losses"][-1] < found["losses"][0]


RAY = (
    """
import sys
from ray.train import ScalingConfig, RunConfig
from ray.train.torch import TorchConfig, TorchTrainer
def loop(config):
    out = config["out"]
"""
    + textwrap.indent(TRAINING, "    ")
    + """
TorchTrainer(loop, train_loop_config={"out": sys.argv[1]}, torch_config=TorchConfig(backend="gloo"),
             scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
             run_config=RunConfig(storage_path=sys.argv[2])).fit()
"""
)


def test_workers_of_ray_train(tmp_path):
    pytest.importorskip("ray.train", reason="needs ray[train]")
    script = tmp_path / "script.py"
    script.write_text(RAY)
    ended([started([sys.executable, str(script), str(tmp_path / "ray"), str(tmp_path)])])
    script.write_text(SCRIPT % "")
    alone = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended([started([*alone, str(script), str(tmp_path / "plain")])])
    ray, plain = (json.loads((tmp_path / name).read_text()) for name in ("ray", "plain"))
    assert ray["world"] == 2
    assert not differences("ray", ray["losses"], plain["losses"], 1e-6)


CELLS = (
    """
import torch, zero_compiler as zero
model = torch.nn.Linear(4, 2)
model = zero.shard(model, stage=3)
call = torch.compile(model, backend="zero", options={"compute": "aten"})
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = call(torch.ones(2, 4)).square().mean(); loss.backward(); opt.step(); opt.zero_grad(); print(loss.item())
""",
    """
model = zero.shard(torch.nn.Linear(4, 2), stage=3)  # a cell that is run again
print(type(zero.inspect(model, torch.ones(2, 4))).__name__)
""",
    "zero.shard(model, stage=3)",  # an error is the cell's, and the kernel lives on
    "print(model(torch.ones(2, 4)).shape)",
)


def test_a_notebook_is_one_process(tmp_path, monkeypatch):
    """Cells run one after the other, in a Jupyter kernel that no launcher has started."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    client = nbclient.NotebookClient(
        notebook,
        timeout=100,
        kernel_name="python3",
        allow_errors=True,
        resources={"metadata": {"path": tmp_path}},
    )
    client.execute()
    *trained, refused, after = (cell.outputs for cell in notebook.cells)
    lines = "".join(
        output.text for cell in trained for output in cell if output.get("name") == "stdout"
    ).split("\n")
    losses = [float(line) for line in lines[:3]]
    assert losses == sorted(losses, reverse=True)
    assert lines[3] == "Report", lines
    assert [output.output_type for output in refused] == ["error"]
    assert "already" in refused[0].evalue, refused
    assert after[0].text == "torch.Size([2, 2])\n", after
