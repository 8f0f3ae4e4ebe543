"""Several machines without a launcher: you run the same command on each of them."""

# Group of settings -> its settings with this extra.
SETTINGS = {"launch": ".extras.nodes.nodes_settings:NodesLaunch"}
START_ON_NODES = ".extras.nodes.machines:start_on_nodes"
# strategy.comm_hook -> what builds DDP with it, for the links between them.
COMM_HOOKS = {name: f".extras.nodes.compression:{name}" for name in ("fp16", "bf16", "powersgd")}
CHECK_START = ".extras.nodes.compressible:refuse_impossible"
CHECK_RESUME = ".extras.nodes.compression:refuse_without_memory"
MEETING = ".extras.nodes.machines"  # for the agents of all machines
