// Fuzzes the daemon's config: a textproto file, and after a zero byte one flag per line.
#include <sys/mman.h>
#include <unistd.h>

#include <sstream>
#include <string>
#include <vector>

#include "base/strings.h"
#include "server/config.h"
#include "tests/fuzz/fuzz_input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace expertd;  // NOLINT: a file of one function
  const std::string_view input = fuzz::AsText(data, size);
  const size_t zero = input.find('\0');
  const std::string_view file = input.substr(0, zero);
  std::vector<std::string> args;
  if (zero != std::string_view::npos) {
    std::istringstream lines{std::string(input.substr(zero + 1))};
    for (std::string line; std::getline(lines, line);) {
      if (line.find("config") == std::string::npos) args.push_back(line);  // opens no other file
    }
  }
  const int descriptor = memfd_create("config", 0);
  FUZZ_CHECK(descriptor >= 0);
  FUZZ_CHECK(write(descriptor, file.data(), file.size()) == static_cast<ssize_t>(file.size()));
  args.insert(args.begin(), StrCat("--config=/proc/self/fd/", descriptor));
  const auto line = server::ParseCommandLine(args, {});
  close(descriptor);
  if (!line.ok()) {
    FUZZ_CHECK(!line.status().message().empty());
    return 0;
  }
  if (line->command != server::Command::kServe) return 0;
  const server::Config& config = line->config;
  FUZZ_CHECK(config.slot >= 0 && config.queue_capacity > 0 && config.bytes_in_flight > 0);
  FUZZ_CHECK(config.simulate >= 0 && config.drain_seconds >= 0);
  FUZZ_CHECK(!line->values.empty());
  return 0;
}
