"""The node agent: the process, one for each node and job, that starts and watches what runs there.

It has imported numpy and MPI, and forks couriers in milliseconds (`fork_server`). It answers what their MPI asks while
it starts (`pmi_server`), has one connection to the place where all nodes meet (`world`), and knows at once who has
ended. The agent of rank 0 is that place (`hub`). Trainers talk to the agent of their node (`seat`; their side is
`wireup.agent_client`). The first of them has started it, or somebody before them (`main`).

Under `mlflash run`, it also starts and ends the ranks of its node and passes on what they print and say (`ranks`), and
tells how the node is (`status`). `launcher.agents` is at the other end.
"""
