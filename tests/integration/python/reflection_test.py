# A client with no generated code: reflection alone must be enough to use the service.
#
# Starts two daemons of EXPERTD_BIN_DIR, forms a group over gloo, runs a Forward and reads an error's
# details, with messages that come from the daemons' own descriptors.

import concurrent.futures
import time

import grpc
import numpy as np
import pytest
from google.protobuf import descriptor_pool, message_factory
from google.rpc import error_details_pb2, status_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from tests.integration.python import daemon_process

WORLD = 2
HIDDEN = 16
EXPERTS = 4
TOP_K = 2
DEADLINE = 30  # Seconds, of anything here.


class Daemon:
    """One daemon as seen through reflection."""

    def __init__(self, address):
        self.channel = grpc.insecure_channel(address)
        self.database = ProtoReflectionDescriptorDatabase(self.channel)
        self.pool = descriptor_pool.DescriptorPool(self.database)

    def message(self, name):
        descriptor = self.pool.FindMessageTypeByName(f"expertd.v1.{name}")
        return message_factory.GetMessageClass(descriptor)

    def call(self, service, method, **fields):
        descriptor = self.pool.FindServiceByName(f"expertd.v1.{service}").methods_by_name[method]
        request_class = message_factory.GetMessageClass(descriptor.input_type)
        response_class = message_factory.GetMessageClass(descriptor.output_type)
        stub = self.channel.unary_unary(
            f"/expertd.v1.{service}/{method}",
            request_serializer=request_class.SerializeToString,
            response_deserializer=response_class.FromString,
        )
        return stub(request_class(**fields), timeout=DEADLINE)


class Group:
    """Daemons of one epoch; counts sequences."""

    def __init__(self, daemons):
        self.daemons = daemons
        self.sequence = 0
        infos = [d.call("ControlService", "GetServerInfo") for d in daemons]
        self.epoch = max(1 + max(i.highest_epoch_seen for i in infos), int(time.time() * 1000))
        bootstrap = daemons[0].call(
            "ControlService", "CreateBootstrapId", group_id="g", epoch=self.epoch, claimant="test"
        )
        members = [
            dict(slot=i.slot, address=i.address, incarnation=i.incarnation) for i in infos
        ]
        config = dict(
            dp_size=1, ep_size=len(daemons), backend="gloo", max_tokens_per_rank=8,
            max_hidden=HIDDEN, max_top_k=TOP_K, max_experts=EXPERTS, max_token_dtype=1,
        )
        self.joined = self.on_all(
            lambda rank, daemon: daemon.call(
                "ControlService", "JoinGroup", group_id="g", epoch=self.epoch, rank=rank,
                members=members, config=config, bootstrap_id=bootstrap.bootstrap_id,
            )
        )
        self.sequence = self.joined[0].group.next_sequence

    def on_all(self, call):
        """call(rank, daemon) on all ranks at once; exceptions are returned in place."""
        with concurrent.futures.ThreadPoolExecutor(len(self.daemons)) as pool:
            futures = [pool.submit(call, r, d) for r, d in enumerate(self.daemons)]
        results = []
        for future in futures:
            error = future.exception()
            assert error is None or isinstance(error, grpc.RpcError), error
            results.append(error or future.result())
        return results

    def collective(self, service, method, fields):
        """fields(rank) -> the request without its header; responses or errors in rank order."""
        sequence, self.sequence = self.sequence, self.sequence + 1
        return self.on_all(
            lambda rank, daemon: daemon.call(
                service, method, **fields(rank),
                header=dict(
                    group_id="g", epoch=self.epoch, sequence=sequence, request_id=100 + rank
                ),
            )
        )


@pytest.fixture(scope="module")
def daemons(tmp_path_factory):
    with daemon_process.Fleet(WORLD, tmp_path_factory.mktemp("logs")) as fleet:
        clients = [Daemon(address) for address in fleet.addresses]
        yield clients
        for client in clients:
            client.channel.close()


@pytest.fixture(scope="module")
def group(daemons):
    return Group(daemons)


@pytest.fixture(scope="module")
def layer(group):
    config = dict(
        expert_count=EXPERTS, hidden=HIDDEN, intermediate=8, top_k=TOP_K, token_dtype=1,
        weight_dtype=1,
    )
    created = group.collective(
        "LayerService", "CreateLayer", lambda rank: dict(layer_id="moe", config=config)
    )
    initialized = group.collective(
        "LayerService", "InitializeWeights", lambda rank: dict(layer_id="moe", seed=3)
    )
    for result in created + initialized:
        assert not isinstance(result, grpc.RpcError), result
    return "moe"


def tensor(dtype, array):
    return dict(dtype=dtype, shape=array.shape, data=array.tobytes())


