"""The commands of the files in `scenarios/`."""

from tests.jobmaster.driven import Driven, Fault

from emberscale_api.job.roles import Role


class Scenario:
    """Carries out commands, each a line of words."""

    def __init__(self) -> None:
        self.driven = Driven()

    def run(self, line: str) -> None:
        """Carries out one command. Raises ValueError if it is unknown."""
        driven = self.driven
        match line.split():
            case ["job", *settings]:
                values = dict(setting.split("=") for setting in settings)
                self.driven = Driven(
                    records=10 * int(values.get("batches", 50)),
                    servers=int(values.get("ps", 2)),
                    interval=float(values.get("interval", 1000)),
                    sizes_open="sizes" in values,
                    target_pls=float(values.get("pls", 0)),
                )
            case ["start"]:
                driven.start()
            case ["train", "all"]:
                driven.train_all()
            case ["train", batches]:
                driven.train(int(batches))
            case ["push", batch, "to", member]:
                driven.ps[_index(member)].applied.setdefault(0, set()).add(int(batch))
            case ["snapshot"]:
                driven.pass_time(max(0.0, driven.job.checkpointed_at + driven.interval - driven.now) + 2)
            case ["pass", seconds]:
                driven.pass_time(float(seconds))
            case ["kill", member]:
                driven.kill(*_slot(member))
            case ["start", member]:
                driven.join(*_slot(member))
            case ["hang", member]:
                driven.quiet.add(member)
            case ["slow", member, "by", factor]:
                driven.factors[member] = float(factor)
            case ["wake", member]:
                driven.quiet.discard(member)
            case ["fail", call, "on", member, "with", code, *times]:
                driven.faults[call, _index(member)] = Fault(code=code, times=int(times[1]) if times else 1)
            case ["hang", call, "on", member]:
                driven.faults[call, _index(member)] = Fault(hangs=True)
            case ["lapse", "before", call, "on", member]:
                driven.faults[call, _index(member)] = Fault(lapses=True)
            case ["slip", "in", batch, "after", call, "on", member]:
                driven.faults[call, _index(member)] = Fault(batch=int(batch))
            case ["storage", "works" | "hangs" | "fails" as how]:
                driven.storage = how
            case ["master", "dies"]:
                driven.master_dies()
            case ["master", "dies", "without", "its", "last", writes, "writes"]:
                driven.master_dies(int(writes))
            case ["all", "die"]:
                driven.all_die()
            case ["plan", servers, "ps"]:
                driven.plan(int(servers))
            case ["suspend"]:
                driven.suspend()
            case _:
                raise ValueError(f"unknown command: {line}")


def _slot(member: str) -> tuple[Role, int]:
    role, _, index = member.partition("-")
    return Role(role), int(index)


def _index(member: str) -> int:
    return _slot(member)[1]
