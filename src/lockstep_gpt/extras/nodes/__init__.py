"""Several machines that start each other without a launcher, by the same command on each."""

START_ON_NODES = "lockstep_gpt.extras.nodes.machines:start_on_nodes"
MEETING = "lockstep_gpt.extras.nodes.machines"  # of the agents of all machines
