"""How a run uses less of a device's memory, by its settings; torch isn't imported."""

from lockstep_gpt.config import Config


def less_memory(config: Config, world_size: int) -> str:
    """Return the next smaller micro-batch at the same global batch, and other memory savers.

    Args:
        config: the run's configuration.
        world_size: total number of ranks.
    """
    batch = config.batch
    suggestions = []
    share = (batch.global_size or 0) // world_size  # samples of a device in one step
    micro = batch.micro_size or share
    if share:
        divisors = [size for size in range(1, micro) if share % size == 0]
        if divisors:
            suggestions.append(
                f"batch.micro_size={divisors[-1]} ({share // divisors[-1]} micro-batches per step; "
                "nothing else changes)"
            )
    elif micro > 1:
        suggestions.append(f"batch.micro_size={micro // 2}")
    if config.trains_gpt and not config.model.activation_checkpointing:
        suggestions.append("model.activation_checkpointing=true")
    if config.precision == "32-true":
        suggestions.append("precision=bf16-mixed")
    return "; ".join(suggestions) or "a smaller model, or devices with more memory"
