"""Routing tables as the master sends them."""

from emberscale_api.routing import PsAddress, RoutingTable
from emberscale_api.rpc import master_pb2


def routing_from_proto(routing: master_pb2.Routing) -> RoutingTable:
    """The routing table of a message."""
    return RoutingTable(
        generation=routing.generation,
        version=routing.version,
        servers=tuple(
            PsAddress(server.index, server.incarnation, server.data_address, server.control_address)
            for server in routing.servers
        ),
        bucket_owners=tuple(routing.bucket_owners),
        piece_owners=tuple(routing.piece_owners),
    )
