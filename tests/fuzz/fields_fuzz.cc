// Fuzzes DecodeFields: any bytes are fields or refused, and fields survive being sent on.
#include "server/engine/config.h"
#include "tests/fuzz/fuzz_input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace expertd;  // NOLINT: a file of one function
  const auto fields = engine::DecodeFields(fuzz::AsText(data, size));
  if (!fields.ok()) return 0;
  const auto again = engine::DecodeFields(engine::EncodeFields(*fields));
  FUZZ_CHECK(again.ok() && *again == *fields);
  FUZZ_CHECK(engine::CompareFields(Reason::kConfigMismatch, "it", {*fields, *fields}).ok());
  const bool alone = engine::CompareFields(Reason::kConfigMismatch, "it", {*fields, {}}).ok();
  FUZZ_CHECK(alone == fields->empty());
  return 0;
}
