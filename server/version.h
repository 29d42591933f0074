// Version of the product, and of this build of it.
#ifndef SERVER_VERSION_H_
#define SERVER_VERSION_H_

#include <string_view>

namespace expertd::server {

// "major.minor.patch"; daemons of one group may differ by one minor version.
std::string_view Version();

// What the binary was built from and with: commit, compiler, build type.
std::string_view Build();

}  // namespace expertd::server

#endif  // SERVER_VERSION_H_
