"""One rank's part in `doctor`: its own checks, then the checks that all ranks make together."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch._C._distributed_c10d import PrefixStore

from lockstep.cluster import collectives, environment, expectation, gpus, speed, topology
from lockstep.cluster.collectives import Bandwidth
from lockstep.cluster.facts import Facts, collect, compare
from lockstep.cluster.meeting import (
    Absent,
    Meeting,
    examine_clocks,
    open_meeting,
)
from lockstep.cluster.profile import profile
from lockstep.cluster.report import (
    FAILURE,
    Finding,
    Report,
    failure,
    merged,
    named,
    ok,
)
from lockstep.cluster.speed import Speed
from lockstep.errors import UserError
from lockstep.launch import devices
from lockstep.launch.launch_settings import LaunchSettings
from lockstep.plan.experiment import trains_language_model, vocabulary
from lockstep.ranks.ranks import Ranks, backend_of
from lockstep.settings import counted, node_of

SEE = "see the output of rank 0"
# If one of these checks fails, ranks that work together would hang or compute wrong results.
NEEDED = {"launcher", "device", "devices", "names", "versions"}


@dataclass
class Examination:
    """One rank of an examination.

    Args:
        config: the run's configuration.
        values: the same as plain values, as this rank composed it.
        ranks: this process's place.
        limit: the longest wait for another rank, in seconds.
        import_seconds: seconds to import torch and Lightning.
        save: where rank 0 writes its measurements as a profile; None: nowhere.
    """

    config: DictConfig
    values: dict[str, Any]
    ranks: Ranks
    limit: float
    import_seconds: float
    save: Path | None = None
    report: Report = field(init=False)
    status: str = FAILURE  # of all ranks, as rank 0 reports it
    accelerator: str = "cpu"

    def __post_init__(self) -> None:
        self.report = Report(self.ranks.world_size)

    def run(self) -> Report:
        """Run all checks, as far as the other ranks answer in time.

        Returns:
            On rank 0, the report of all ranks; elsewhere, why this rank could not take part, if so.
        """
        started = time.monotonic()
        findings = self._alone()
        try:
            meeting = open_meeting(self.ranks, self.limit)
            if self._introduce(meeting, findings):
                self._share_folder(meeting)
                self._compare_clocks(meeting)
                self._work(meeting)
            self.status = meeting.close(self.report.status)
        except Absent as absent:
            self._add(*merged([findings]), absent.finding)
        except dist.DistError:
            self._add(failure("rendezvous", "rank 0, which hosts the store, has ended", SEE))
        self.report.seconds = time.monotonic() - started
        return self.report

    def _add(self, *findings: Finding) -> None:
        self.report.findings += findings

    def _alone(self) -> list[Finding]:
        """Run the checks that need no other rank."""
        variables = os.environ
        findings: list[Finding] = []
        try:
            self.accelerator = devices.found(
                self.values, LaunchSettings.of(self.values)
            ).accelerator
            findings += gpus.examine_device(
                self.ranks.local_rank, self.ranks.local_world_size, self.accelerator
            )
        except UserError as error:
            findings.append(failure("device", str(error), "change that setting"))
        if self.accelerator == "cuda" and self.ranks.local_rank == 0:
            paths = gpus.topology(range(self.ranks.local_world_size))
            if paths:
                findings += topology.examine(paths)
        return [
            environment.examine_imports(self.import_seconds),
            *environment.examine_launcher(variables),
            *environment.examine_nodes(self.ranks.world_size, self.ranks.local_world_size),
            *findings,
            *environment.examine_variables(variables),
            *environment.examine_names(variables, self.ranks.num_nodes),
            *environment.examine_shared_memory(),
            *environment.examine_disks(self.config),
        ]

    def _introduce(self, meeting: Meeting, findings: list[Finding]) -> bool:
        """Meet and compare the ranks' facts; return whether the ranks can work together."""
        facts = collect(self.ranks, self.accelerator, self.values)
        words = {"facts": asdict(facts), "findings": [asdict(finding) for finding in findings]}
        messages = meeting.gather("facts", words)
        if self.ranks.rank:
            return bool(meeting.hear("go"))
        everyone = [Facts(**message["facts"]) for message in messages]
        alone = [
            [Finding.from_json(finding) for finding in message["findings"]] for message in messages
        ]
        self._add(ok("rendezvous", f"{counted(len(messages), 'rank')} met at {_address()}"))
        self._add(*merged(alone), *compare(everyone))
        self.hosts = [facts.host for facts in everyone]
        self.device_name = facts.device_name
        wrong = {finding.check for finding in self.report.findings if finding.status == FAILURE}
        meeting.tell("go", not wrong & NEEDED)
        return not wrong & NEEDED

    def _share_folder(self, meeting: Meeting) -> None:
        """Check on every rank for a file that rank 0 has left where the run directory goes."""
        folder = environment.nearest_folder(Path(self.config.get("run_dir") or "runs"))
        if self.ranks.rank:
            name = meeting.hear("folder")
            meeting.gather("folder", [str(folder), environment.appears(folder / name)])
            return
        with environment.left_in(folder) as name:
            meeting.tell("folder", name)
            replies = meeting.gather("folder", [str(folder), True])
        blind = [rank for rank, (_, seen) in enumerate(replies) if not seen]
        if not blind:
            self._add(ok("run directory", f"all ranks see {folder}"))
            return
        line = f"{named(blind)} does not see what rank 0 writes in {folder}"
        if replies[blind[0]][0] != str(folder):
            line += f", but looks in {replies[blind[0]][0]}"
        fix = "set run_dir to the full path of a folder that all nodes share"
        self._add(failure("run directory", line, fix))

    def _compare_clocks(self, meeting: Meeting) -> None:
        offsets = meeting.clock_offsets()
        if offsets:
            self._add(examine_clocks(offsets))

    def _work(self, meeting: Meeting) -> None:
        """Run the collectives and speed tests, and send the results to rank 0."""
        findings: list[Finding] = []
        measured: list[Bandwidth] = []
        device = torch.device("cpu")
        try:
            device = self._device()
            with self._group(meeting, device):
                findings, measured = self._exchange(device)
                measured_speed = self._speed(device)
            words = {"findings": findings, "links": measured, "speed": measured_speed}
        except (RuntimeError, ValueError) as error:
            line = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            fix = "NCCL_DEBUG=INFO or TORCH_CPP_LOG_LEVEL=INFO shows more"
            words = {"findings": [failure("collectives", line, fix)], "links": [], "speed": None}
        results = meeting.gather("work", _plain(words))
        if self.ranks.rank == 0:
            self._conclude(results, device)

    def _device(self) -> torch.device:
        if self.accelerator == "cpu":
            return torch.device("cpu")
        torch.cuda.set_device(self.ranks.local_rank)
        return torch.device("cuda", self.ranks.local_rank)

    @contextlib.contextmanager
    def _group(self, meeting: Meeting, device: torch.device) -> Iterator[None]:
        if self.ranks.world_size == 1:
            yield
            return
        chosen = node_of(self.values, "strategy").get("process_group_backend")
        backend = backend_of(self.accelerator, chosen)
        dist.init_process_group(
            backend,
            store=PrefixStore("group", meeting.store),
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            timeout=timedelta(seconds=self.limit),
            device_id=device if backend == "nccl" else None,  # connects now, as in training
        )
        yield
        dist.destroy_process_group()

    def _exchange(self, device: torch.device) -> tuple[list[Finding], list[Bandwidth]]:
        if self.ranks.world_size == 1:
            return [ok("collectives", "one rank has no peer to exchange data with")], []
        findings = collectives.examine_results(self.ranks, device)
        findings += collectives.examine_step(self.ranks, device)
        groups = collectives.links(self.ranks, self.limit)
        return findings, [collectives.measure(link, groups[link], device) for link in groups]

    def _speed(self, device: torch.device) -> Speed:
        """Measure while all others do: shared resources slow them down as they will in training."""

        def together() -> None:
            if self.ranks.world_size > 1:
                is_nccl = dist.get_backend() == "nccl"  # only it takes devices
                dist.barrier(device_ids=[device.index] if is_nccl else None)

        has_tokens = trains_language_model(self.config) and "source" in (
            self.config.get("data") or {}
        )
        vocab_size = vocabulary(self.config.data) if has_tokens else None
        return speed.measure(self.config, device, vocab_size, together)

    def _conclude(self, results: list[dict[str, Any]], device: torch.device) -> None:
        """Combine the measurements of all ranks."""
        self._add(
            *merged(
                [
                    [Finding.from_json(finding) for finding in result["findings"]]
                    for result in results
                ]
            )
        )
        links = collectives.slowest(
            [[Bandwidth(**link) for link in result["links"]] for result in results]
        )
        if links:
            self.report.tables["all-reduce, slowest rank"] = collectives.table(links)
            self._add(*collectives.examine_bandwidth(links, self._expected()))
        speeds = [Speed(**result["speed"]) for result in results if result["speed"]]
        if len(speeds) < self.ranks.world_size:
            return
        self.report.tables["speed of each rank"] = speed.table(speeds, self.hosts)
        self._add(*speed.stragglers(speeds))
        if self.save:
            hardware = profile(self.config, self.ranks, device, self.device_name, speeds, links)
            hardware.save(self.save)
            self._add(ok("profile", f"saved in {self.save}"))

    def _expected(self) -> dict[str, float | None]:
        if self.accelerator == "cpu":
            return {"between nodes": expectation.between()}
        devices = range(self.ranks.local_world_size)
        within = expectation.within(gpus.topology(devices), devices)
        return {"within a node": within, "between nodes": expectation.between()}


def _plain(words: dict[str, Any]) -> dict[str, Any]:
    measured_speed = words["speed"]
    return {
        "findings": [asdict(finding) for finding in words["findings"]],
        "links": [asdict(link) for link in words["links"]],
        "speed": asdict(measured_speed) if measured_speed else None,
    }


def _address() -> str:
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
