// Fuzzes requests as they come from the wire: parsed, then decoded into operations.
#include "base/error.h"
#include "expertd/v1/control_service.pb.h"
#include "expertd/v1/layer_service.pb.h"
#include "expertd/v1/peer_service.pb.h"
#include "expertd/v1/step_service.pb.h"
#include "google/protobuf/stubs/logging.h"
#include "server/rpc/convert_config.h"
#include "server/rpc/convert_group.h"
#include "server/rpc/convert_layer.h"
#include "server/rpc/convert_sharding.h"
#include "server/rpc/convert_step.h"
#include "server/rpc/put_parser.h"
#include "tests/fuzz/fuzz_input.h"

namespace {

namespace engine = expertd::engine;
namespace rpc = expertd::rpc;
namespace v1 = expertd::v1;
using expertd::fuzz::Input;

// What decoding promises of every tensor it lets through.
void CheckTensor(const engine::TensorInput& tensor) {
  if (!tensor.present()) return;
  int64_t bytes = static_cast<int64_t>(expertd::DTypeSize(tensor.dtype));
  for (int64_t size : tensor.shape) {
    FUZZ_CHECK(size >= 0);
    FUZZ_CHECK(!__builtin_mul_overflow(bytes, size, &bytes));
  }
  FUZZ_CHECK(bytes == tensor.bytes);
  if (tensor.buffer.present()) {
    FUZZ_CHECK(tensor.data == nullptr && tensor.buffer.tensor == nullptr);
    return;
  }
  // The whole payload can be read.
  unsigned sum = 0;
  for (int64_t i = 0; i < tensor.bytes; ++i) sum += static_cast<const uint8_t*>(tensor.data)[i];
  FUZZ_CHECK(sum <= 255u * static_cast<unsigned>(tensor.bytes));
}

void CheckTensors(const engine::ForwardOp& op) {
  CheckTensor(op.tokens);
  CheckTensor(op.topk_ids);
  CheckTensor(op.topk_weights);
  CheckTensor(op.router_logits);
}
void CheckTensors(const engine::BackwardOp& op) { CheckTensor(op.output_gradient); }
void CheckTensors(const engine::PrepareOp& op) { CheckTensor(op.topk_ids); }
void CheckTensors(const engine::DispatchOp& op) {
  CheckTensor(op.tokens);
  CheckTensor(op.topk_weights);
}
void CheckTensors(const engine::CombineOp& op) {
  CheckTensor(op.expert_output);
  CheckTensor(op.slot_weights);
}
void CheckTensors(const engine::DispatchBackwardOp& op) {
  CheckTensor(op.recv_tokens_gradient);
  CheckTensor(op.recv_weights_gradient);
}
void CheckTensors(const engine::CombineBackwardOp& op) {
  CheckTensor(op.output_gradient);
  CheckTensor(op.slot_weights);
}
void CheckTensors(const engine::Operation&) {}

template <typename Request>
bool Parse(Input& input, Request* request) {
  return request->ParseFromArray(input.Rest().data(), static_cast<int>(input.Rest().size()));
}

template <typename Request, typename Op>
void Decode(Input& input, Op op) {
  Request request;
  if (!Parse(input, &request)) return;
  (void)rpc::FromProto(request.has_header() ? &request.header() : nullptr);
  const absl::Status status = rpc::Decode(request, &op);
  FUZZ_CHECK(status.ok() || status.message().size() > 0);
  CheckTensors(op);
}

void Group(Input& input) {
  v1::JoinGroupRequest join;
  if (Parse(input, &join)) {
    if (const auto request = rpc::FromProto(join); request.ok()) {
      (void)engine::ValidateGroupConfig(engine::WithDefaults(request->config, "gloo"), 64 << 20);
    }
  }
  v1::DeliverRequest deliver;
  if (Parse(input, &deliver)) {
    v1::DeliverRequest again;
    rpc::ToProto(rpc::FromProto(deliver), &again);
    FUZZ_CHECK(again.record() == deliver.record() && again.epoch() == deliver.epoch());
  }
  v1::CheckShardingRequest check;
  if (Parse(input, &check)) (void)rpc::FromProto(check);
}

// A PutTensor stream of up to 8 messages of the same bytes, each cut shorter than the one before.
void Put(Input& input) {
  rpc::PutParser parser;
  int64_t received = 0;
  for (int i = 0; i < 8; ++i) {
    v1::PutTensorRequest message;
    const auto rest = input.Rest();
    if (!message.ParseFromArray(rest.data(), static_cast<int>(rest.size()) / (i + 1))) return;
    if (i > 0) {
      message.clear_buffer_id();
      message.clear_tensor();
    }
    const auto piece = parser.Accept(message);
    if (!piece.ok()) return;
    FUZZ_CHECK(parser.begun() && parser.info().bytes >= 0);
    FUZZ_CHECK(piece->offset == received);
    received += static_cast<int64_t>(piece->bytes.size());
    FUZZ_CHECK(received <= parser.info().bytes);
  }
  FUZZ_CHECK(!parser.End().ok() || received == parser.info().bytes ||
             parser.fill() == engine::TensorStore::Fill::kZeros);
}

// A layer's config, all the way through validation beside a large group.
void Layer(Input& input) {
  v1::CreateLayerRequest request;
  engine::CreateLayerOp op;
  if (!Parse(input, &request) || !rpc::Decode(request, &op).ok()) return;
  engine::GroupConfig group;
  group.ep_size = 4;
  group.max_tokens_per_rank = 1 << 20;
  group.max_hidden = 1 << 20;
  group.max_top_k = 32;
  group.max_experts = 1 << 16;
  group = engine::WithDefaults(group, "gloo");
  const engine::LayerConfig layer = engine::WithDefaults(op.config);
  (void)engine::ValidateLayerConfig(layer, group, true);
  (void)engine::LayerFingerprint(layer);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // Text that is no UTF-8 is refused by the parser, which also logs it.
  [[maybe_unused]] static auto* const logger = google::protobuf::SetLogHandler(nullptr);
  Input input(data, size);
  switch (input.Byte() % 16) {
    case 0:
      return Decode<v1::ForwardRequest>(input, engine::ForwardOp()), 0;
    case 1:
      return Decode<v1::BackwardRequest>(input, engine::BackwardOp()), 0;
    case 2:
      return Decode<v1::PrepareRequest>(input, engine::PrepareOp()), 0;
    case 3:
      return Decode<v1::DispatchRequest>(input, engine::DispatchOp()), 0;
    case 4:
      return Decode<v1::CombineRequest>(input, engine::CombineOp()), 0;
    case 5:
      return Decode<v1::DispatchBackwardRequest>(input, engine::DispatchBackwardOp()), 0;
    case 6:
      return Decode<v1::CombineBackwardRequest>(input, engine::CombineBackwardOp()), 0;
    case 7:
      return Decode<v1::CreateLayerRequest>(input, engine::CreateLayerOp()), 0;
    case 8:
      return Decode<v1::InitializeWeightsRequest>(input, engine::InitializeWeightsOp()), 0;
    case 9:
      return Decode<v1::ConfigureOptimizerRequest>(input, engine::ConfigureOptimizerOp()), 0;
    case 10:
      return Decode<v1::ApplyGradientsRequest>(input, engine::ApplyGradientsOp()), 0;
    case 11:
      return Layer(input), 0;
    case 15:
      return Put(input), 0;
    default:
      return Group(input), 0;
  }
}
