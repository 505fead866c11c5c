"""Extra checks (watches) that a rank's watchdog runs: for files that stop the run, for lost hosts, and for the lease on
the --save folder."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.extensions.operate.resilience.flags import ResilienceConfig, StopFileFlags
from megatron.training.hooks import Callback
from megatron.training.reliability.launch import Launch
from megatron.training.reliability.watchdog import Watch, Watchdog


class HostsAndFolders(Callback):
    """Callback that adds checks (watches) to a rank's watchdog, depending on the flags and the number of hosts. If a
    run does not need a watch, the module of the watch is not imported."""

    def watches(self, watchdog: Watchdog) -> Sequence[Watch]:
        first, found = watchdog.launch.rank == 0, list[Watch]()
        options = self.config.options(StopFileFlags)
        if first and (options.kill_switch_path or options.folders(self.config)):
            from megatron.extensions.operate.resilience.save_folder import StopFiles

            found.append(StopFiles(self.config, watchdog))
        if self.watches_hosts(watchdog.launch):
            from megatron.extensions.operate.resilience.host_watch import watch_hosts

            found.append(watch_hosts(self.config, watchdog))
        if first and self.config.checkpoint.save is not None:
            from megatron.extensions.operate.resilience.save_lease import LeaseWatch

            found.append(LeaseWatch(self.config, watchdog))
        return found

    def watches_hosts(self, launch: Launch) -> bool:
        """Return True if the ranks watch other hosts."""
        return launch.several_hosts and self.config.options(ResilienceConfig).host_heartbeat_timeout_seconds > 0
