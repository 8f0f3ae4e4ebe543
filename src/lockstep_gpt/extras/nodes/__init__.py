"""Several machines that start each other without a launcher, by the same command on each."""

# Group of settings -> what it takes with this extra.
SETTINGS = {"launch": ".extras.nodes.nodes_settings:NodesLaunch"}
START_ON_NODES = ".extras.nodes.machines:start_on_nodes"
MEETING = ".extras.nodes.machines"  # of the agents of all machines
