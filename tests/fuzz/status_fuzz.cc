// Fuzzes DecodeStatus: any bytes give a status, and a status survives being sent on.
#include "base/error.h"
#include "tests/fuzz/fuzz_input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace expertd;  // NOLINT: a file of one function
  const absl::Status status = DecodeStatus(fuzz::AsText(data, size));
  const std::string bytes = EncodeStatus(status);
  const absl::Status again = DecodeStatus(bytes);
  FUZZ_CHECK(again.ok() == status.ok());
  FUZZ_CHECK(again.code() == status.code());
  FUZZ_CHECK(again.message() == status.message());
  FUZZ_CHECK(ReasonOf(again) == ReasonOf(status));
  FUZZ_CHECK(EncodeStatus(again) == bytes);
  FUZZ_CHECK(WithContext(status, "here").code() == status.code());
  return 0;
}
