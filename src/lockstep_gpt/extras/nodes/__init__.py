"""Several machines that start each other without a launcher, by the same command on each."""

# Group of settings -> what it takes with this extra.
SETTINGS = {"launch": ".extras.nodes.nodes_settings:NodesLaunch"}
START_ON_NODES = ".extras.nodes.machines:start_on_nodes"
# strategy.comm_hook -> what makes DDP with it, for the links between them.
COMM_HOOKS = {name: f".extras.nodes.compression:{name}" for name in ("fp16", "bf16", "powersgd")}
CHECK_START = ".extras.nodes.compressible:refuse_impossible"
CHECK_RESUME = ".extras.nodes.compression:refuse_without_memory"
MEETING = ".extras.nodes.machines"  # of the agents of all machines
