// Reads a ServerConfig message from flags, environment and file, each value with where it came
// from.
#ifndef SERVER_CONFIG_SOURCE_H_
#define SERVER_CONFIG_SOURCE_H_

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "expertd/v1/server_config.pb.h"
#include "server/config.h"

namespace expertd::server {

// Everything that was set, the strongest source winning, and every problem found on the way.
struct ConfigSources {
  v1::ServerConfig message;
  std::map<std::string, std::string> origins;  // field name -> "--slot", "EXPERTD_SLOT", "FILE"
  std::vector<std::string> problems;
  Command command = Command::kServe;
};

ConfigSources ReadSources(const std::vector<std::string>& args, const Environment& environment);

// "EXPERTD_PROBE_LISTEN" of "probe_listen".
std::string EnvironmentName(std::string_view field);

// The field's value as text; a string as it is.
std::string FieldText(const v1::ServerConfig& message, const std::string& field);

}  // namespace expertd::server

#endif  // SERVER_CONFIG_SOURCE_H_
