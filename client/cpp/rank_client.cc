// The one streaming call of RankClient.
#include "client/cpp/rank_client.h"

#include "base/error.h"
#include "base/strings.h"
#include "client/cpp/tensor.h"

namespace expertd::client {

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

}  // namespace expertd::client
