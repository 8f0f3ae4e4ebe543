"""`strategy=fsdp2`: each rank holds a share of the model."""

CHECK = ".extras.sharding.check:refuse_impossible"
# Of a checkpoint in several files.
JOIN_PARTS = ".extras.sharding.fsdp2:join_parts"
MOVED = {
    "lockstep_gpt.training.sharding": "lockstep_gpt.extras.sharding.fsdp2",
}
