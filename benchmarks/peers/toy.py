"""The training that recovery.py attacks. It is the same under each system: an MLP with AdamW and 24 samples a step.

Usage: toy.py SYSTEM OUT PAUSE_S RANKS. Each process appends to OUT/steps-PID when it begins and ends a step. It makes
OUT/ready-PID when it can take a rank, and ends after the step in the file OUT/stop.
"""

import hashlib
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import Linear, Module, ReLU, Sequential
from torch.nn.parallel import DistributedDataParallel

SYSTEM, OUT, PAUSE_S, RANKS = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
SAMPLES, WIDTH = 24, 64
NOTES = (OUT / f"steps-{os.getpid()}").open("ab", buffering=0)
READY = OUT / f"ready-{os.getpid()}"

torch.set_num_threads(1)
torch.manual_seed(0)
model = Sequential(Linear(WIDTH, 4 * WIDTH), ReLU(), Linear(4 * WIDTH, WIDTH))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)


def begins(step: int) -> bool:
    """Note that a step begins. Return False if the training has ended before it."""
    stop = OUT / "stop"
    NOTES.write(f"\n{step} {time.time()}".encode())
    return not stop.exists() or step <= int(stop.read_text())


def backward(ddp: Module, step: int, rank: int, size: int) -> None:
    """Compute the gradients of this rank's part of the samples."""
    time.sleep(PAUSE_S)
    samples = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step))
    ddp(samples[rank::size]).square().mean().backward()


def ends(rank: int, size: int) -> None:
    ended = time.time()
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.state_dict().values()))
    NOTES.write(f" {ended} {rank} {size} {digest.hexdigest()}".encode())


def mlflash() -> None:
    from mlflash import Checkpointer, keep_alive
    from mlflash.adapters.distributed import init_process_group

    init_process_group("gloo")
    ddp, state = DistributedDataParallel(model), {"model": model, "optimizer": optimizer}

    def train(ckpt: Checkpointer, step: int) -> None:
        while begins(step := step + 1):
            backward(ddp, step, dist.get_rank(), dist.get_world_size())
            optimizer.step()
            optimizer.zero_grad()
            ckpt.save(step, state)
            ends(dist.get_rank(), dist.get_world_size())

    READY.touch()
    keep_alive(train, state, "toy")
    dist.destroy_process_group()


def nvrx() -> None:
    """NVRx, like its example with a model outside of the wrapped function. The last rank is in reserve."""
    from nvidia_resiliency_ext import inprocess
    from nvidia_resiliency_ext.inprocess.rank_assignment import MaxActiveWorldSize, ShiftRanks

    port, file, begun = int(os.environ["MASTER_PORT"]), OUT / "checkpoint.pt", OUT / "begun.pt"
    base = dist.TCPStore("localhost", port + 1, RANKS + 1, os.environ["RANK"] == "0", multi_tenant=True)
    assignment = inprocess.Compose(MaxActiveWorldSize(RANKS), ShiftRanks())

    @inprocess.Wrapper(store_kwargs={"port": port}, rank_assignment=assignment)
    def train(call: inprocess.CallWrapper | None = None) -> None:
        rank, size, step = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), 0
        store, timeout = dist.PrefixStore(str(call.iteration), base), timedelta(seconds=10)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
        ddp = DistributedDataParallel(model)
        if file.exists():
            state = torch.load(file)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            step = state["step"]
        optimizer.zero_grad()
        while begins(step := step + 1):
            backward(ddp, step, rank, size)
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                with call.atomic():
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                    torch.save(state, begun)
                    begun.replace(file)
            ends(rank, size)
        dist.barrier()
        dist.destroy_process_group()

    READY.touch()
    train()


def torchft() -> None:
    """torchft, like its train_ddp.py, with replica groups of one rank. They save nothing.

    Its DDP is not used: when gloo's allreduce fails because a rank is lost, its hook raises an AssertionError (0.2.0).
    """
    from torchft import Manager, Optimizer, ProcessGroupGloo

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    replica, parts = f"toy_{os.environ['RANK']}", {"model": model, "optimizer": optimizer}
    manager = Manager(
        ProcessGroupGloo(timeout=timedelta(seconds=5)),
        lambda state: [parts[name].load_state_dict(value) for name, value in state.items()],
        lambda: {name: part.state_dict() for name, part in parts.items()},
        min_replica_size=RANKS - 1, timeout=timedelta(seconds=30), rank=0, world_size=1, init_sync=False,
        store_addr="localhost", store_port=store.port, hostname="localhost", replica_id=replica,
    )  # fmt: skip
    wrapped, parameters = Optimizer(manager, optimizer), [*model.parameters()]
    READY.touch()
    while len([*OUT.glob("ready-*")]) < RANKS:  # otherwise two of them begin alone
        time.sleep(0.01)
    while begins(manager.current_step() + 1):
        wrapped.zero_grad()
        rank, size, step = manager.participating_rank(), manager.num_participants(), manager.current_step() + 1
        backward(model, step, rank or 0, size)
        flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
        manager.allreduce(flat).wait()
        torch.nn.utils.vector_to_parameters(flat, [parameter.grad for parameter in parameters])
        wrapped.step()
        if manager.current_step() == step:
            ends(-1 if rank is None else rank, size)
    manager.shutdown(wait=False)


{"mlflash": mlflash, "nvrx": nvrx, "torchft": torchft}[SYSTEM]()
