"""How MPI processes that no launcher starts find each other, and the process that forks them in milliseconds.

In come the rank and size of a trainer (`launcher_variables`), and out come couriers (`launch`). These are processes
that have a rank of MPI. A trainer can start new ones as often as it needs to. This room imports only `errors`.

First the trainers find each other without MPI (`rendezvous`). They use a store of torch.distributed (`torch_store`),
their launcher's PMI (`pmi_client`, and afterward `mpi_refused`), or a socket (`text_server`). From then on they use a
small store at an address of rank 0's host that all ranks can reach: `key_value_store` with `store_limits`. Its client
is `store_client`, and `own_address` chooses the address among those of certain `interfaces`. In this store they agree
on each world of MPI (`epoch_agreement`), and on whether its processes can read each other's memory (`cross_memory`).

A trainer asks its zygote for a courier (`zygote_client`, `running_courier`). The zygote has imported everything
(`zygote`, `zygote_imports`) and forks the courier (`forked_courier`, `courier_process`). `pmi_server` answers what MPI
asks while it starts. For this, `process_mapping` has the nodes of the ranks, and `address_relay` the addresses of
thousands of nodes. `mpich_segments` removes what a killed courier leaves in `/dev/shm`.

If a rank leaves the job without notice, its zygote tells the others (`departures`). If the job has a `zygote_host`, it
starts the zygotes of its node. They survive when a trainer is killed with everything that it has started. Processes of
one user meet in a `private_directory`. `own_process` asks Linux for services, and messages are `frames`.
"""
