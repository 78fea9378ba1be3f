"""The processes of a rehearsal: they measure the device, the network between ranks, and a save."""
