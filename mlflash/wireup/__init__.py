"""How MPI processes that no launcher starts find each other, and the process that forks them in milliseconds.

In come the rank and size of a trainer (`launcher_variables`); out come couriers (`launch`): processes that have a rank
of MPI, any number of times in the life of a trainer. The trainers find each other without MPI (`rendezvous`): by a
store of torch.distributed (`torch_store`), by their launcher's PMI (`pmi_client`; afterwards `mpi_refused`), or at a
socket (`text_server`).

From then on they use a small store that all ranks can reach (`key_value_store`, with `store_limits`; its client is
`store_client`), at an address of rank 0's host (`own_address`, of certain `interfaces` only). There they agree on each
world of MPI (`epoch_agreement`), and on whether its processes can read each other's memory (`cross_memory`). A trainer
asks its zygote for a courier (`zygote_client`, `running_courier`). The zygote (`zygote`, `zygote_imports`) has imported
everything and forks (`forked_courier`, `courier_process`). `pmi_server` answers what MPI asks while it starts:
`process_mapping` has the nodes of the ranks, and `address_relay` the addresses of thousands of nodes. `mpich_segments`
removes what a killed courier leaves in `/dev/shm`. If a rank leaves the job without notice, its zygote tells the others
(`departures`). If the job has a `zygote_host`, this starts the zygotes of its node, which then survive when a trainer
and everything that it has started is killed. Processes of one user meet in a `private_directory`; `own_process` asks
Linux for services; messages are `frames`. This room imports `errors`.
"""
