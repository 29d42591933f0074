// Buffers and timed operations of one benchmark rank; its checks are in bench_check.cc.
#include "tests/bench/bench_rank.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <random>
#include <utility>

#include "base/memory_plan.h"
#include "base/status_macros.h"
#include "kernels/cpu/float_convert.h"

namespace expertd::bench {
namespace {

constexpr std::chrono::seconds kOpLimit{120};

absl::Status Upload(Device& device, DeviceBuffer& buffer, const void* data, int64_t bytes) {
  ASSIGN_OR_RETURN(buffer, device.Allocate(bytes));
  return device.CopyToDevice(buffer.data(), data, bytes);
}

}  // namespace

float TokenValue(int64_t rank, int64_t token, int64_t column) {
  // 8 significant bits, spread so that rows differ in most columns.
  const uint64_t hash =
      (static_cast<uint64_t>(rank) * 1000003u + static_cast<uint64_t>(token)) * 2654435761u +
      static_cast<uint64_t>(column) * 40503u;
  return static_cast<float>(static_cast<int>((hash >> 7) & 255u) - 127) / 64.0f;
}

absl::StatusOr<std::unique_ptr<BenchRank>> BenchRank::Create(const RankOptions& options,
                                                             const Workload& workload,
                                                             const Routing& routing,
                                                             const EpBootstrap& bootstrap) {
  std::unique_ptr<BenchRank> rank(new BenchRank(options, workload));
  ASSIGN_OR_RETURN(rank->device_, CreateDevice(options.device));
  GroupSizes sizes;
  sizes.ranks = options.world;
  sizes.max_tokens_per_rank = workload.tokens_per_rank;
  sizes.max_hidden = workload.hidden;
  sizes.max_top_k = workload.top_k;
  sizes.max_experts = workload.experts_per_rank * options.world;
  EpGroupConfig config;
  config.rank = options.rank;
  config.world = options.world;
  config.max_tokens_per_rank = workload.tokens_per_rank;
  ASSIGN_OR_RETURN(config.max_recv_rows, RecvRows(sizes));
  config.max_hidden = workload.hidden;
  config.max_top_k = workload.top_k;
  config.max_experts = sizes.max_experts;
  config.max_token_dtype = options.dtype;
  config.comm_sm_count = options.comm_sms;
  ASSIGN_OR_RETURN(rank->ep_, CreateEpBackend(options.backend, *rank->device_, config, bootstrap));
  MlpConfig mlp;
  mlp.local_experts = workload.experts_per_rank;
  mlp.hidden = workload.hidden;
  mlp.intermediate = workload.intermediate;
  mlp.token_dtype = options.dtype;
  mlp.weight_dtype = options.dtype;
  ASSIGN_OR_RETURN(rank->mlp_, CreateExpertMlp(options.mlp, *rank->device_, mlp));
  RETURN_IF_ERROR(rank->Allocate(routing));
  return rank;
}

absl::Status BenchRank::FillRandom(DeviceBuffer& buffer, int64_t count, float scale,
                                   uint64_t seed) {
  const auto element = static_cast<int64_t>(DTypeSize(options_.dtype));
  ASSIGN_OR_RETURN(buffer, device_->Allocate(count * element));
  // One random block, repeated: filling gigabytes with fresh numbers would take longer than the
  // benchmark.
  constexpr int64_t kBlock = 1 << 20;
  std::mt19937_64 rng(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> values(static_cast<size_t>(std::min(count, kBlock)));
  for (float& value : values) value = normal(rng);
  std::vector<std::byte> block(values.size() * static_cast<size_t>(element));
  RowFromF32(options_.dtype, values.data(), static_cast<int64_t>(values.size()), block.data());
  for (int64_t at = 0; at < count; at += kBlock) {
    const int64_t n = std::min(kBlock, count - at);
    RETURN_IF_ERROR(
        device_->CopyToDevice(buffer.as<std::byte>() + at * element, block.data(), n * element));
  }
  return absl::OkStatus();
}

absl::Status BenchRank::Allocate(const Routing& routing) {
  const Workload& w = workload_;
  const int64_t t = w.tokens_per_rank;
  const auto element = static_cast<int64_t>(DTypeSize(options_.dtype));
  std::vector<float> row(static_cast<size_t>(w.hidden));
  ASSIGN_OR_RETURN(tokens_, device_->Allocate(t * w.hidden * element));
  std::vector<std::byte> bytes(static_cast<size_t>(t * w.hidden * element));
  for (int64_t i = 0; i < t; ++i) {
    for (int64_t c = 0; c < w.hidden; ++c) {
      row[static_cast<size_t>(c)] = TokenValue(options_.rank, i, c);
    }
    RowFromF32(options_.dtype, row.data(), w.hidden, bytes.data() + i * w.hidden * element);
  }
  RETURN_IF_ERROR(Upload(*device_, tokens_, bytes.data(), static_cast<int64_t>(bytes.size())));
  RETURN_IF_ERROR(Upload(*device_, ids_, routing.ids.data(), t * w.top_k * 8));
  RETURN_IF_ERROR(Upload(*device_, topk_weights_, routing.weights.data(), t * w.top_k * 4));
  const int64_t l = w.experts_per_rank;
  const int64_t gate_up = l * w.hidden * 2 * w.intermediate;
  const int64_t down = l * w.intermediate * w.hidden;
  const float gate_up_scale = 1.0f / std::sqrt(static_cast<float>(w.hidden));
  const float down_scale = 1.0f / std::sqrt(static_cast<float>(w.intermediate));
  RETURN_IF_ERROR(FillRandom(gate_up_, gate_up, gate_up_scale, options_.seed + 11));
  RETURN_IF_ERROR(FillRandom(down_, down, down_scale, options_.seed + 12));
  RETURN_IF_ERROR(FillRandom(grad_y_, t * w.hidden, 1.0f, options_.seed + 13));
  weights_ = {gate_up_.data(), down_.data(), nullptr, nullptr, 1};
  ASSIGN_OR_RETURN(y_, device_->Allocate(t * w.hidden * element));
  ASSIGN_OR_RETURN(grad_x_, device_->Allocate(t * w.hidden * element));
  ASSIGN_OR_RETURN(grad_topk_, device_->Allocate(t * w.top_k * 4));
  // Receive buffers are as large as this routing needs; Prepare says how large that is.
  RETURN_IF_ERROR(Prepare());
  const int64_t rows = handle_->counts().total;
  capacity_ = rows;
  ASSIGN_OR_RETURN(recv_x_, device_->Allocate(rows * w.hidden * element));
  ASSIGN_OR_RETURN(recv_w_, device_->Allocate(rows * 4));
  ASSIGN_OR_RETURN(h_, device_->Allocate(rows * 2 * w.intermediate * element));
  ASSIGN_OR_RETURN(z_, device_->Allocate(rows * w.hidden * element));
  ASSIGN_OR_RETURN(grad_out_, device_->Allocate(rows * w.hidden * element));
  ASSIGN_OR_RETURN(grad_h_, device_->Allocate(rows * 2 * w.intermediate * element));
  ASSIGN_OR_RETURN(grad_recv_x_, device_->Allocate(rows * w.hidden * element));
  ASSIGN_OR_RETURN(grad_w_, device_->Allocate(rows * 4));
  ASSIGN_OR_RETURN(grad_gate_up_, device_->Allocate(gate_up * 4));
  ASSIGN_OR_RETURN(grad_down_, device_->Allocate(down * 4));
  RETURN_IF_ERROR(device_->Zero(grad_gate_up_.data(), grad_gate_up_.size()));
  return device_->Zero(grad_down_.data(), grad_down_.size());
}

OpContext BenchRank::NextContext() { return {++sequence_, Clock::Real().Now() + kOpLimit}; }

// A copy to the host waits for everything queued before it.
absl::Status BenchRank::WaitForDevice() {
  float word = 0;
  return device_->CopyToHost(&word, topk_weights_.data(), sizeof(word));
}

ExpertSegments BenchRank::Segments() const {
  const RecvCounts& counts = handle_->counts();
  return {&counts.tokens_per_expert, &counts.padded_per_expert, counts.total};
}

Matrix BenchRank::Rows(DeviceBuffer& buffer, int64_t rows, int64_t cols) const {
  return {buffer.data(), options_.dtype, rows, cols};
}

absl::Status BenchRank::QueuePrepare() {
  PrepareArgs args;
  args.routing = {ids_.data(), DType::kI64, workload_.tokens_per_rank, workload_.top_k};
  args.expert_count = workload_.experts_per_rank * options_.world;
  args.alignment = options_.alignment;
  ASSIGN_OR_RETURN(handle_, ep_->Prepare(NextContext(), args));
  return absl::OkStatus();
}

absl::Status BenchRank::QueueDispatch() {
  return ep_->Dispatch(
      NextContext(), *handle_, Rows(tokens_, workload_.tokens_per_rank, workload_.hidden),
      topk_weights_.as<float>(), Rows(recv_x_, capacity_, workload_.hidden), recv_w_.as<float>());
}

absl::Status BenchRank::QueueCombine() {
  return ep_->Combine(NextContext(), *handle_, Rows(z_, capacity_, workload_.hidden),
                      recv_w_.as<float>(), Rows(y_, workload_.tokens_per_rank, workload_.hidden));
}

absl::Status BenchRank::Prepare() { return PrepareBurst(1); }
absl::Status BenchRank::Dispatch() { return DispatchBurst(1); }
absl::Status BenchRank::Combine() { return CombineBurst(1); }

absl::Status BenchRank::PrepareBurst(int count) {
  for (int i = 0; i < count; ++i) RETURN_IF_ERROR(QueuePrepare());
  return WaitForDevice();
}

absl::Status BenchRank::DispatchBurst(int count) {
  for (int i = 0; i < count; ++i) RETURN_IF_ERROR(QueueDispatch());
  return WaitForDevice();
}

absl::Status BenchRank::CombineBurst(int count) {
  for (int i = 0; i < count; ++i) RETURN_IF_ERROR(QueueCombine());
  return WaitForDevice();
}

absl::Status BenchRank::RoundTripBurst(int count) {
  for (int i = 0; i < count; ++i) {
    RETURN_IF_ERROR(QueuePrepare());
    RETURN_IF_ERROR(QueueDispatch());
    RETURN_IF_ERROR(QueueCombine());
  }
  return WaitForDevice();
}

absl::Status BenchRank::Experts() {
  MlpForwardArgs args;
  args.segments = Segments();
  args.weights = weights_;
  args.recv_x = recv_x_.data();
  args.recv_w = recv_w_.as<float>();
  args.h = h_.data();
  args.z = z_.data();
  RETURN_IF_ERROR(mlp_->Forward(args));
  return WaitForDevice();
}

absl::Status BenchRank::Forward() {
  RETURN_IF_ERROR(Prepare());
  RETURN_IF_ERROR(Dispatch());
  RETURN_IF_ERROR(Experts());
  return Combine();
}

absl::Status BenchRank::Backward() {
  const int64_t t = workload_.tokens_per_rank;
  RETURN_IF_ERROR(ep_->CombineBackward(NextContext(), *handle_, Rows(grad_y_, t, workload_.hidden),
                                       nullptr, Rows(grad_out_, capacity_, workload_.hidden)));
  MlpDgradArgs dgrad;
  dgrad.segments = Segments();
  dgrad.weights = weights_;
  dgrad.h = h_.data();
  dgrad.recv_w = recv_w_.as<float>();
  dgrad.grad_out = grad_out_.data();
  dgrad.grad_h = grad_h_.data();
  dgrad.grad_recv_x = grad_recv_x_.data();
  dgrad.grad_w = grad_w_.as<float>();
  RETURN_IF_ERROR(mlp_->Dgrad(dgrad));
  RETURN_IF_ERROR(ep_->DispatchBackward(
      NextContext(), *handle_, Rows(grad_recv_x_, capacity_, workload_.hidden), grad_w_.as<float>(),
      Rows(grad_x_, t, workload_.hidden), grad_topk_.as<float>()));
  MlpWgradArgs wgrad;
  wgrad.segments = Segments();
  wgrad.recv_x = recv_x_.data();
  wgrad.h = h_.data();
  wgrad.recv_w = recv_w_.as<float>();
  wgrad.grad_out = grad_out_.data();
  wgrad.grad_h = grad_h_.data();
  wgrad.gradients = {grad_gate_up_.as<float>(), grad_down_.as<float>(), nullptr, nullptr};
  RETURN_IF_ERROR(mlp_->Wgrad(wgrad));
  return WaitForDevice();
}

}  // namespace expertd::bench
