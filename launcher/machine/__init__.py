"""The machine: devices, nodes, network, storage, installed software, and the services around it."""
