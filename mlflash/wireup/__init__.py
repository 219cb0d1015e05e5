"""How MPI processes that no launcher starts find each other, and the process that forks them in milliseconds.

In come the rank and size of a trainer (`launcher_variables`) and the address of a small store that all ranks can reach
(`key_value_store`, asked by `store_client`); out come couriers: processes that have a rank of MPI, any number of times
in the life of a trainer. A trainer asks its zygote for one (`zygote_client`); the zygote (`zygote`) has imported
everything and forks (`courier_process`); `pmi_server` answers what MPI asks while it starts, of where ranks are by
`process_mapping`; `mpich_segments` removes what a killed one leaves in `/dev/shm`. Messages are `frames`. It imports
`errors`.
"""
