"""State that ranks hold alike: one copy on each node, nothing sent, bits restored whatever is lost, never a guess.

Where ranks only compare what they hold alike, a rank whose bits are other ones is named.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from damage import flip
from emulated import Nodes, on_node
from mpi4py import MPI

from mlflash import Checkpointer, errors, rng
from mlflash.memory.slot import Kind
from mlflash.save import save_queue

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
MIB = 1 << 20

# Sharing does not depend on the transport.
pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.parametrize("options", ["p2p"], indirect=True)]
on_4 = pytest.mark.skipif(SIZE != 4, reason="runs on 4 ranks")


class Own:
    rank_private = True

    def __init__(self, step: int):
        self.number = np.array([RANK, step])

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number[:] = state["number"]


def state_at(step: int) -> dict[str, Any]:
    """The same on all ranks but for ``own``; sizes around those of blocks and shares, types of all kinds."""
    numbers = np.random.default_rng(step)
    weight = torch.from_numpy(numbers.standard_normal((300, 500)))
    return {
        "model": {
            "weight": weight, "tied": weight, "turned": torch.from_numpy(numbers.standard_normal((64, 33))).T,
            "half": torch.from_numpy(numbers.standard_normal(70_001)).bfloat16(), "empty": torch.zeros(0),
            "one": torch.tensor(float(step)), "mask": torch.from_numpy(numbers.integers(0, 2, 1_000) > 0),
        },
        "array": numbers.integers(0, 255, 131_072, dtype=np.uint8), "step": step, "of rank": RANK, "own": Own(step),
    }  # fmt: skip


def zeroed(state: dict[str, Any]) -> dict[str, Any]:
    """A state of the same structure that holds nothing yet; tied tensors stay tied."""
    model = {name: torch.zeros_like(value) for name, value in state["model"].items() if name != "tied"}
    model = {name: model["weight" if name == "tied" else name] for name in state["model"]}
    return {"model": model, "array": np.zeros_like(state["array"]), "step": 0, "of rank": -1, "own": Own(-1)}


def same(state: dict[str, Any], step: int) -> bool:
    wanted = state_at(step)
    alike = all(torch.equal(state["model"][name], value) for name, value in wanted["model"].items())
    return bool(
        alike and np.array_equal(state["array"], wanted["array"]) and (state["step"], state["of rank"]) == (step, RANK)
        and np.array_equal(state["own"].number, [RANK, step])
    )  # fmt: skip


@pytest.mark.parametrize("question", ["shareable", "digests"])
def test_what_one_rank_cannot_say_of_its_state_is_the_outcome_on_all_and_saving_goes_on(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, question: str
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("a device is gone")

    with Checkpointer(**options | {"replicated": True}) as ckpt:
        with monkeypatch.context() as patched:
            if RANK == SIZE - 1:
                patched.setattr(save_queue, question, refuse)
            for use in (lambda: ckpt.prepare(state_at(0)), lambda: ckpt.save(1, state_at(1)).wait()):
                with pytest.raises(errors.SaveFailed, match="a device is gone"):
                    use()
        assert ckpt.save(2, state_at(2)).wait().committed
        state = zeroed(state_at(0))
        assert ckpt.restore(state) == 2 and same(state, 2)


def restored(options: dict[str, Any], **more: Any) -> tuple[int | None, list[dict[str, Any]]]:
    """Restore; returns the step, and the report of each rank, once its bits were compared."""
    with Checkpointer(**options | {"replicated": True} | more) as ckpt:
        state = zeroed(state_at(0))
        try:
            step = ckpt.restore(state)
        except errors.Unrestorable as error:
            step = -1
            assert len(set(COMM.allgather(str(error)))) == 1 and "no slot and no copy" in error.reasons[2]
        right = step in (None, -1) or same(state, step)
        ckpt.wait()
        ckpt.steps()  # the reprotection is done
        reports = COMM.allgather((right, ckpt.report()))
    assert all(right for right, _ in reports), "bits differ"
    return step, [report for _, report in reports]


def save(options: dict[str, Any], *steps: int, **more: Any) -> dict[str, Any]:
    with Checkpointer(**options | {"replicated": True, "strict": True} | more) as ckpt:
        for step in steps:
            ckpt.save(step, state_at(step)).wait()
        return ckpt.report()


def shares(nodes: Nodes, node: int, step: int | None = None) -> list[Path]:
    return [path for path, header in nodes.files(node) if header.kind is Kind.SHARE and step in (None, header.step)]


def node_nbytes(options: dict[str, Any], report: dict[str, Any]) -> list[int]:
    reports = COMM.allgather(report)
    names = sorted({report["node"] for report in reports})
    return [
        sum(slot["nbytes"] for report in reports if report["node"] == name for slot in report["slots"])
        for name in names
    ]


@pytest.mark.parametrize("per_node", [1, 2])
@pytest.mark.parametrize("scheme", ["copy", "xor:3", "none"])
def test_a_node_holds_what_its_ranks_hold_alike_once_and_nothing_of_it_is_sent(
    options: dict[str, Any], nodes: Nodes, per_node: int, scheme: str
) -> None:
    if SIZE % per_node:
        pytest.skip("unequal nodes share nothing")
    options |= {**on_node(nodes.root, per_node), "redundancy": scheme}
    state = {"w": np.arange(8 * MIB, dtype=np.uint8), "x": np.arange(8 * MIB, dtype=np.uint8) // 3}
    with Checkpointer(**options, replicated=True, strict=True) as ckpt:
        ckpt.prepare(state)
        prepared = ckpt.report()
        for step in (1, 2, 3):
            ckpt.save(step, state).wait()
        report = ckpt.report()
        assert [s["nbytes"] for s in report["slots"]] == [s["nbytes"] for s in prepared["slots"]]
        alone = SIZE // per_node == 1 and scheme != "none"
        held = node_nbytes(options, report)
        # Two slots of the state, once for each node; the rest is manifests, and their redundancy.
        assert all(2 * 16 * MIB <= nbytes <= 2 * 16 * MIB + per_node * 8 * 128 * 1024 for nbytes in held), held
        assert alone or report["shared with"] == list(range(SIZE))


@pytest.mark.parametrize("per_node", [1, 2])
def test_bits_come_back_from_what_any_node_is_left(options: dict[str, Any], nodes: Nodes, per_node: int) -> None:
    if SIZE % per_node or per_node == SIZE:
        pytest.skip("needs two equal nodes")
    options |= on_node(nodes.root, per_node)
    report = save(options, 1, 2)
    assert report["slots"][2]["nbytes"] > 0 and report["slots"][0]["nbytes"] < 100_000
    assert restored(options)[0] == 2
    for lost in range(SIZE // per_node):  # no save between the losses: the reprotection has made each node whole
        nodes.lose(lost)
        step, reports = restored(options)
        assert step == 2
        assert [r["counts"].get("shares fetched", 0) for r in reports] == [
            rank // per_node == lost for rank in range(SIZE)
        ]
    save(options, 3)
    assert restored(options)[0] == 3


@on_4
@pytest.mark.parametrize("scheme", ["rs:2+2", "copy:3", "xor:4"])
def test_all_that_a_scheme_covers_may_be_lost(options: dict[str, Any], nodes: Nodes, scheme: str) -> None:
    options["redundancy"] = scheme
    save(options, 1, 2)
    losses = {"rs:2+2": 2, "copy:3": 3, "xor:4": 1}[scheme]
    nodes.lose(*range(losses))
    assert restored(options)[0] == 2
    nodes.lose(*range(4 - losses, 4))
    assert restored(options)[0] == 2
    nodes.lose(*range(losses + 1))
    assert restored(options)[0] == (-1 if losses < 3 else None)  # None: nothing is left that says what was committed


def test_a_damaged_share_comes_from_another_node_and_where_all_are_the_older_step_is_taken(
    options: dict[str, Any], nodes: Nodes
) -> None:
    save(options, 1, 2)
    for node in range(SIZE - 1):
        nodes.on_rank_0(lambda node=node: flip(shares(nodes, node, 2)[0], 5000))
    step, reports = restored(options)
    assert step == 2
    assert [r["counts"].get("shares fetched", 0) for r in reports] == [*[1] * (SIZE - 1), 0]
    save(options, 3)
    for node in range(SIZE):
        nodes.on_rank_0(lambda node=node: flip(shares(nodes, node, 3)[0], 5000))
    assert restored(options)[0] == 2


@on_4
@pytest.mark.parametrize(("before", "after", "transport"), [(2, 1, "rma"), (1, 2, "p2p"), (2, 4, "rma")])
def test_other_numbers_of_ranks_on_a_node_put_the_shares_together(
    options: dict[str, Any], nodes: Nodes, before: int, after: int, transport: str
) -> None:
    options["transport"] = transport
    save(options | on_node(nodes.root, before), 1, 2)
    options |= on_node(nodes.root, after)
    if before == 1:
        nodes.lose(2)
    for _ in (1, 2):  # a second time from where the first has put them
        assert restored(options)[0] == 2
    save(options, 3, 4)
    counts = [len(shares(nodes, node)) for node in range(4 // after)]
    assert counts == [2 * after] * (4 // after), "shares of the old layout were left behind"
    assert restored(options)[0] == 4


@pytest.mark.parametrize("later", [{"replicated": None}, {"share": False}], ids=["not said any more", "switched off"])
def test_shares_are_restored_by_a_run_that_shares_nothing(
    options: dict[str, Any], nodes: Nodes, later: dict[str, Any]
) -> None:
    save(options, 1, 2)
    for _ in (1, 2):
        assert restored(options, **later)[0] == 2
    save(options, 3, **later)
    assert not shares(nodes, RANK)
    assert restored(options, **later)[0] == 3
    assert restored(options)[0] == 3


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "though it should be" in r.getMessage()]


@pytest.mark.parametrize(("per_node", "name"), [(1, "weight"), (2, "mask"), (1, "one"), (2, "weight")])
def test_a_step_on_which_copies_differ_is_not_committed_and_the_next_stores_each(
    options: dict[str, Any], nodes: Nodes, caplog: pytest.LogCaptureFixture, per_node: int, name: str
) -> None:
    if SIZE % per_node or per_node == SIZE:
        pytest.skip("needs two equal nodes")
    options |= on_node(nodes.root, per_node)
    odd = SIZE - 1

    def state_of(step: int) -> dict[str, Any]:
        state = state_at(step)
        if odd == RANK and step > 1:
            value = state["model"][name].view(-1)
            value[-1] = 1 - value[-1].int()
        return state

    with Checkpointer(**options, replicated=True) as ckpt:
        assert ckpt.save(1, state_of(1)).wait()
        snapshot = ckpt.save(2, state_of(2))
        with pytest.raises(errors.SaveFailed, match=rf"different values of model\.{name}"):
            snapshot.wait()
        assert ckpt.steps() == [1]
        others = f"0-{odd - 1}" if odd > 1 else "0"
        if RANK == 0:
            (text,) = said(caplog)
            where = f" on node{odd // per_node}" if SIZE > 2 else ""
            assert f"model.{name} (rank {odd}{where} differs from {others})" in text
            assert "step 2 is not the same" in text
        assert ckpt.save(3, state_of(3)).wait() and ckpt.save(4, state_of(4)).wait()
        assert len(said(caplog)) == int(RANK == 0)
    with Checkpointer(**options, replicated=True) as ckpt:
        step, found = ckpt.load()
        assert step == 4 and torch.equal(found["model"][name], state_of(4)["model"][name])
        assert torch.equal(found["model"]["half"], state_of(4)["model"]["half"])


def test_what_differs_from_the_start_is_stored_whole_and_said_once(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    def state_of(step: int) -> dict[str, Any]:
        return {"same": np.full(50_000, step), "buffer": np.full(50_000, RANK), f"only on {RANK}": np.ones(9) * RANK}

    with Checkpointer(**options, replicated=True, strict=True) as ckpt:
        ckpt.prepare({"same": np.full(50_000, RANK), "buffer": np.zeros(50_000)})  # as before a broadcast
        assert not said(caplog)
        for step in (1, 2):
            ckpt.save(step, state_of(step)).wait()
        assert len(said(caplog)) == int(RANK == 0)
        assert ckpt.report()["slots"][2]["nbytes"] >= 400_000 and ckpt.report()["slots"][0]["nbytes"] < 900_000
    with Checkpointer(**options, replicated=True) as ckpt:
        state = state_of(0)
        assert ckpt.restore(state) == 2
        assert all(np.array_equal(state[name], value) for name, value in state_of(2).items())


def test_only_what_the_patterns_name_is_shared(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    def state_of(step: int) -> dict[str, Any]:
        return {"model": {"w": np.full(90_000, step)}, "cache": np.full(90_000, RANK), "other": np.full(90_000, 7)}

    with Checkpointer(**options, replicated={"model.*": True}, strict=True) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step)).wait()
        own, share = ckpt.report()["slots"][0]["nbytes"], ckpt.report()["slots"][2]["nbytes"]
        assert 720_000 < share < 760_000 and 1_440_000 < own < 1_500_000
    assert not said(caplog)
    with Checkpointer(**options, replicated={"model.*": list(range(SIZE))}) as ckpt:
        step, found = ckpt.load()
        assert step == 2 and all(np.array_equal(found[name], state_of(2)[name]) for name in ("cache", "other"))
        assert np.array_equal(found["model"]["w"], state_of(2)["model"]["w"])
    with pytest.raises(errors.ConfigError, match="these must be the same for all"):
        Checkpointer(**options, replicated={"a": True, "b": [RANK]})


# Ranks that only compare


@pytest.fixture
def apart(options: dict[str, Any]) -> dict[str, Any]:
    return options | {"share": False}


def replica_at(seed: int) -> dict[str, Any]:
    """A state that is the same on every rank: small and large tensors, some not a multiple of a block."""
    random = np.random.default_rng(seed)
    model = {f"layer{i}.weight": random.standard_normal(size) for i, size in enumerate((7, 100_000, 8_192, 3))}
    return {"model": model, "rng": rng(), "step": seed}


def test_a_step_at_which_replicas_differ_is_not_certified(apart: dict[str, Any]) -> None:
    with Checkpointer(**apart, replicated=COMM, certify_after=1) as ckpt:
        for step in (1, 2, 3):
            state = replica_at(step)
            if RANK == SIZE - 1 and step == 2:
                state["model"]["layer1.weight"].view(np.uint8)[0] ^= 1  # which no look at values can see
            ckpt.save(step, state).wait()
    with Checkpointer(**apart, replicated=COMM) as ckpt:
        assert ckpt.load(certified=True)[0] == 1


@pytest.mark.parametrize("name", ["layer0.weight", "layer1.weight", "layer3.weight"])
def test_one_bit_on_one_rank_is_named_once(apart: dict[str, Any], caplog: pytest.LogCaptureFixture, name: str) -> None:
    odd = SIZE - 1
    with Checkpointer(**apart, replicated=COMM, strict=True) as ckpt:
        for step in (1, 2, 3):
            state = replica_at(step)
            if odd == RANK and step > 1:
                state["model"][name].view(np.uint8)[-1] ^= 1
            ckpt.save(step, state).wait()
            ckpt.steps()  # the courier compares after the commit
            found = said(caplog)
            if RANK == 0 and step > 1:
                assert len(found) == 1 and f"model.{name} (" in found[0] and "step 2 is not the same" in found[0]
                others = f"0-{odd - 1}" if odd > 1 else "0"
                where = f" on node{odd}" if SIZE > 2 else ""  # of two nobody knows who is wrong
                assert f"rank {odd}{where} differs from {others}" in found[0]
            else:
                assert found == []
        assert ckpt.report()["counts"]["tensors diverged"] == 1


def test_other_tensors_of_a_rank_and_other_shards_are_not_compared(
    apart: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(**apart, replicated=list(range(SIZE)), strict=True) as ckpt:
        for step in (1, 2):
            state = replica_at(step) | {f"of rank {RANK}": np.full(10, RANK)}
            state["shard"] = np.arange(10 + RANK)
            ckpt.save(step, state).wait()
        ckpt.steps()
        assert said(caplog) == []
        state = replica_at(3)
        state["model"]["layer2.weight"] += RANK
        ckpt.save(3, state).wait()
    assert len(said(caplog)) == int(RANK == 0)


@pytest.mark.mpi(min_size=4)
def test_two_groups_that_differ_from_each_other(apart: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    half = COMM.Split(RANK % 2)
    with Checkpointer(**apart, replicated=half.Get_group(), strict=True) as ckpt:
        ckpt.save(1, replica_at(RANK % 2)).wait()
        ckpt.steps()
        assert said(caplog) == []
        state = replica_at(RANK % 2)
        state["model"]["layer0.weight"][0] += RANK == 3
        ckpt.save(2, state).wait()
    assert len(said(caplog)) == int(RANK == 1)
    half.Free()


def test_a_process_group_of_torch_names_the_ranks(
    root: Path, apart: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(root / "store"), SIZE), rank=RANK,
                            world_size=SIZE)  # fmt: skip
    try:
        with Checkpointer(**apart, replicated=dist.group.WORLD, strict=True) as ckpt:
            ckpt.save(1, {"w": np.arange(5) + (RANK == 1)}).wait()
            ckpt.steps()
    finally:
        dist.destroy_process_group()
    assert len(said(caplog)) == int(RANK == 0)


def test_nonsense_is_refused_on_all_ranks(apart: dict[str, Any]) -> None:
    for replicated in ([SIZE], "dp", [] if RANK == 0 else True):
        with pytest.raises(errors.ConfigError, match="replicated="):
            Checkpointer(**apart, replicated=replicated)
