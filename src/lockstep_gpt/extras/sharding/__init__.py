"""`strategy=fsdp2`: each rank stores a shard of the model."""

CHECK = ".extras.sharding.check:refuse_impossible"
# For a checkpoint in several files.
JOIN_PARTS = ".extras.sharding.fsdp2:join_parts"
MOVED = {
    "lockstep_gpt.training.sharding": "lockstep_gpt.extras.sharding.fsdp2",
}
