// The expertd program; everything it does is in process.cc.
#include <string>
#include <vector>

#include "server/process.h"

extern char** environ;

int main(int argc, char** argv) {
  expertd::server::Environment environment;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const size_t equals = text.find('=');
    if (equals != std::string::npos) environment[text.substr(0, equals)] = text.substr(equals + 1);
  }
  const std::vector<std::string> args(argv + 1, argv + argc);
  return static_cast<int>(expertd::server::RunProcess(args, environment));
}
