// Random identifiers from getrandom(2), FNV-1a fingerprints, and keyed digests by OpenSSL.
#include "base/ids.h"

#include <openssl/evp.h>
#include <openssl/hmac.h>
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

uint64_t KeyedDigest(std::string_view key, std::string_view message) {
  unsigned char digest[EVP_MAX_MD_SIZE] = {};
  unsigned int size = 0;
  HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()),
       reinterpret_cast<const unsigned char*>(message.data()), message.size(), digest, &size);
  uint64_t value = 0;
  for (int i = 0; i < 8; ++i) value = (value << 8) | digest[i];
  return value;
}

std::string Hex(uint64_t value) { return absl::StrFormat("%016x", value); }

}  // namespace expertd
