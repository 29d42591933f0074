// Fuzzes what a rank makes of a peer's arrival record: decoding, encoding again, concluding.
#include <vector>

#include "server/engine/arrival.h"
#include "tests/fuzz/fuzz_input.h"

namespace {

using expertd::engine::ArrivalRecord;

bool Same(const ArrivalRecord& a, const ArrivalRecord& b) {
  return a.epoch == b.epoch && a.sequence == b.sequence && a.op == b.op &&
         a.layer_fingerprint == b.layer_fingerprint && a.forward_sequence == b.forward_sequence &&
         a.dtype == b.dtype && a.token_count == b.token_count &&
         a.gradients_valid == b.gradients_valid && a.weights_version == b.weights_version &&
         a.arguments == b.arguments && a.status.code() == b.status.code();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto decoded = expertd::engine::DecodeArrival(expertd::fuzz::AsText(data, size));
  if (!decoded.ok()) return 0;
  const ArrivalRecord& record = *decoded;
  const auto again = expertd::engine::DecodeArrival(expertd::engine::EncodeArrival(record));
  FUZZ_CHECK(again.ok() && Same(record, *again));

  ArrivalRecord honest;
  honest.epoch = record.epoch;
  honest.sequence = record.sequence;
  const std::vector<ArrivalRecord> records = {honest, record, honest};
  const absl::Status first = expertd::engine::Conclude(records, 0);
  const absl::Status third = expertd::engine::Conclude(records, 2);
  FUZZ_CHECK(first == third);                     // those who know the same conclude alike
  FUZZ_CHECK(record.status.ok() || !first.ok());  // a refusal ends the sequence for all
  FUZZ_CHECK(expertd::engine::Conclude(records, 1).ok() == first.ok());
  FUZZ_CHECK(expertd::engine::Conclude({record, record}, 0) == record.status || record.status.ok());
  return 0;
}
