"""Private names of OmegaConf, each with the reason. Versions: OmegaConf 2.3 and 2.4."""

from omegaconf import DictConfig


def place_of(node: DictConfig) -> str:
    """Return a node's full name, such as `optim`; empty for a whole configuration.

    Only errors say it in public.
    """
    return str(node._get_full_key(None))


def root_of(node: DictConfig) -> DictConfig:
    """Return the whole configuration of which a node is a part; a node alone is its own root."""
    root = node._get_root()
    return root if isinstance(root, DictConfig) else node
