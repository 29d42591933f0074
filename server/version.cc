// The definitions come from CMakeLists.txt.
#include "server/version.h"

namespace expertd::server {

std::string_view Version() { return EXPERTD_VERSION; }

std::string_view Build() { return EXPERTD_BUILD; }

}  // namespace expertd::server
