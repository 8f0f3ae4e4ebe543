"""Several machines that start each other without a launcher, by the same command on each."""

START_ON_NODES = ".extras.nodes.machines:start_on_nodes"
MEETING = ".extras.nodes.machines"  # of the agents of all machines
