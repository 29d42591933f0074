// How the process says why it ended.
#ifndef SERVER_EXIT_CODE_H_
#define SERVER_EXIT_CODE_H_

#include <string>

#include "absl/status/status.h"

namespace expertd::server {

enum class ExitCode {
  kOk = 0,
  kInternal = 1,
  kUsage = 2,
  kAddressInUse = 3,
  kDeviceUnavailable = 4,
  kDeviceFault = 5,
  kStuck = 6,
};

// Of a daemon that could not start.
ExitCode ExitCodeOf(const absl::Status& status);

// One line per code, for --help.
std::string ExitCodeHelp();

}  // namespace expertd::server

#endif  // SERVER_EXIT_CODE_H_
