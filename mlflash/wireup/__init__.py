"""How MPI processes that no launcher starts find each other, and the process that forks them in milliseconds.

In come the rank and size of a trainer (`launcher_variables`); out come couriers (`launch`): processes that have a
rank of MPI, any number of times in the life of a trainer. The trainers find each other without MPI (`rendezvous`): by
a store of torch's (`torch_store`), by their launcher's PMI (`pmi_client`; `mpi_refused` from then on), or at a socket
(`text_server`).
From then on they go by a small store that all ranks can reach (`key_value_store`, with `store_limits`, asked by
`store_client`), at an address of rank 0's host (`own_address`; on some of its `interfaces` only): they agree there on
each world of MPI (`epoch_agreement`), also on whether its processes can read each other's memory (`cross_memory`). A
trainer asks its zygote for a courier (`zygote_client`, `running_courier`); the zygote (`zygote`, `zygote_imports`) has
imported everything and forks (`forked_courier`, `courier_process`); `pmi_server` answers what MPI asks while it starts,
of where ranks are by `process_mapping`, and of the addresses of thousands of nodes by `address_relay`; `mpich_segments`
removes what a killed one leaves in `/dev/shm`. A rank that leaves the job without a word is made known by its zygote
(`departures`). Where a `zygote_host` of the job is there, it starts the zygotes of its node, which then outlive what
kills a trainer with all that it has started. Processes of one user meet in a `private_directory`; what Linux does for
one that asks is `own_process`. Messages are `frames`.
It imports `errors`.
"""
