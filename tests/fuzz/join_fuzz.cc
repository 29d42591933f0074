// Fuzzes what a rank makes of a peer's join record: decoding, encoding again, comparing.
#include <vector>

#include "server/engine/join.h"
#include "tests/fuzz/fuzz_input.h"

namespace {

using expertd::engine::JoinLayer;
using expertd::engine::JoinRecord;

// What the fuzzed peer is compared with.
JoinRecord Honest(int64_t slot) {
  JoinRecord record;
  record.version = "1.2.3";
  record.slot = slot;
  record.bootstrap_fingerprint = "f";
  record.config = {{"ep_size", "2"}};
  JoinLayer layer;
  layer.layer_id = "a";
  layer.fingerprint = 7;
  layer.weights_version = 1;
  layer.local_experts = 4;
  record.layers = {layer};
  return record;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto decoded = expertd::engine::DecodeJoin(expertd::fuzz::AsText(data, size));
  if (!decoded.ok()) return 0;
  const std::string bytes = expertd::engine::EncodeJoin(*decoded);
  const auto again = expertd::engine::DecodeJoin(bytes);
  FUZZ_CHECK(again.ok() && expertd::engine::EncodeJoin(*again) == bytes);

  const std::vector<JoinRecord> records = {Honest(0), *decoded};
  const bool fits = expertd::engine::ConcludeJoin(records, 0).ok();
  FUZZ_CHECK(expertd::engine::ConcludeJoin(records, 1).ok() == fits);
  for (const auto& [layer, reason] : expertd::engine::LayersToRestore(records, 0)) {
    FUZZ_CHECK(layer == "a" && !reason.empty());
  }
  for (const std::string& layer : expertd::engine::LayersWithInvalidGradients(records, 0)) {
    FUZZ_CHECK(layer == "a");
  }
  return 0;
}
