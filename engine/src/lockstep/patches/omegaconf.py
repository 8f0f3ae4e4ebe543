"""Private names of OmegaConf, each with the reason. Versions: OmegaConf 2.3 and 2.4."""

from omegaconf import DictConfig


def place_of(node: DictConfig) -> str:
    """Return a node's full name, such as `optim`; empty for a whole configuration.

    Only errors say it in public.
    """
    return str(node._get_full_key(None))
