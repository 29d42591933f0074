// Maps the errors of starting to exit codes.
#include "server/exit_code.h"

#include "base/error.h"

namespace expertd::server {

ExitCode ExitCodeOf(const absl::Status& status) {
  if (status.ok()) return ExitCode::kOk;
  if (absl::IsAlreadyExists(status)) return ExitCode::kAddressInUse;
  switch (ReasonOf(status)) {
    case Reason::kConfigInvalid:
      return ExitCode::kUsage;
    case Reason::kBackendUnsupported:
      return ExitCode::kDeviceUnavailable;
    case Reason::kDeviceFault:
      return ExitCode::kDeviceFault;
    default:
      return ExitCode::kInternal;
  }
}

std::string ExitCodeHelp() {
  return "  0  stopped as asked\n"
         "  1  internal error\n"
         "  2  bad flag, environment variable or config file\n"
         "  3  an address to listen on is in use\n"
         "  4  the device, or what was asked of it, is not available\n"
         "  5  device fault: restart\n"
         "  6  the device thread was stuck past every limit: restart\n";
}

}  // namespace expertd::server
