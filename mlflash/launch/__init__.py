"""How the couriers of all ranks are started and find each other, whatever has started the trainers.

In come the rank and size of a trainer (`launcher_variables`), and out come couriers (`couriers`). These are processes
that have a rank of MPI. A trainer can start new ones as often as it needs to.

A trainer asks the agent of its node for a courier (`agent_client`). It finds the agent, or starts it (`agent_process`).
The agent is a process for each node and job (`agent`): it has imported everything that couriers need, forks them
(`fork_server`), answers what their MPI asks at its start (`pmi_server`), and knows which of them has ended (`seat`).
The agents of all nodes meet at that of rank 0 (`hub`; `world` is the connection to it). Where that is, trainers find
out without MPI (`rendezvous`): by a store of torch.distributed (`torch_store`), their launcher's PMI (`pmi_client`), or
something that all of them know (`secret`). `interfaces` chooses the address. Under `mlflash run` an agent has the ranks
of its node, too (`ranks`).

`process_mapping` has the nodes of the ranks, and `cross_memory` says whether the processes of a node can read each
other's memory. `mpich_segments` removes what a killed courier leaves in `/dev/shm`. `own_process` asks Linux for
services. Messages are `lines` of JSON; `line_client` is the end of a connection that threads use.
"""
