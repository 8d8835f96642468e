"""The commands of the files in `scenarios/`, and the text that follows them there."""

from tests.jobmaster.driven import Driven
from tests.jobmaster.driven_master import Fault

from emberscale_api.checkpoint import number_of
from emberscale_api.job.roles import Role
from emberscale_jobmaster.figures import phase_of
from emberscale_jobmaster.operations import Checkpointing, Move, Reload, Restore
from emberscale_jobmaster.state import Stage


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
                driven.ps[_index(member)].apply(int(batch))
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
                driven.storage.behaviour = how
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


def describe(driven: Driven) -> str:
    """Returns what a scenario prints of its job: the phase, what goes on, and what has gone wrong."""
    state = driven.job
    table = state.routing.table
    ledger = state.ledger
    done = f"{ledger.done_count} of {ledger.batches}" if state.stage is Stage.TRAIN else str(state.stage)
    parts = [f"{phase_of(state, driven.spec)}, generation {table.generation}, version {table.version}, {done}"]
    if state.checkpoint:
        parts.append(f"checkpoint {int(state.checkpoint)}")
    parts += [_described(operation) for operation in state.operations]
    for trouble in state.troubles.values():
        parts.append(f"{trouble.reason}: {trouble.message} ({trouble.attempts})")
    if given_up := state.members.given_up():
        parts.append("silent: " + ", ".join(sorted(member.slot for member in given_up)))
    if held := [server.member.slot for server in driven.ps.values() if server.held is not None]:
        parts.append("held: " + ", ".join(held))
    parts += [
        f"forgotten by {', '.join(f'ps-{index}' for index in share.servers)}: {share.samples} samples on "
        f"{share.share:.0%} of the rows, "
        f"{f'from checkpoint {int(share.checkpoint)}' if share.checkpoint else 'rebuilt from parity'}"
        for share in state.forgotten
    ]
    slow = [(name, one.reported) for name, one in sorted(driven.state.seen.slow.items()) if one.lasting]
    parts += [f"slow: {name}, {factor:g} times" for name, factor in slow]
    if state.outcome is not None:
        parts.append(f"{state.outcome.reason}: {state.outcome.message}")
    return "\n  ".join(parts)


def _described(operation: object) -> str:
    match operation:
        case Restore(phase=phase):
            return f"restore: {phase}"
        case Reload(phase=phase):
            return f"reload: {phase}"
        case Checkpointing(checkpoint=checkpoint, phase=phase, purpose=purpose):
            return f"{purpose} checkpoint {number_of(checkpoint)}: {phase}"
        case Move(phase=phase, table=table):
            return f"move to {len(table.servers)} ps: {phase}"
        case _:
            return "pruning"


def _slot(member: str) -> tuple[Role, int]:
    role, _, index = member.partition("-")
    return Role(role), int(index)


def _index(member: str) -> int:
    return _slot(member)[1]
