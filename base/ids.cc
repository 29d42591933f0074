// Random identifiers from getrandom(2), and FNV-1a fingerprints.
#include "base/ids.h"

#include <sys/random.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>

#include "absl/strings/str_format.h"

namespace expertd {

std::string RandomBytes(size_t size) {
  std::string bytes(size, '\0');
  size_t filled = 0;
  while (filled < size) {
    const ssize_t got = getrandom(bytes.data() + filled, size - filled, 0);
    if (got > 0) {
      filled += static_cast<size_t>(got);
    } else if (errno != EINTR) {
      // Without the kernel's entropy no identity is safe to hand out.
      std::perror("getrandom");
      std::abort();
    }
  }
  return bytes;
}

uint64_t RandomId() {
  uint64_t value = 0;
  while (value == 0) {
    for (unsigned char byte : RandomBytes(sizeof(value))) value = (value << 8) | byte;
  }
  return value;
}

uint64_t Fingerprint(std::string_view bytes) {
  uint64_t hash = 14695981039346656037ull;
  for (unsigned char byte : bytes) hash = (hash ^ byte) * 1099511628211ull;
  return hash;
}

std::string Hex(uint64_t value) { return absl::StrFormat("%016x", value); }

}  // namespace expertd
