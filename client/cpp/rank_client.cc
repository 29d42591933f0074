// The streaming calls of RankClient.
#include "client/cpp/rank_client.h"

#include <algorithm>

#include "base/error.h"
#include "base/strings.h"
#include "client/cpp/tensor.h"

namespace expertd::client {
namespace {

// Half of what the daemon takes: the next one can be on its way while this one is copied.
constexpr size_t kPutChunkBytes = size_t{2} << 20;

}  // namespace

absl::StatusOr<ParameterShard> RankClient::GetParameter(const v1::GetParameterRequest& request,
                                                        absl::Time deadline) {
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(deadline));
  ParameterShard shard;
  std::string data;
  bool first = true;
  auto reader = layers_->GetParameter(&context, request);
  for (v1::GetParameterResponse chunk; reader->Read(&chunk); first = false) {
    if (first) {
      shard.tensor = chunk.tensor();
      shard.slice = chunk.slice();
      shard.weights_version = chunk.weights_version();
    }
    data += chunk.chunk();
  }
  const absl::Status status = FromGrpc(reader->Finish(), origin_);
  if (!status.ok()) return status;
  const int64_t need = PayloadBytes(shard.tensor);
  if (first || static_cast<int64_t>(data.size()) != need) {
    return Error(Reason::kInternal)
        .Text(ToString(origin_), ": parameter ", request.parameter(), ": got ", data.size(),
              " bytes, need ", need);
  }
  shard.tensor.set_data(std::move(data));
  return shard;
}

absl::StatusOr<uint64_t> RankClient::PutTensor(const std::string& buffer_id,
                                               const v1::Tensor& tensor, absl::Time deadline) {
  const std::string& data = tensor.data();
  const bool zeros = tensor.payload_case() == v1::Tensor::PAYLOAD_NOT_SET;
  if (!zeros && static_cast<int64_t>(data.size()) != PayloadBytes(tensor)) {
    return Error(Reason::kPayloadSizeMismatch)
        .Text("tensor ", buffer_id, ": got ", data.size(), " bytes, need ", PayloadBytes(tensor));
  }
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(deadline));
  v1::PutTensorResponse response;
  auto writer = tensors_->PutTensor(&context, &response);
  v1::PutTensorRequest request;
  request.set_buffer_id(buffer_id);
  request.mutable_tensor()->set_dtype(tensor.dtype());
  *request.mutable_tensor()->mutable_shape() = tensor.shape();
  request.set_zeros(zeros);
  // A write that fails means that the daemon has answered: Finish says what.
  bool open = writer->Write(request);
  for (size_t sent = 0; open && sent < data.size(); sent += kPutChunkBytes) {
    request.Clear();
    request.set_offset_bytes(sent);
    request.set_chunk(data.data() + sent, std::min(kPutChunkBytes, data.size() - sent));
    open = writer->Write(request);
  }
  if (open) writer->WritesDone();
  const absl::Status status = FromGrpc(writer->Finish(), origin_);
  if (!status.ok()) return status;
  return response.epoch();
}

absl::StatusOr<v1::Tensor> RankClient::GetTensor(const std::string& buffer_id,
                                                 absl::Time deadline) {
  v1::GetTensorRequest request;
  request.mutable_buffer()->set_buffer_id(buffer_id);
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(deadline));
  v1::Tensor tensor;
  std::string data;
  auto reader = tensors_->GetTensor(&context, request);
  for (v1::GetTensorResponse chunk; reader->Read(&chunk);) {
    if (chunk.has_tensor()) {
      tensor = std::move(*chunk.mutable_tensor());
      data.reserve(static_cast<size_t>(PayloadBytes(tensor)));
    }
    data += chunk.chunk();
  }
  const absl::Status status = FromGrpc(reader->Finish(), origin_);
  if (!status.ok()) return status;
  if (static_cast<int64_t>(data.size()) != PayloadBytes(tensor)) {
    return Error(Reason::kInternal)
        .Text(ToString(origin_), ": tensor ", buffer_id, ": got ", data.size(), " bytes, need ",
              PayloadBytes(tensor));
  }
  tensor.set_data(std::move(data));
  return tensor;
}

}  // namespace expertd::client
