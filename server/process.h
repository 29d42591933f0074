// The life of the expertd process: command line, daemons, signals, exit code.
#ifndef SERVER_PROCESS_H_
#define SERVER_PROCESS_H_

#include <string>
#include <vector>

#include "server/config.h"
#include "server/exit_code.h"

namespace expertd::server {

// Runs until SIGTERM or SIGINT. REQUIRES: no other thread exists yet.
ExitCode RunProcess(const std::vector<std::string>& args, const Environment& environment);

}  // namespace expertd::server

#endif  // SERVER_PROCESS_H_