def forward_fields(layer_id, rank, ids=None):
    tokens = np.random.default_rng(rank).standard_normal((3, HIDDEN)).astype("<f4")
    if ids is None:
        ids = np.array([[0, 3], [1, 2], [2, -1]], dtype="<i4")
    weights = np.full((3, TOP_K), 0.5, dtype="<f4")
    topk = dict(topk_ids=tensor(6, ids), topk_weights=tensor(1, weights))
    return dict(layer_id=layer_id, tokens=tensor(1, tokens), topk=topk)


def error_details(error):
    """The google.rpc.ErrorInfo and BadRequest of an error."""
    trailer = dict(error.trailing_metadata())["grpc-status-details-bin"]
    status = status_pb2.Status.FromString(trailer)
    info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    for detail in status.details:
        detail.Unpack(info)
        detail.Unpack(bad_request)
    return status, info, bad_request


def test_lists_the_public_services(daemons):
    services = set(daemons[0].database.get_services())
    for name in ("ControlService", "LayerService", "StepService", "TensorService"):
        assert f"expertd.v1.{name}" in services
    assert "grpc.health.v1.Health" in services


def test_error_detail_messages_are_served(daemons):
    for name in ("ErrorInfo", "BadRequest", "RetryInfo"):
        assert daemons[0].pool.FindMessageTypeByName(f"google.rpc.{name}")


def test_server_info(daemons):
    infos = [d.call("ControlService", "GetServerInfo") for d in daemons]
    assert [i.slot for i in infos] == list(range(WORLD))
    assert len({i.incarnation for i in infos}) == WORLD
    assert len({i.boot_id for i in infos}) == 1
    assert infos[0].device.kind == "cpu"
    assert infos[0].version
    assert {s.name: s.supported for s in infos[0].backends}["gloo"]
    assert all(s.reason for s in infos[0].backends if not s.supported)


def test_group_is_formed(group):
    for rank, joined in enumerate(group.joined):
        assert not isinstance(joined, grpc.RpcError), joined
        assert joined.group.rank == rank
        assert joined.group.epoch == group.epoch
        assert len(joined.group.members) == WORLD
        assert joined.group.backend == "gloo"
    assert group.joined[0].group.next_sequence == 1


def test_forward(group, layer):
    results = group.collective(
        "StepService", "Forward", lambda rank: forward_fields(layer, rank)
    )
    for result in results:
        assert not isinstance(result, grpc.RpcError), result
        output = np.frombuffer(result.output.data, dtype="<f4").reshape(3, HIDDEN)
        assert list(result.output.shape) == [3, HIDDEN]
        assert np.isfinite(output).all()
        assert np.abs(output).max() > 0
    received = [n for result in results for n in result.stats.tokens_per_expert]
    assert received == [WORLD, WORLD, 2 * WORLD, WORLD]


def test_an_error_carries_its_details(group, layer):
    def fields(rank):
        bad = np.array([[0, 1], [1, EXPERTS], [2, -1]], dtype="<i4")
        return forward_fields(layer, rank, bad if rank == 1 else None)

    peer, guilty = group.collective("StepService", "Forward", fields)
    assert guilty.code() == grpc.StatusCode.INVALID_ARGUMENT
    status, info, bad_request = error_details(guilty)
    assert status.code == guilty.code().value[0]
    assert status.message == guilty.details()
    assert info.reason == "EXPERT_ID_RANGE"
    assert info.domain == "expertd.v1"
    assert any("topk_ids[1,1]" in v.field for v in bad_request.field_violations)
    assert all(v.description for v in bad_request.field_violations)

    assert peer.code() == grpc.StatusCode.ABORTED
    _, info, _ = error_details(peer)
    assert info.reason == "PEER_REJECTED"
    assert "1" in info.metadata.values()  # The guilty rank.

    results = group.collective(
        "StepService", "Forward", lambda rank: forward_fields(layer, rank)
    )
    assert not any(isinstance(result, grpc.RpcError) for result in results)


def test_unimplemented_methods_say_so(group):
    results = group.collective(
        "LayerService", "SaveWeights", lambda rank: dict(layer_id="moe", path="/x")
    )
    for error in results:
        assert error.code() == grpc.StatusCode.UNIMPLEMENTED
        assert error_details(error)[1].reason == "NOT_IMPLEMENTED"
    # Whether that consumed a sequence is the daemons' to say.
    described = group.daemons[0].call("ControlService", "DescribeGroup")
    group.sequence = described.group.next_sequence


def test_leaving(group):
    results = group.on_all(
        lambda rank, daemon: daemon.call(
            "ControlService", "LeaveGroup", group_id="g", epoch=group.epoch
        )
    )
    assert not any(isinstance(result, grpc.RpcError) for result in results)
    described = group.daemons[0].call("ControlService", "DescribeGroup")
    assert described.group.group_id == ""
