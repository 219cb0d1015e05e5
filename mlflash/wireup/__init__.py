"""How MPI processes that no launcher starts find each other, and the process that forks them in milliseconds.

In come the rank and size of a trainer (`launcher_variables`), and out come couriers (`launch`). These are processes
that have a rank of MPI. A trainer can start new ones as often as it needs to. This room imports only `errors`.

First the trainers find each other without MPI (`rendezvous`). They use a store of torch.distributed (`torch_store`),
their launcher's PMI (`pmi_client`), or a place that all of them know. From then on they use a small store at an address
of rank 0's host that all ranks can reach: `key_value_store`. Its client is `store_client`, and `interfaces` chooses the
address. In this store they agree on each world of MPI (`epoch_agreement`), on whether its processes can read each
other's memory (`cross_memory`), and hear if a rank leaves the job without notice.

A trainer asks its zygote for a courier (`zygote_client`). The `zygote` has imported everything and forks the courier
(`courier_process`). `pmi_server` answers what MPI asks while it starts, and `process_mapping` has the nodes of the
ranks. `mpich_segments` removes what a killed courier leaves in `/dev/shm`. If the job has a `zygote_host`, it starts
the zygotes of its node. They survive when a trainer is killed with everything that it has started. `own_process` asks
Linux for services, and messages are `frames`.
"""
