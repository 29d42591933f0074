// Starts daemons, claims an epoch at the first and joins all of them.
#include "tests/testing/daemon_group.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/status_macros.h"
#include "grpcpp/create_channel.h"
#include "server/config.h"

namespace expertd::testing {
namespace {

constexpr int kAnyMessageSize = -1;

std::shared_ptr<grpc::Channel> Connect(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kAnyMessageSize);
  arguments.SetMaxSendMessageSize(kAnyMessageSize);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

template <typename Value>
v1::Tensor MakeTensor(v1::DType dtype, const std::vector<int64_t>& shape,
                      const std::vector<Value>& values) {
  v1::Tensor tensor;
  tensor.set_dtype(dtype);
  tensor.mutable_shape()->Assign(shape.begin(), shape.end());
  tensor.set_data(values.data(), values.size() * sizeof(Value));
  return tensor;
}

}  // namespace

v1::GroupConfig SmallGroupConfig(int64_t ranks) {
  v1::GroupConfig config;
  config.set_ep_size(ranks);
  config.set_backend("loopback");
  config.set_max_tokens_per_rank(64);
  config.set_max_hidden(64);
  config.set_max_top_k(4);
  config.set_max_experts(8 * ranks);
  config.set_max_token_dtype(v1::DTYPE_F32);
  config.set_base_timeout_ms(10000);
  return config;
}

absl::StatusOr<std::unique_ptr<DaemonGroup>> DaemonGroup::StartDaemons(DaemonGroupOptions options) {
  std::unique_ptr<DaemonGroup> group(new DaemonGroup(std::move(options)));
  for (int64_t slot = 0; slot < group->options_.ranks; ++slot) {
    server::Config config = server::DefaultConfig();
    config.listen = "127.0.0.1:0";
    config.slot = slot;
    config.default_backend = "loopback";
    ASSIGN_OR_RETURN(group->daemons_.emplace_back(), server::Daemon::Create(config));
    group->channels_.push_back(Connect(group->daemons_.back()->address()));
  }
  return group;
}

absl::StatusOr<std::unique_ptr<DaemonGroup>> DaemonGroup::Start(DaemonGroupOptions options) {
  ASSIGN_OR_RETURN(std::unique_ptr<DaemonGroup> group, StartDaemons(std::move(options)));
  RETURN_IF_ERROR(FirstError(group->Join()));
  return group;
}

absl::StatusOr<v1::JoinGroupRequest> DaemonGroup::Claim() {
  v1::JoinGroupRequest join;
  uint64_t highest = 0;
  for (int64_t rank = 0; rank < ranks(); ++rank) {
    const auto info = Call(rank, &v1::ControlService::Stub::GetServerInfo, {});
    RETURN_IF_ERROR(info.status);
    highest = std::max(highest, info.response.highest_epoch_seen());
    v1::Member* member = join.add_members();
    member->set_slot(info.response.slot());
    member->set_address(info.response.address());
    member->set_incarnation(info.response.incarnation());
  }
  epoch_ = highest + 1;
  v1::CreateBootstrapIdRequest claim;
  claim.set_group_id(options_.group_id);
  claim.set_epoch(epoch_);
  claim.set_claimant("test");
  const auto claimed = Call(0, &v1::ControlService::Stub::CreateBootstrapId, claim);
  RETURN_IF_ERROR(claimed.status);
  join.set_group_id(options_.group_id);
  join.set_epoch(epoch_);
  join.set_bootstrap_id(claimed.response.bootstrap_id());
  return join;
}

std::vector<Reply<v1::JoinGroupResponse>> DaemonGroup::Join(std::vector<v1::GroupConfig> configs) {
  const absl::StatusOr<v1::JoinGroupRequest> join = Claim();
  if (!join.ok()) return {{join.status(), {}}};
  std::vector<v1::JoinGroupRequest> requests(ranks(), *join);
  for (int64_t rank = 0; rank < ranks(); ++rank) {
    requests[rank].set_rank(rank);
    *requests[rank].mutable_config() = configs.empty() ? options_.config : configs[rank];
  }
  sequence = 1;
  return CallAll(&v1::ControlService::Stub::JoinGroup, requests);
}

v1::StepHeader DaemonGroup::Header() const {
  v1::StepHeader header;
  header.set_group_id(options_.group_id);
  header.set_epoch(epoch_);
  header.set_sequence(sequence);
  header.set_request_id(RandomId());
  return header;
}

v1::Tensor F32Tensor(const std::vector<int64_t>& shape, const std::vector<float>& values) {
  return MakeTensor(v1::DTYPE_F32, shape, values);
}

v1::Tensor I64Tensor(const std::vector<int64_t>& shape, const std::vector<int64_t>& values) {
  return MakeTensor(v1::DTYPE_I64, shape, values);
}

std::vector<float> F32Values(const v1::Tensor& tensor) {
  std::vector<float> values(tensor.data().size() / sizeof(float));
  std::memcpy(values.data(), tensor.data().data(), values.size() * sizeof(float));
  return values;
}

}  // namespace expertd::testing
