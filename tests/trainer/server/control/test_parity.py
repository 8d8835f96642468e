"""Whether a parameter server keeps parity, as the master or the manifest says."""

import pytest
from tests.trainer.server.control.conftest import CONTEXT, SECONDS, RefusedError, Server

from emberscale_api.job import FaultToleranceStrategy
from emberscale_api.rpc import master_pb2
from emberscale_api.wire import Header, Kind
from eventually import unwrap


def test_parity_is_kept_while_the_master_says_so_where_the_manifest_leaves_it_open(server: Server) -> None:
    def assigned(
        generation: int, parity: int, servers: int = 3, *, no_parity: bool = False, async_parity: bool = False
    ) -> None:
        routing = server.routing(generation, generation)
        routing.servers.extend(
            master_pb2.PsEndpoint(index=index, incarnation=f"i{index}", data_address="127.0.0.1:1")
            for index in range(1, servers)
        )
        routing.bucket_owners[:servers] = range(servers)
        routing.piece_owners[:3] = range(3)
        request = master_pb2.AssignRequest(
            routing=routing,
            manifest_json=server.job.to_json(),
            wait_seconds=SECONDS,
            parity=parity,
            no_parity=no_parity,
            async_parity=async_parity,
        )
        assert server.control.Assign(request, CONTEXT).done

    protection = server.mover.protection
    assigned(1, 0)
    assert protection.group is None
    assigned(2, 1)
    assert unwrap(protection.group).members == (0, 1, 2)
    assert not unwrap(protection.group).is_async
    assigned(3, 0)
    assert protection.group is None
    spec = server.job.spec
    erasure_coding = spec.fault_tolerance.model_copy(update={"strategy": FaultToleranceStrategy.ERASURE_CODING})
    three = spec.ps.model_copy(update={"replicas": 3})
    manifest = spec.model_copy(update={"fault_tolerance": erasure_coding, "ps": three})
    server.job = server.job.model_copy(update={"spec": manifest})
    assigned(4, 0)
    assert protection.group is not None, "as the manifest says"
    assigned(5, 1, async_parity=True)
    assert unwrap(protection.group).is_async
    assigned(6, 0, no_parity=True)
    assert protection.group is None
    assigned(7, 2, servers=300)
    assert unwrap(protection.group).layout.width == 4


def test_a_master_that_does_not_know_async_rebuilds_nothing_from_parity_that_lags(server: Server) -> None:
    routing = server.routing(1, 1)
    routing.servers.add(index=1, incarnation="i1", data_address="127.0.0.1:1")
    routing.bucket_owners[0] = routing.piece_owners[0] = 1
    assign = master_pb2.AssignRequest(
        routing=routing, manifest_json=server.job.to_json(), wait_seconds=SECONDS, parity=1, async_parity=True
    )
    assert server.control.Assign(assign, CONTEXT).done
    routing.version = 2
    prepare = master_pb2.PrepareRequest(
        move=1, since=1, routing=routing, manifest_json=server.job.to_json(), incarnation="i", lost=[1]
    )
    with pytest.raises(RefusedError, match="this master would not know which"):
        server.control.Prepare(prepare, CONTEXT)
    prepare.knows_async_parity = True
    assert server.control.Prepare(prepare, CONTEXT).done


def adoption(server: Server) -> master_pb2.PrepareRequest:
    """Returns the call by which a server is to adopt the other half of all buckets, whose owner is lost."""
    routing = server.routing(1, 1)
    routing.servers.add(index=1, incarnation="i1", data_address="127.0.0.1:1")
    routing.bucket_owners[:512] = [1] * 512
    manifest = server.job.to_json()
    assign = master_pb2.AssignRequest(routing=routing, manifest_json=manifest, wait_seconds=SECONDS, parity=1)
    assert server.control.Assign(assign, CONTEXT).done
    routing.version = 2
    routing.bucket_owners[:512] = [0] * 512
    return master_pb2.PrepareRequest(
        move=1, since=1, routing=routing, manifest_json=manifest, incarnation="i", lost=[1]
    )


def test_a_server_adopts_no_rows_that_do_not_fit_into_its_memory(server: Server) -> None:
    prepare = adoption(server)
    server.memory_left = 1000
    with pytest.raises(RefusedError, match=r"adopting rows takes about .* of memory, and 1,000 bytes are left"):
        server.control.Prepare(prepare, CONTEXT)
    server.memory_left = 1 << 30
    assert server.control.Prepare(prepare, CONTEXT).done


def test_adopted_rows_have_the_batches_that_the_switch_names(server: Server) -> None:
    prepare = adoption(server)
    assert server.control.Prepare(prepare, CONTEXT).done
    applied = [master_pb2.AppliedBatches(epoch=0, ranges=[0, 2])]
    switch = master_pb2.SwitchRequest(
        barrier=master_pb2.Barrier(generation=1, number=1, incarnation="i"),
        move=1,
        rebuilt=[master_pb2.RebuiltRows(server=1, applied=applied)],
    )
    for _ in range(2):  # the first answer may be lost
        server.control.Switch(switch, CONTEXT)
        for batch in (0, 1):
            lacking = unwrap(server.state.core.lacking(Header(Kind.PUSH, generation=1, version=2, batch=batch)))
            assert lacking.buckets.tolist() == [False] * 512 + [True] * 512
        assert server.state.core.lacking(Header(Kind.PUSH, generation=1, version=2, batch=2)) is None
