"""What a mixture costs beside a single corpus of as many tokens: startup, batches, memory.

usage: python lab/benchmarks/mixtures.py [--sources 10] [--tokens 1_000_000_000] [--rounds 9]

The token files are sparse: zeros that take no space on disk. Startup is what a rank does from the
frozen settings to the windows of its first batch, in a new process that has imported everything.
Batches are of 16 x 1024 tokens in random windows of pages that were read before; rounds of both
kinds alternate.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lockstep.loading.order import RankOrder
from lockstep.mixtures.mixture import Mixture
from lockstep.tokens import prepare as preparing
from lockstep.tokens.recipe import folder_of, recipe_of
from lockstep.tokens.shards import FORMAT, Index, Shard, Split, write_index
from lockstep.tokens.sources.pretokenized import RandomTokens

from lockstep_gpt.data import Tokens

B, T, VOCABULARY = 16, 1024, 50257
BATCHES = 200  # in a round


def main() -> None:
    """Measure, and print one table; with `--one`, be the process that is measured."""
    options = _options()
    if options.one:
        print(json.dumps(_one(Path(options.folder), options.one, options.weights)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as root:
        _make(Path(root), options.sources, options.tokens)
        for weights in ("round", "odd"):
            rows_of_kind = {kind: [] for kind in ("single", "mixture")}
            for _ in range(options.rounds):
                for kind, rows in rows_of_kind.items():
                    rows.append(_measured(root, kind, weights))
            print(f"{options.sources} sources of {options.tokens:,} tokens, {weights} weights")
            for name in rows_of_kind["single"][0]:
                one, other = (
                    statistics.median(row[name] for row in rows_of_kind[k]) for k in rows_of_kind
                )
                print(f"  {name:<28}{one:12.4f} single{other:12.4f} mixture {other / one:8.3f} x")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sources", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=1_000_000_000, help="of each source")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", help="where the tokens go (default: the system's)")
    parser.add_argument("--weights", default="round")
    parser.add_argument("--one", choices=("single", "mixture"), help=argparse.SUPPRESS)
    return parser.parse_args()


def _data(root: Path, sources: int, tokens: int, weights: str) -> Mixture:
    settings = {f"s{number}": RandomTokens(tokens=tokens + number) for number in range(sources)}
    shares = [number + 1 for number in range(sources)]
    if weights == "odd":
        shares = [1.2345678 ** (number + 1) for number in range(sources)]
    return Mixture(
        root=str(root), sources=settings, weights=dict(zip(settings, shares, strict=True))
    )


def _make(root: Path, sources: int, tokens: int) -> None:
    """Write sparse prepared folders of each source, of the mixture, and of one large corpus."""
    data = _data(root, sources, tokens, "round")
    large = RandomTokens(root=str(root), tokens=sources * tokens)
    for part in [*data.make_sources().values(), large]:
        _make_sparse(part)
    folder = preparing.prepare(data)
    fingerprint = preparing.shards.load_index(folder).fingerprint
    (root / "measured.json").write_text(json.dumps([sources, tokens, fingerprint]))


def _make_sparse(data: Any) -> None:
    recipe = recipe_of(data)
    data.fingerprint = recipe.fingerprint
    splits = {}
    folder = folder_of(data)
    folder.mkdir(parents=True)
    for name, tokens in (("train", data.tokens - 100_000), ("val", 100_000)):
        with (folder / f"{name}-00000.bin").open("wb") as file:
            file.truncate(2 * tokens)
        splits[name] = Split(tokens, shards=[Shard(f"{name}-00000.bin", tokens, "")])
    tokenizer = recipe.tokenizer.to_dict()
    settings = {**recipe.settings, "held_out": None}
    of = (recipe.fingerprint, recipe.fingerprints, settings, splits)
    write_index(folder, Index(FORMAT, "<u2", tokenizer, *of))


def _measured(root: str, kind: str, weights: str) -> dict[str, float]:
    words = [sys.executable, __file__, "--folder", root, "--one", kind, "--weights", weights]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def _one(root: Path, kind: str, weights: str) -> dict[str, float]:
    sources, tokens, fingerprint = json.loads((root / "measured.json").read_text())
    mixture = _data(root, sources, tokens, weights)
    mixture.fingerprint = fingerprint
    single = RandomTokens(root=str(root), tokens=sources * tokens)
    single.fingerprint = recipe_of(single).fingerprint
    before = time.perf_counter()
    memory = _memory()
    begun = time.process_time()
    source = single if kind == "single" else mixture
    shape = {"block_size": T, "batch": B, "seed": 1}
    module: Any = Tokens(source, **shape, root=str(root), fingerprint=source.fingerprint)
    device = SimpleNamespace(root_device=SimpleNamespace(type="cpu"))
    places: dict[str, Any] = {"global_step": 0, "max_steps": 10**6, "accumulate_grad_batches": 1}
    places["distributed_sampler_kwargs"] = None
    module.trainer = SimpleNamespace(strategy=device, **places)
    loader = module.train_dataloader()
    windows = module.windows["train"]
    places_of_rank = RankOrder(loader.order, B, 0, 1)
    rows = next(iter(places_of_rank)).samples
    startup = time.perf_counter() - before
    cpu = time.process_time() - begun
    assert len(rows) == B
    passes = []
    for _ in range(6):  # the first maps the pages of these batches
        started = time.process_time()
        for _ in islice(map(windows.widen, loader), BATCHES):
            pass
        passes.append((time.process_time() - started) / BATCHES)
    batch_seconds = statistics.median(passes[1:])
    again = time.process_time()
    for _ in islice(places_of_rank, 10 * BATCHES):
        pass
    chosen = (time.process_time() - again) / 10 / BATCHES
    return {
        "startup, seconds": startup,
        "startup, CPU seconds": cpu,
        "batch, CPU ms": batch_seconds * 1e3,
        "of which choosing, CPU ms": chosen * 1e3,
        "own memory, MiB": (_memory() - memory) / 2**20,
        "peak of the process, MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def _memory() -> int:
    """Return the bytes of this process that are not backed by a file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith("RssAnon"))
    return int(kilobytes) << 10


if __name__ == "__main__":
    main()
