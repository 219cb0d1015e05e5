"""What Slurm knows of where nodes stand, as its plugins write it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlflash.errors import ConfigError
from mlflash.placement.failure_domains import Domains, ask_slurm, discover, from_scontrol, from_slurm_address

TREE = ("switch", "leaf switch")

# An upper switch with one child, and a leaf that hangs from the root.
THREE_LEVELS = """\
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n1
SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=n2
SwitchName=row1 Level=1 LinkSpeed=1 Nodes=n1 Switches=leaf1
SwitchName=row2 Level=1 LinkSpeed=1 Nodes=n2 Switches=leaf2
SwitchName=root Level=2 LinkSpeed=1 Nodes=extra[0-1],n[1-2] Switches=leaf3,row[1-2]
SwitchName=leaf3 Level=0 LinkSpeed=1 Nodes=extra[0-1]
"""
# Three levels: blocks of two, of four, and all; the last aggregate of four is not full.
AGGREGATED = """\
BlockName=b1 BlockIndex=0 Nodes=10.0.0.1,10.0.0.2 BlockSize=2
BlockName=b2 BlockIndex=1 Nodes=10.0.0.3,10.0.0.4 BlockSize=2
BlockName=b3 BlockIndex=2 Nodes=10.0.0.5,10.0.0.6 BlockSize=2
AggregatedBlock=b[1-2] BlockIndex=3 Nodes=10.0.0.1,10.0.0.2,10.0.0.3,10.0.0.4 BlockSize=4
AggregatedBlock=b3 BlockIndex=4 Nodes=10.0.0.5,10.0.0.6 BlockSize=4
AggregatedBlock=b[1-3] BlockIndex=5 Nodes=10.0.0.1,10.0.0.2,10.0.0.3,10.0.0.4,10.0.0.5,10.0.0.6 BlockSize=8
"""


@pytest.mark.parametrize(
    ("addr", "pattern", "kinds", "names"),
    [
        ("s0.s4.n1", "switch.switch.node", TREE, ("s0", "s4")),
        ("root.row.s4.n1", "switch.switch.switch.node", ("switch", "switch", "leaf switch"), ("root", "row", "s4")),
        ("s[1-2].s5.n1", "switch.switch.node", TREE, ("s[1-2]", "s5")),
        ("root..s5.n1", "switch.switch.switch.node", ("switch", "switch", "leaf switch"), ("root", "root", "s5")),
        ("t1:0:2:5.n1", "torus:x:y:z.node", ("torus",), ("t1",)),
    ],
)
def test_an_address_gives_a_domain_for_each_level(
    addr: str, pattern: str, kinds: tuple[str, ...], names: tuple[str, ...]
) -> None:
    assert from_slurm_address(addr, pattern) == Domains(kinds, {"n1": names})


@pytest.mark.parametrize(
    ("addr", "pattern"), [("n1", "switch.node"), ("s0.", "switch.node"), ("s0.n1", "switch.switch"), ("s0.n1", ".node")]
)
def test_an_address_that_does_not_follow_its_pattern_is_refused(addr: str, pattern: str) -> None:
    with pytest.raises(ConfigError, match="SLURM_TOPOLOGY_ADDR does not follow"):
        from_slurm_address(addr, pattern)
    assert discover({"SLURM_TOPOLOGY_ADDR": addr, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}, "n1") is None


@given(
    st.text("s0n1.:[]", max_size=20) | st.text(max_size=20),
    st.sampled_from(["switch", "node", "block", ""]) | st.text(),
)
def test_any_address_raises_nothing_but_a_config_error(addr: str, pattern: str) -> None:
    for text in (pattern, f"switch.{pattern}", f"switch.{pattern}.node"):
        try:
            found = from_slurm_address(addr, text)
        except ConfigError:
            continue
        assert found is None or all(len(names) == len(found.kinds) for names in found.of.values())


@pytest.mark.parametrize("node", ["n1", "n1.cluster"])
@pytest.mark.parametrize("host", ["n1", "n1.cluster"])
def test_a_node_finds_its_own_address_under_its_own_name(node: str, host: str) -> None:
    env = {"SLURM_TOPOLOGY_ADDR": f"s0.s4.{node}", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"}
    assert discover(env, host) == Domains(TREE, {host: ("s0", "s4")})


def test_scontrol_of_a_tree_with_three_levels_and_a_leaf_at_the_root() -> None:
    found = from_scontrol(THREE_LEVELS)
    assert found.kinds == ("switch", "switch", "leaf switch")
    assert found.of == {
        "n1": ("root", "row1", "leaf1"), "n2": ("root", "row2", "leaf2"),
        "extra0": ("root", "root", "leaf3"), "extra1": ("root", "root", "leaf3"),
    }  # fmt: skip


def test_scontrol_of_aggregated_blocks() -> None:
    found = from_scontrol(AGGREGATED)
    assert found.kinds == ("aggregated block", "aggregated block", "block")
    assert found.of["10.0.0.3"] == ("b[1-3]", "b[1-2]", "b2")
    assert found.of["10.0.0.5"] == ("b[1-3]", "b3", "b3")
    lost = "\n".join(line for line in AGGREGATED.splitlines() if "AggregatedBlock=b3" not in line)
    assert from_scontrol(lost).of["10.0.0.5"] == ("b[1-3]", "b[1-3]", "b3")


@pytest.mark.parametrize("line", ["SwitchName=s3 Level=x Nodes=n1", "SwitchName=s3 Level=0 Nodes=n[1-"])
def test_a_bad_line_of_scontrol_is_named(line: str) -> None:
    with pytest.raises(ConfigError, match="scontrol show topology, line 7: "):
        from_scontrol(THREE_LEVELS + line)


@given(st.lists(st.sampled_from([*'1-,[]n" \n', "SwitchName=", "AggregatedBlock=", "Level=", "BlockSize=", "Nodes="])))
def test_any_output_raises_nothing_but_a_config_error(words: list[str]) -> None:
    try:
        found = from_scontrol("".join(words))
    except ConfigError:
        return
    assert all(len(names) == len(found.kinds) for names in found.of.values())


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A command of that name, alone in PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path / "scontrol"


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    "text", ["exit 1", "echo 'SwitchName=s0 Level=0 Nodes=n1'; exit 1", "echo nothing", "echo 'SwitchName=s Nodes=n['"]
)
def test_slurm_that_cannot_tell_gives_none(scontrol: Path, text: str) -> None:
    script(scontrol, text)
    assert ask_slurm() is None


def test_slurm_that_does_not_answer_is_left_at_the_deadline(scontrol: Path) -> None:
    script(scontrol, "exec /bin/sleep 1000")
    assert ask_slurm(timeout_s=0.2) is None
