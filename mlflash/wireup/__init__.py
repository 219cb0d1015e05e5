"""How MPI processes that no launcher starts find each other, and how a trainer has them forked.

In come the rank and size of a trainer (`launcher_variables`), and out come couriers (`launch`). These are processes
that have a rank of MPI. A trainer can start new ones as often as it needs to. This room imports only `errors`.

A trainer asks the agent of its node for a courier (`agent_client`). It finds the agent, or starts it (`agent_process`).
The agent has imported everything, and forks the courier (`courier_process`) as soon as the agents of all ranks have
agreed on its world of MPI. For that, agents meet at the one of rank 0. Where that is, trainers find out without MPI
(`rendezvous`): by a store of torch.distributed (`torch_store`), their launcher's PMI (`pmi_client`), or something that
all of them know (`secret`). `interfaces` chooses the address.

`process_mapping` has the nodes of the ranks, and `cross_memory` says whether the processes of a node can read each
other's memory. `mpich_segments` removes what a killed courier leaves in `/dev/shm`. `own_process` asks Linux for
services. Messages are `lines` of JSON; `line_client` is the end of a connection that threads use.
"""
