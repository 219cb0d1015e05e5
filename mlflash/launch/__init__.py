"""How the couriers of all ranks are started and find each other, whatever has started the trainers.

In come the rank and size of a trainer (`launcher_variables`), and out come couriers (`couriers`). These are processes
that have a rank of MPI. A trainer can start new ones as often as it needs to.

A trainer asks the agent of its node for a courier (`agent_client`). It finds the agent, or starts it (`agent_process`).
The agent is a process for each node and job (`agent`): it has imported everything that couriers need, forks them
(`fork_server`), answers what their MPI asks at its start (`pmi_server`), and knows which of them has ended (`seat`).
The agents of all nodes meet at that of rank 0 (`hub`; each has a `hub_connection`). Where that is, trainers find out
without MPI (`rendezvous`), for example by their launcher's PMI (`pmi_client`). `interfaces` chooses the address. Under
`mlflash run` an agent has the ranks of its node, too (`rank_processes`).

`courier_mpi` knows which MPI couriers load, whether they can read each other's memory, and what a killed one leaves in
`/dev/shm`. `program_mpi` is that of the training. `own_process` asks Linux for services. Messages are `lines` of JSON;
`line_client` is the end of a connection that threads use, and `handshake` proves who is there.
"""
